#!/usr/bin/env bash
# tokenizers 0.23.3, Python 3.11 (2026-12-01).
#
# One would expect `Tokenizer.encode`, which is compiled, to let other threads of Python run, as `encode_batch` does. It keeps
# the interpreter's lock for the whole call: half a second for 1 MB of text, in which an event loop in another thread stands
# still. `encode_batch([text])[0]` gives the same ids and lets them run. `decode` and `decode_batch` differ alike.
# Seen: "encode: other threads wait; encode_batch of one text: they run; the same ids: True".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "tokenizers==0.23.3"
TOKENIZERS_PARALLELISM=false env/bin/python - <<'PY'
import sys, threading
from tokenizers import Tokenizer, models, pre_tokenizers
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
text = "word and more, " * 2**16
def waits(work):
    begun, order = threading.Event(), []
    other = threading.Thread(target=lambda: (begun.wait(), order.append("other")))
    other.start()
    begun.set()
    work()
    order.append("work")
    other.join()
    return order[0] == "work"
sys.setswitchinterval(60)  # nobody is made to give the lock
told = {True: "other threads wait", False: "they run"}
single = all(waits(lambda: tokenizer.encode(text)) for _ in range(5))
batch = all(waits(lambda: tokenizer.encode_batch([text])) for _ in range(5))
same = tokenizer.encode(text).ids == tokenizer.encode_batch([text])[0].ids
seen = f"encode: {told[single]}; encode_batch of one text: {told[batch]}; the same ids: {same}"
print(seen)
raise SystemExit(seen != "encode: other threads wait; encode_batch of one text: they run; the same ids: True")
PY
