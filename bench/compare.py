"""Compare the jobs of a sweep: final held-out reward per value of a swept field, over all tasks and seeds.

Usage: python bench/compare.py RUN_DIRECTORY FIELD [FIELD ...]     (for instance: optimizer.lr)
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import yaml


def field_of(tree: dict[str, Any], path: str) -> Any:
    """A nested value of a job's configuration."""
    for name in path.split("."):
        tree = tree[name]
    return tree


def job_figures(directory: Path) -> tuple[float, float, float]:
    """Held-out reward before and after, and the mean training reward over all steps (how fast it learned)."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["eval"]["reward"] for line in lines if "eval" in line]
    return evaluations[0], evaluations[-1], mean(line["reward"] for line in lines if "reward" in line)


def main() -> None:
    """Print one row per task and one over all."""
    run, fields = Path(sys.argv[1]), sys.argv[2:]
    table: dict[str, dict[tuple[Any, ...], list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(run.glob("*/job.yaml")):
        job = yaml.safe_load(path.read_text())["job"]
        value = tuple(field_of(job, field) for field in fields)
        for task in (job["data"]["source"], "all"):
            table[task][value].append(job_figures(path.parent))
    for task, values in table.items():
        for value, figures in sorted(values.items(), key=lambda item: str(item[0])):
            before, after, speed = (mean(figure[place] for figure in figures) for place in range(3))
            print(f"{task:20} {value!s:24} before {before:.3f}  after {after:.3f}  mean over steps {speed:.3f}  n={len(figures)}")


if __name__ == "__main__":
    main()
