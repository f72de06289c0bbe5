#!/usr/bin/env bash
# datasets 5.2.0, pandas 3.1.1, Python 3.11 (2026-11-30).
#
# One would expect a .jsonl file written by `Dataset.to_json` to hold the numbers of the dataset, as Python's own json does.
# It is written through pandas, which rounds to ten digits behind the point: a logprob of -1e-11 becomes -0.0, a learning
# rate of 5e-11 becomes 1e-10, and 0.1234567890123 is cut. `to_parquet` and `to_list` keep all digits. It matters where
# logprobs, weights or losses are saved and read again: a ratio of new and old logprobs is no longer 1.
# Seen: "[-1e-11, 5e-11, 0.1234567890123] -> [-0.0, 1e-10, 0.123456789]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0" "pandas==3.1.1"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import json
from datasets import Dataset, disable_progress_bars
disable_progress_bars()
values = [-1e-11, 5e-11, 0.1234567890123]
Dataset.from_dict({"x": values}).to_json("rows.jsonl")
read = [json.loads(line)["x"] for line in open("rows.jsonl")]
seen = f"{values} -> {read}"
print(seen)
raise SystemExit(seen != "[-1e-11, 5e-11, 0.1234567890123] -> [-0.0, 1e-10, 0.123456789]")
PY
