#!/usr/bin/env bash
# scipy 1.17.1, Python 3.11 (2026-11-30).
#
# Two versions are compared on the same questions; the Wilcoxon test drops questions where both score the same
# (`zero_method="wilcox"`, the default). One would expect equal answers to change nothing. Five questions won and none lost
# give p = 0.0625; with 95 more that nobody won, p is 0.025, "significant": any zero switches from the exact distribution to
# the normal approximation, which is far too small for five differences. `method="exact"` gives 0.0625 in both cases. It
# matters because evaluations of two checkpoints are mostly ties.
# Seen: "5 wins: 0.0625; 5 wins and 95 ties: 0.0253; exact: 0.0625".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "scipy==1.17.1"
env/bin/python - <<'PY'
from scipy.stats import wilcoxon
wins, ties = [1] * 5, [0] * 95
few, many, exact = wilcoxon(wins).pvalue, wilcoxon(wins + ties).pvalue, wilcoxon(wins + ties, method="exact").pvalue
seen = f"5 wins: {few:.4f}; 5 wins and 95 ties: {many:.4f}; exact: {exact:.4f}"
print(seen)
raise SystemExit(seen != "5 wins: 0.0625; 5 wins and 95 ties: 0.0253; exact: 0.0625")
PY
