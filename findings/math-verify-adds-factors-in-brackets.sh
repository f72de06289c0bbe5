#!/usr/bin/env bash
# math-verify 0.9.0, latex2sympy2_extended 1.11.0, sympy 1.14.0, Python 3.11 (2026-11-30).
#
# One would expect `$(2)(3)$` to be 6, and `$2ab$` to be two times a times b. math-verify reads numbers side by side as a
# mixed number, 2 + 3, and takes `ab` for a unit, which it drops. So 5 passes for `(2)(3)`, and 2 for `2ab`.
# Seen: "[5, '(2)(3)'] [5, '2 3'] [2, '2']; 5 equals (2)(3): True; 2 equals 2ab: True".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "math-verify==0.9.0" "latex2sympy2_extended==1.11.0" "sympy==1.14.0"
env/bin/python - <<'PY'
from math_verify import parse, verify
read = [parse(f"${text}$") for text in ("(2)(3)", "2 3", "2ab")]
sums = verify(parse("$(2)(3)$"), parse("$5$"), timeout_seconds=None)
units = verify(parse("$2ab$"), parse("$2$"), timeout_seconds=None)
seen = f"{read[0]} {read[1]} {read[2]}; 5 equals (2)(3): {sums}; 2 equals 2ab: {units}"
print(seen)
raise SystemExit(seen != "[5, '(2)(3)'] [5, '2 3'] [2, '2']; 5 equals (2)(3): True; 2 equals 2ab: True")
PY
