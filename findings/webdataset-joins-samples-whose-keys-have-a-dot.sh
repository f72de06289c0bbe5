#!/usr/bin/env bash
# webdataset 1.0.2, Python 3.11 (2026-11-30).
#
# A sample's key may be any text for `TarWriter`. One would expect as many samples back as were written. The reader cuts a
# file's name at its first dot: keys like `gsm8k.0001`, or `qwen2.5-0001`, all have the key before the dot, neighbours
# become one sample with odd fields, and whatever asks for the field `json` finds none. Writer and reader say nothing.
# Seen: "written 4, read 2: [('gsm8k', ['0001.json', '0002.json', '0003.json']), ('math', ['0001.json'])]".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "webdataset==1.0.2"
env/bin/python - <<'PY'
import webdataset
keys = ["gsm8k.0001", "gsm8k.0002", "gsm8k.0003", "math.0001"]
with webdataset.TarWriter("rows.tar") as tar:
    for key in keys:
        tar.write({"__key__": key, "json": {"id": key}})
read = [
    (sample["__key__"], [field for field in sample if not field.startswith("__")])
    for sample in webdataset.WebDataset("rows.tar", shardshuffle=False)
]
seen = f"written {len(keys)}, read {len(read)}: {read}"
print(seen)
expected = "written 4, read 2: [('gsm8k', ['0001.json', '0002.json', '0003.json']), ('math', ['0001.json'])]"
raise SystemExit(seen != expected)
PY
