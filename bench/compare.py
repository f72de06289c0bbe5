"""Compare the jobs of a sweep: final held-out reward per value of a swept field, over all tasks and seeds.

Usage: python bench/compare.py RUN_DIRECTORY FIELD [FIELD ...] [--svg FILE]     (for instance: optimizer.lr)
With --svg, the mean curve of each value is drawn.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from motet.report import curves_svg


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


def draw(groups: dict[str, list[Path]], out: Path) -> None:
    """The mean curves of groups of jobs, drawn as the curves of one job each."""
    with TemporaryDirectory() as scratch:
        for name, jobs in groups.items():
            lines = [[json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()] for job in jobs]
            means = []
            for same in zip(*lines, strict=True):
                merged: dict[str, Any] = {"step": same[0]["step"], "version": same[0]["version"]}
                if "reward" in same[0]:
                    merged["reward"] = mean(line["reward"] for line in same)
                if "eval" in same[0]:
                    merged["eval"] = {"reward": mean(line["eval"]["reward"] for line in same)}
                means.append(merged)
            directory = Path(scratch) / name
            directory.mkdir()
            (directory / "job.yaml").write_text(yaml.safe_dump({"job": {"name": name, "steps": means[-1]["step"]}}))
            (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in means))
        out.write_text(curves_svg(Path(scratch)))


def main() -> None:
    """Print one row per task and one over all."""
    words = sys.argv[1:]
    svg = Path(words.pop(words.index("--svg") + 1)) if "--svg" in words else None
    run, fields = Path(words[0]), [word for word in words[1:] if word != "--svg"]
    groups: dict[str, list[Path]] = defaultdict(list)
    table: dict[str, dict[tuple[Any, ...], list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(run.glob("*/job.yaml")):
        job = yaml.safe_load(path.read_text())["job"]
        value = tuple(field_of(job, field) for field in fields)
        groups[", ".join(str(part) for part in value)].append(path.parent)
        for task in (job["data"]["source"], "all"):
            table[task][value].append(job_figures(path.parent))
    for task, values in table.items():
        for value, figures in sorted(values.items(), key=lambda item: str(item[0])):
            before, after, speed = (mean(figure[place] for figure in figures) for place in range(3))
            print(
                f"{task:20} {value!s:24} before {before:.3f}  after {after:.3f}  mean over steps {speed:.3f}  n={len(figures)}"
            )
    if svg is not None:
        draw(groups, svg)


if __name__ == "__main__":
    main()
