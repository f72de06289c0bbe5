#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1, duckdb 2.0.0, polars 2.1.0, Python 3.11 (2026-11-30).
#
# JSON has no dates, so one would expect a text in a .jsonl file to stay a text. Where every row of a column looks like a
# date, `load_dataset("json")` makes it a timestamp: the answer "2024-01-01" is put into a prompt or compared with a
# completion as "2024-01-01 00:00:00". One row with another text, and all rows stay as they are: the type depends on the
# rows of the file. duckdb makes dates, times and UUIDs of such texts, "09:30" becomes 09:30:00; polars and Python's json
# keep the text.
# Seen: "datasets: 2024-01-01 00:00:00; with one other text: 2024-01-01; duckdb: 2024-01-01 (date), 09:30:00 (time); polars:
# 2024-01-01".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "datasets==5.2.0" "pyarrow==26.0.1" "duckdb==2.0.0" "polars==2.1.0"
HF_HOME=$place HF_HUB_OFFLINE=1 env/bin/python - <<'PY'
import json
import duckdb, polars
from datasets import disable_progress_bars, load_dataset
disable_progress_bars()
def write(name, rows):
    open(name, "w").write("".join(json.dumps(row) + "\n" for row in rows))
    return name
dates = [{"answer": "2024-01-01", "time": "09:30"}, {"answer": "2024-02-01", "time": "10:00"}]
plain, mixed = write("plain.jsonl", dates), write("mixed.jsonl", [*dates, {"answer": "never", "time": "10:00"}])
first = load_dataset("json", data_files=plain, split="train")[0]["answer"]
other = load_dataset("json", data_files=mixed, split="train")[0]["answer"]
answer, time = duckdb.sql(f"select answer, \"time\" from '{plain}' order by answer limit 1").fetchall()[0]
text = polars.read_ndjson(plain)["answer"][0]
seen = f"datasets: {first}; with one other text: {other}; "
seen += f"duckdb: {answer} ({type(answer).__name__}), {time} ({type(time).__name__}); polars: {text}"
print(seen)
expected = "datasets: 2024-01-01 00:00:00; with one other text: 2024-01-01; "
expected += "duckdb: 2024-01-01 (date), 09:30:00 (time); polars: 2024-01-01"
raise SystemExit(seen != expected)
PY
