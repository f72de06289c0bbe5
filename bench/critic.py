"""A sparse task of two turns, with a critic and with the step's mean reward as baseline: equal tokens, several seeds.

    python bench/critic.py --seeds 5 --steps 40 --directory /tmp/critic

A first digit, then a smaller one, and one reward for both at the end; every third problem is never rewarded, which a critic can
learn from the prompt. Prints a line of JSON: the mean reward of the last quarter of the steps, per seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import motet

ENVIRONMENT = '''
class Descent:
    """A digit of 5 or more, then one below 5; 1 at the end if both are right and the row may be rewarded."""

    def reset(self, lucky=True):
        self.lucky, self.turn, self.right = lucky, 0, True

    def step(self, text):
        digit = text.strip()[:1]
        low = digit.isdigit() and int(digit) < 5
        self.right = self.right and digit.isdigit() and low == (self.turn == 1)
        self.turn += 1
        if self.turn == 2:
            return None, float(self.right and self.lucky)
        return "And a smaller one?", 0.0
'''
CRITIC = {"rank": 8, "lam": 0.95, "lr": 1e-3}


def job(name: str, seed: int, environment: Path, steps: int, **algorithm: Any) -> dict[str, Any]:
    """One job of the comparison."""
    rows = [
        {"prompt": f"{i % 7} + {i % 5} = ?" if i % 3 else f"{i % 7} - {i % 5} = ?", "lucky": bool(i % 3)}
        for i in range(96)
    ]
    return {
        "name": f"{name}-{seed}",
        "seed": seed,
        "data": {"source": rows, "holdout": 0},
        "environment": {"name": f"{environment}:Descent", "max_turns": 2},
        "sampling": {"max_tokens": 4},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 1e-3},
        "algorithm": {"type": "ppo", "group_size": 4, "groups_per_step": 12, **algorithm},
        "steps": steps,
    }


def main() -> None:
    """Run both for every seed, all at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--directory", type=Path, required=True)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    environment = given.directory / "descent.py"
    environment.write_text(ENVIRONMENT)
    kinds: dict[str, dict[str, Any]] = {"baseline": {}, "critic": {"critic": CRITIC}}
    jobs = [
        job(name, seed, environment, given.steps, **fields)
        for seed in range(given.seeds)
        for name, fields in kinds.items()
    ]
    done = motet.run(
        jobs, base="small", quiet=True, directory=given.directory / "run", engine={"slots": 3 * given.seeds}
    )
    last = max(given.steps // 4, 1)
    rewards, curves = {}, {}
    for name in kinds:
        found = [done.jobs[f"{name}-{seed}"].rewards for seed in range(given.seeds)]
        rewards[name] = [round(float(np.mean(series[-last:])), 3) for series in found]
        curves[name] = np.mean(found, axis=0).round(3).tolist()
    print(json.dumps({"last": rewards, "curves": curves}))


if __name__ == "__main__":
    main()
