"""Runs on two hosts beside what `motet simulate` says of them: `python -m bench.simulated [STEPS] [PAIRS]`.

A run whose costs are measured and one that is foretold from them take turns, so that whatever else the machine does meets both
alike. Costs are those of one job alone on each host: one samples few rows, the other many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from motet.config.simulation import SimulationConfig
from motet.simulation.outcome import simulate

HOSTS, JOBS, ROWS, EVALUATION = 2, 8, 8, 16
GROUPS = 4
FEW, MANY = 4, 12
"""Groups of a step of the two jobs by which costs are measured: as one job samples in the run, and as three do."""


@dataclass(frozen=True)
class Measured:
    """A job of a run."""

    came: float
    """When its host took it up."""
    steps: list[dict[str, Any]]
    """The timings of each step."""
    last: float
    """When its last line was written."""

    @property
    def opened(self) -> float:
        """When it began to sample."""
        seconds = self.steps[0]["seconds"]
        return float(self.steps[0]["time"] - seconds["sample"] - seconds["train"])


def run(directory: Path, groups: Sequence[int], steps: int, holdout: int) -> list[Measured]:
    """Run jobs with so many groups a step on hosts of one thread."""
    jobs = [
        {
            "name": f"job-{n}",
            "data": {"source": "toy:reverse", "holdout": holdout},
            "reward": "exact",
            "algorithm": {"groups_per_step": count},
        }
        for n, count in enumerate(groups)
    ]
    tree = {
        "base": "small",
        "engine": {"hosts": HOSTS, "threads": 1, "samplers": 0, "device": "cpu"},
        "defaults": {
            "steps": steps,
            "sampling": {"max_tokens": 24},
            "adapter": {"rank": 16},
            "algorithm": {"group_size": ROWS},
            "optimizer": {"lr": 1e-9},  # so that answers stay as long as they are
            "eval": {"every": 0},
        },
        "jobs": jobs,
    }
    file = directory / "jobs.json"
    file.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "motet", "run", str(file), "--run", str(directory / "run")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [_measured(directory / "run" / str(job["name"]), steps) for job in jobs]


def _measured(job: Path, steps: int) -> Measured:
    lines = [json.loads(line) for line in (job / "timings.jsonl").read_text().splitlines()]
    return Measured((job / "job.yaml").stat().st_mtime, lines[:steps], float(lines[-1]["time"]))


def costs(steps: int) -> tuple[dict[str, float], float, float]:
    """What one host takes for what, the tokens of a completion, and those that are trained for it."""
    with tempfile.TemporaryDirectory() as directory:
        jobs = run(Path(directory), (FEW, MANY), steps, 0)
    rows = [groups * ROWS for groups in (FEW, MANY)]
    length = sum(step["tokens_sampled"] for job in jobs for step in job.steps) / (sum(rows) * steps)
    each = [median(step["seconds"]["sample"] for step in job.steps) / length for job in jobs]
    row_seconds = max(0.0, (each[1] - each[0]) / (rows[1] - rows[0]))
    trained = [step["tokens_trained"] for job in jobs for step in job.steps]
    seconds = sum(step["seconds"]["train"] for job in jobs for step in job.steps)
    between = [
        later["time"] - before["time"] - later["seconds"]["sample"] - later["seconds"]["train"]
        for job in jobs
        for before, later in pairwise(job.steps)
    ]
    return (
        {
            "token_seconds": max(each[0] - row_seconds * (rows[0] - 1), 1e-6),
            "row_seconds": row_seconds,
            "train_tokens_per_second": sum(trained) / seconds,
            "publish_seconds": median(between),
            "open_seconds": mean(job.opened - job.came for job in jobs),
        },
        length,
        sum(trained) / (sum(rows) * steps),
    )


def foretold(measured: tuple[dict[str, float], float, float], steps: int) -> float:
    """Seconds that the simulation says for the run."""
    host, length, trained = measured
    completion = max(1, round(length))
    config = {
        "hosts": {"count": HOSTS, "slots": JOBS, "rows": 256, "costs": host},
        "jobs": [
            {
                "count": JOBS,
                "steps": [steps, steps],
                "groups_per_step": GROUPS,
                "group_size": ROWS,
                "prompt_tokens": [max(1, round(trained - completion))] * 2,
                "completion_tokens": [completion] * 2,
                "evaluation": EVALUATION,
            }
        ],
    }
    return 3600 * simulate(SimulationConfig.model_validate(config)).hours


def main() -> None:
    """Print a table."""
    steps, pairs = (int(given) for given in (sys.argv[1:] + ["8", "3"][len(sys.argv) - 1 :])[:2])
    print("| pair | run | simulation | off by | load |\n|---|---|---|---|---|", flush=True)
    off = []
    before = costs(steps)
    for pair in range(pairs):
        with tempfile.TemporaryDirectory() as directory:
            jobs = run(Path(directory), [GROUPS] * JOBS, steps, EVALUATION)
        after, load = costs(steps), os.getloadavg()[0]
        real = max(job.last for job in jobs) - min(job.came for job in jobs)
        thought = mean(foretold(measured, steps) for measured in (before, after))
        off.append(thought / real - 1)
        print(f"| {pair + 1} | {real:.1f} s | {thought:.1f} s | {off[-1]:+.0%} | {load:.1f} |", flush=True)
        before = after
    print(f"\n{os.cpu_count()} cores; in the middle off by {median(off):+.0%}; the last costs:")
    print({name: float(f"{cost:.3g}") for name, cost in before[0].items()})


if __name__ == "__main__":
    main()
