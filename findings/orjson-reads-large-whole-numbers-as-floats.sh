#!/usr/bin/env bash
# orjson 3.13.0, msgspec 0.22.0, pydantic 2.14.3, duckdb 2.0.0, Python 3.11 (2026-11-30).
#
# JSON sets no limit for whole numbers. Python's json, msgspec and pydantic read 2^64 + 1 as it stands. One would expect
# orjson to do so or to refuse, as `orjson.dumps` refuses it. `orjson.loads` returns a float, the digits are gone; duckdb
# makes the whole column a float as soon as a row has such a number, and 2^63 + 1 in another row loses its digits too. It
# matters for 128-bit seeds and identifiers, and for arithmetic tasks whose answers are large: 2^64 + 1 equals 2^64.
# Seen: "18446744073709551617: json ok, msgspec ok, pydantic ok, orjson 1.8446744073709552e+19; dumps: TypeError; duckdb:
# [9.223372036854776e+18, 1.8446744073709552e+19]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "orjson==3.13.0" "msgspec==0.22.0" "pydantic==2.14.3" "duckdb==2.0.0"
env/bin/python - <<'PY'
import json
import duckdb, msgspec, orjson, pydantic
number = 2**64 + 1
readers = {
    "json": json.loads,
    "msgspec": msgspec.json.decode,
    "pydantic": pydantic.TypeAdapter(object).validate_json,
    "orjson": orjson.loads,
}
read = {name: reader(str(number)) for name, reader in readers.items()}
try:
    dumps = orjson.dumps(number).decode()
except TypeError as error:
    dumps = type(error).__bases__[0].__name__ if type(error) is not TypeError else "TypeError"
open("rows.jsonl", "w").write(f'{{"x": {2**63 + 1}}}\n{{"x": {number}}}\n')
column = sorted(row[0] for row in duckdb.sql("select x from 'rows.jsonl'").fetchall())
told = ", ".join(f"{name} {'ok' if type(value) is int and value == number else value}" for name, value in read.items())
seen = f"{number}: {told}; dumps: {dumps}; duckdb: {column}"
print(seen)
expected = "18446744073709551617: json ok, msgspec ok, pydantic ok, orjson 1.8446744073709552e+19; dumps: TypeError; "
expected += "duckdb: [9.223372036854776e+18, 1.8446744073709552e+19]"
raise SystemExit(seen != expected)
PY
