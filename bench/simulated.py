"""Runs on two hosts beside what `bench.cluster` says of them: `python -m bench.simulated [STEPS] [PAIRS]`.

Runs whose costs are measured and one that is foretold from them take turns, so that whatever else the machine does meets all of
them alike. Costs are those of one job alone on each host, of which one samples few rows and the other many; by how much jobs
slow each other down is what makes the simulation of two jobs on each host right. Then four jobs on each are foretold.
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

from bench.cluster import Costs, Hosts, Jobs, simulate

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


CostFields = dict[str, Any]
Lengths = tuple[int, int]
"""Tokens of a completion, and those that are trained beside it."""


def costs(steps: int) -> tuple[CostFields, Lengths]:
    """What one host takes for what."""
    few, many = measured((FEW, MANY), steps)
    jobs, rows = (few, many), [groups * ROWS for groups in (FEW, MANY)]
    length = sum(step["tokens_sampled"] for job in jobs for step in job.steps) / (sum(rows) * steps)
    trained = [mean(step["tokens_trained"] for step in job.steps) for job in jobs]
    sampling, training = (
        [median(step["seconds"][what] for step in job.steps[1:]) for job in jobs] for what in ("sample", "train")
    )
    row_seconds = max(0.0, (sampling[1] - sampling[0]) / length / (rows[1] - rows[0]))
    for_token = max(1e-6, (training[1] - training[0]) / (trained[1] - trained[0]))
    between = [
        later["time"] - before["time"] - later["seconds"]["sample"] - later["seconds"]["train"]
        for job in jobs
        for before, later in pairwise(job.steps)
    ]
    first = [
        job.steps[0]["time"] - job.came - sampled - learned
        for job, sampled, learned in zip(jobs, sampling, training, strict=True)
    ]
    found = {
        "token_seconds": max(sampling[0] / length - row_seconds * (rows[0] - 1), 1e-6),
        "row_seconds": row_seconds,
        "train_tokens_per_second": 1 / for_token,
        "train_seconds": max(0.0, training[0] - trained[0] * for_token),
        "publish_seconds": median(between),
        "open_seconds": mean(first),
    }
    completion = max(1, round(length))
    lengths = completion, max(1, round(sum(trained) / sum(rows)) - completion)
    two = measured([GROUPS] * 2 * HOSTS, steps)
    least, most = 0.0, found["token_seconds"]
    for _ in range(12):  # what makes the simulation of two jobs on each host take as long as they do
        found["job_seconds"] = (least + most) / 2
        longer = foretold(found, lengths, len(two), steps, 0) > whole(two)
        least, most = (least, found["job_seconds"]) if longer else (found["job_seconds"], most)
    return found, lengths


def measured(groups: Sequence[int], steps: int, holdout: int = 0) -> list[Measured]:
    """A run in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        return run(Path(directory), groups, steps, holdout)


def whole(jobs: Sequence[Measured]) -> float:
    """Seconds from the first job that was taken up to the last line."""
    return max(job.last for job in jobs) - min(job.came for job in jobs)


def foretold(host: CostFields, lengths: Lengths, jobs: int, steps: int, evaluation: int) -> float:
    """Seconds that the simulation says for a run."""
    prompt, completion = (lengths[1], lengths[1]), (lengths[0], lengths[0])
    hosts = Hosts(HOSTS, Costs(**host), slots=JOBS, rows=256)
    run = Jobs(
        jobs,
        steps=(steps, steps),
        groups_per_step=GROUPS,
        group_size=ROWS,
        prompt_tokens=prompt,
        completion_tokens=completion,
        evaluation=evaluation,
    )
    return 3600 * simulate(hosts, [run]).hours - float(host["publish_seconds"])


def main() -> None:
    """Print a table."""
    steps, pairs = (int(given) for given in (sys.argv[1:] + ["8", "3"][len(sys.argv) - 1 :])[:2])
    print("| pair | run | simulation | off by | load |\n|---|---|---|---|---|", flush=True)
    off = []
    before = costs(steps)
    for pair in range(pairs):
        real, load = whole(measured([GROUPS] * JOBS, steps, EVALUATION)), os.getloadavg()[0]
        after = costs(steps)
        thought = mean(foretold(*found, JOBS, steps, EVALUATION) for found in (before, after))
        off.append(thought / real - 1)
        print(f"| {pair + 1} | {real:.1f} s | {thought:.1f} s | {off[-1]:+.0%} | {load:.1f} |", flush=True)
        print({name: float(f"{cost:.3g}") for name, cost in after[0].items()}, file=sys.stderr, flush=True)
        before = after
    print(f"\n{os.cpu_count()} cores; in the middle off by {median(off):+.0%}")


if __name__ == "__main__":
    main()
