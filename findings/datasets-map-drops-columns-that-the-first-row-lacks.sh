#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1, Python 3.11 (2026-11-30).
#
# A function for `Dataset.map` often returns `{}` where there is nothing to add. One would expect the other rows to keep
# what they got, with None in the first, or an error. The first row alone decides which columns are new: where it returns
# `{}`, the column is gone in all rows, without a word. A later row that lacks a column of the first one raises KeyError.
# `IterableDataset.map` keeps the column. It matters for labels that only some rows have.
# Seen: "columns: ['text']; streamed: [['text'], ['text', 'label'], ['text', 'label']]; first row with it: KeyError".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0" "pyarrow==26.0.1"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
from datasets import Dataset, disable_progress_bars
disable_progress_bars()
rows = Dataset.from_dict({"text": ["?", "2 + 2 = 4", "3 + 3 = 6"]})
def label(row):
    return {"label": row["text"].split("= ")[1]} if "=" in row["text"] else {}
columns = rows.map(label).column_names
streamed = [list(row) for row in rows.to_iterable_dataset().map(label)]
try:
    reverse = rows.select([1, 0, 2]).map(label).column_names
except KeyError as error:
    reverse = type(error).__name__
seen = f"columns: {columns}; streamed: {streamed}; first row with it: {reverse}"
print(seen)
expected = "columns: ['text']; streamed: [['text'], ['text', 'label'], ['text', 'label']]; first row with it: KeyError"
raise SystemExit(seen != expected)
PY
