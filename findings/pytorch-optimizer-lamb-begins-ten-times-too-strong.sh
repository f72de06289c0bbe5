#!/usr/bin/env bash
# pytorch-optimizer 4.1.0, torch 2.13.0 (CPU), Python 3.11 (2026-11-30).
#
# LAMB scales each layer's step to the learning rate times the norm of its weights, so one would expect every step to move a
# layer by `lr` of its size (1 % at 0.01), whatever the betas are. In pytorch-optimizer 4.1.0 the correction of the young
# moments is applied behind that scaling: the first step is 1 / (1 - beta1) = 10 times too long, the second 5.3 times, and
# with lr 0.1 the first step sets all weights to zero. A warm-up hides it.
# Seen: "first steps at lr 0.01: 10.0 %, 5.3 %, 3.7 %; weights after a step at lr 0.1: 0.000".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "pytorch-optimizer==4.1.0" "torch==2.13.0"
env/bin/python - <<'PY'
import torch
from pytorch_optimizer import Lamb
def steps(lr, count):
    weights = torch.nn.Parameter(torch.ones(4, 4))
    optimizer, moved = Lamb([weights], lr=lr), []
    for _ in range(count):
        old = weights.detach().clone()
        weights.grad = torch.full_like(weights, 0.5)
        optimizer.step()
        moved.append(f"{100 * ((weights - old).norm() / old.norm()).item():.1f} %")
    return moved, weights[0, 0].item()
seen = f"first steps at lr 0.01: {', '.join(steps(0.01, 3)[0])}; weights after a step at lr 0.1: {steps(0.1, 1)[1]:.3f}"
print(seen)
raise SystemExit(seen != "first steps at lr 0.01: 10.0 %, 5.3 %, 3.7 %; weights after a step at lr 0.1: 0.000")
PY
