#!/usr/bin/env bash
# datasets 5.2.0, pandas 3.1.1, numpy 2.4.6, Python 3.11 (2026-11-30).
#
# One would expect `Dataset.to_csv` to write a list as text that can be read back, or to refuse it. It writes what numpy
# prints: no commas, broken over several lines, and from 1,001 elements on only the first and last three, with dots between.
# It matters to whoever saves token ids or logprobs of long rollouts: the file is written without a word and most is gone.
# Seen: "1000 elements: 1000 numbers, dots False; 1001 elements: 6 numbers, dots True; [   0    1    2 ...  998  999 1000]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0" "pandas==3.1.1" "numpy==2.4.6"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import csv, re
from datasets import Dataset, disable_progress_bars
disable_progress_bars()
Dataset.from_dict({"ids": [list(range(1000)), list(range(1001))]}).to_csv("rows.csv")
cells = [row["ids"] for row in csv.DictReader(open("rows.csv", newline=""))]
seen = "; ".join(
    f"{size} elements: {len(re.findall('[0-9]+', cell))} numbers, dots {'...' in cell}"
    for size, cell in zip((1000, 1001), cells)
) + f"; {cells[1]}"
print(seen)
expected = "1000 elements: 1000 numbers, dots False; 1001 elements: 6 numbers, dots True; [   0    1    2 ...  998  999 1000]"
raise SystemExit(seen != expected)
PY
