#!/usr/bin/env bash
# polars 2.1.0, duckdb 2.0.0, pyarrow 26.0.1, Python 3.11 (2026-11-30).
#
# Readers guess the types of a column from the first rows. One would expect an error when a later row does not fit.
# `polars.from_dicts` looks at 100 rows: 100 rewards of 0 and 1 and then 0.5 gives 0, and a key that first appears in row
# 101 is dropped, in `read_ndjson` too (there 0.5 raises). duckdb drops a key that first appears behind row 20,480 of a
# .jsonl file, pyarrow's `Table.from_pylist` one that the first row lacks. None says a word. It matters where rewards or
# labels come late: mixed data with one source after another.
# Seen: "0.5 in row 101: 0; columns by polars: ['reward'] ['reward'], duckdb ['reward'], pyarrow ['reward']".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "polars==2.1.0" "duckdb==2.0.0" "pyarrow==26.0.1"
env/bin/python - <<'PY'
import json
import duckdb, polars, pyarrow
reward = polars.from_dicts([{"reward": i % 2} for i in range(100)] + [{"reward": 0.5}])["reward"][100]
late = [{"reward": 1}] * 100 + [{"reward": 1, "judge": "b"}]
def write(name, rows):
    open(name, "w").write("".join(json.dumps(row) + "\n" for row in rows))
    return name
few, many = write("few.jsonl", late), write("many.jsonl", late[:1] * 30_000 + late[-1:])
seen = f"0.5 in row 101: {reward}; columns by polars: {polars.from_dicts(late).columns} {polars.read_ndjson(few).columns}, "
seen += f"duckdb {duckdb.sql(f'''select * from '{many}' ''').columns}, pyarrow {pyarrow.Table.from_pylist(late).column_names}"
print(seen)
expected = "0.5 in row 101: 0; columns by polars: ['reward'] ['reward'], duckdb ['reward'], pyarrow ['reward']"
raise SystemExit(seen != expected)
PY
