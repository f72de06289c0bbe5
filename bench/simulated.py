"""A run on two hosts beside what `motet simulate` says of it: `python -m bench.simulated [STEPS]`.

Costs are measured with one job alone on each host, before the run and after it: one job samples few rows, the other many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from motet.config.simulation import SimulationConfig
from motet.simulation.outcome import simulate

HOSTS, JOBS, ROWS = 2, 8, 8
GROUPS = 4
FEW, MANY = 4, 12
"""Groups of a step of the two jobs by which costs are measured: as one job samples in the run, and as three do."""


def run(directory: Path, groups: Sequence[int], steps: int) -> list[list[dict[str, Any]]]:
    """Run jobs with so many groups a step on hosts of one thread; the timings of each, step by step."""
    jobs = [
        {"name": f"job-{n}", "data": "toy:reverse", "reward": "exact", "algorithm": {"groups_per_step": count}}
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
    lines = [(directory / "run" / str(job["name"]) / "timings.jsonl").read_text().splitlines() for job in jobs]
    return [[json.loads(line) for line in job] for job in lines]


def begun(job: Sequence[dict[str, Any]]) -> float:
    """When a job's first step began."""
    return float(job[0]["time"]) - float(job[0]["seconds"]["sample"]) - float(job[0]["seconds"]["train"])


def costs(steps: int) -> tuple[dict[str, float], float]:
    """What one host takes for what, and the tokens of a completion."""
    with tempfile.TemporaryDirectory() as directory:
        jobs = run(Path(directory), (FEW, MANY), steps)
    token_seconds, trained, published, lengths = [], [], [], []
    for job, groups in zip(jobs, (FEW, MANY), strict=True):
        rows = groups * ROWS
        length = mean(step["tokens_sampled"] for step in job) / rows
        token_seconds.append(median(step["seconds"]["sample"] for step in job[1:]) / length)
        trained.append(rows * (1 + length) / median(step["seconds"]["train"] for step in job[1:]))
        published += [
            later["time"] - before["time"] - later["seconds"]["sample"] - later["seconds"]["train"]
            for before, later in pairwise(job)
        ]
        lengths.append(length)
    row_seconds = max(0.0, (token_seconds[1] - token_seconds[0]) / ((MANY - FEW) * ROWS))
    alone = token_seconds[0] - row_seconds * (FEW * ROWS - 1)
    return {
        "token_seconds": max(alone, 1e-6),
        "row_seconds": row_seconds,
        "train_tokens_per_second": mean(trained),
        "publish_seconds": median(published),
    }, mean(lengths)


def main() -> None:
    """Print a table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    before, length = costs(steps)
    with tempfile.TemporaryDirectory() as directory:
        jobs = run(Path(directory), [GROUPS] * JOBS, steps)
        load = os.getloadavg()[0]
    after, later = costs(steps)
    both = {name: (before[name] + after[name]) / 2 for name in before}
    config = {
        "hosts": {"count": HOSTS, "slots": JOBS, "rows": 256, "costs": both},
        "jobs": [
            {
                "count": JOBS,
                "steps": [steps, steps],
                "groups_per_step": GROUPS,
                "group_size": ROWS,
                "prompt_tokens": [1, 1],
                "completion_tokens": [round((length + later) / 2)] * 2,
            }
        ],
    }
    said = simulate(SimulationConfig.model_validate(config))
    seconds = max(job[-1]["time"] for job in jobs) - min(map(begun, jobs)) + both["publish_seconds"]
    print("costs before:", {name: float(f"{cost:.3g}") for name, cost in before.items()})
    print("costs after:", {name: float(f"{cost:.3g}") for name, cost in after.items()})
    print(f"\n{os.cpu_count()} cores, load {load:.1f}\n\n| | run | simulation | off by |\n|---|---|---|---|")
    rows = {
        "seconds": (seconds, 3600 * said.hours),
        "steps an hour": (3600 * JOBS * steps / seconds, said.steps_per_hour),
    }
    for name, (real, thought) in rows.items():
        print(f"| {name} | {real:,.0f} | {thought:,.0f} | {thought / real - 1:+.0%} |")


if __name__ == "__main__":
    main()
