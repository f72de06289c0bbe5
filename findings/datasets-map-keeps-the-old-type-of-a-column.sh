#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1, Python 3.11 (2026-11-30).
#
# `Dataset.map` may give a column new values. One would expect to read what the function returned, or an error. The column
# keeps its old type wherever pyarrow can convert to it: texts that look like numbers become numbers again ("007" is 7), and
# in a column of true and false every score but 0 becomes true. `IterableDataset.map` keeps what the function returned. It
# matters to whoever pads identifiers, or replaces "right or wrong" by a graded reward: 0.25 is trained as 1.
# Seen: "['007', '042'] -> [7, 42]; [0.0, 0.25] -> [False, True]; streamed: ['007', '042'] [0.0, 0.25]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0" "pyarrow==26.0.1"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
from datasets import Dataset, disable_progress_bars
disable_progress_bars()
rows = Dataset.from_dict({"id": [7, 42], "score": [False, True]})
def change(row):
    return {"id": f"{row['id']:03d}", "score": 0.25 if row["score"] else 0.0}
mapped, streamed = rows.map(change), list(rows.to_iterable_dataset().map(change))
seen = f"['007', '042'] -> {mapped['id'][:]}; [0.0, 0.25] -> {mapped['score'][:]}; "
seen += f"streamed: {[row['id'] for row in streamed]} {[row['score'] for row in streamed]}"
print(seen)
expected = "['007', '042'] -> [7, 42]; [0.0, 0.25] -> [False, True]; streamed: ['007', '042'] [0.0, 0.25]"
raise SystemExit(seen != expected)
PY
