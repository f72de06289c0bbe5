#!/usr/bin/env bash
# safetensors 0.8.0 and 0.7.0, numpy 2.4.6, Python 3.11 (2026-11-30).
#
# safetensors 0.7.0 writes any numpy array right, and `safetensors.torch` refuses a tensor that is not contiguous. One would
# expect the numpy side of 0.8.0 to do either. It writes the memory behind the array as it lies: a transposed matrix comes
# back with its values in other places, every second column as the first ones, without an error. (The docstring says "need
# to be contiguous".) It matters to converters that transpose weights: the file has the right shapes and wrong weights.
# `numpy.ascontiguousarray` before saving helps.
# Seen: "0.7.0: transposed True, every second True; 0.8.0: transposed False, every second False, contiguous True".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
cat > look.py <<'PY'
import numpy
from safetensors.numpy import load, save
whole = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
for name, array in (("transposed", whole.T), ("every second", whole[:, ::2]), ("contiguous", numpy.ascontiguousarray(whole.T))):
    print(name, numpy.array_equal(load(save({"x": array}))["x"], array))
PY
env/bin/pip install -q "safetensors==0.7.0" "numpy==2.4.6"
old=$(env/bin/python look.py | head -2 | paste -sd, | sed 's/,/, /')
env/bin/pip install -q "safetensors==0.8.0"
new=$(env/bin/python look.py | paste -sd, | sed 's/,/, /g')
echo "0.7.0: $old; 0.8.0: $new"
[ "$old" = "transposed True, every second True" ] && [ "$new" = "transposed False, every second False, contiguous True" ]
