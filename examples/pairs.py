"""Preferences out of what a job sampled: of each problem of a step the best and the worst answer, where their rewards differ.

python examples/pairs.py runs/demo/reverse pairs.jsonl
"""

import json
import sys
from itertools import groupby
from pathlib import Path

job, target = map(Path, sys.argv[1:])
pairs = []
for log in sorted((job / "rollouts").glob("[0-9]*.jsonl"), key=lambda path: int(path.stem)):
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n") if line]
    scored = [line for line in lines if not line["error"]]
    for _, group in groupby(scored, key=lambda line: line["problem"]):
        ranked = sorted(group, key=lambda line: line["reward"])
        worst, best = ranked[0], ranked[-1]
        if best["reward"] > worst["reward"]:
            pairs.append({"prompt": best["prompt"], "chosen": best["completion"], "rejected": worst["completion"]})
target.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
print(f"{len(pairs)} pairs in {target}")
