"""`motet compare`: which of some runs, jobs or settings is better on the same held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

import motet
from motet.commands.answers import check_place, say, table
from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.report.comparison import (
    Difference,
    EvaluatedJob,
    Side,
    compare,
    evaluated,
    mean_curves,
    read_evaluated,
    side_of_job,
    side_of_run,
    sides_of_run,
)
from motet.report.read import JobRecord, RunRecord, read_run
from motet.report.svg import draw_curves
from motet.runtime.held_out import REWARD
from motet.runtime.settings import Mean

_MOST_TASKS = 6
"""Most tasks with their own column."""
MOST_ROLLOUTS = 1000
"""Most rollouts of an evaluation that a service returns."""


def compare_places(places: Sequence[str], svg: Path | None, url: str | None, key: str | None) -> None:
    """Print how the sides compare; `svg` is a file for their mean curves.

    Raises:
        RunError: they cannot be compared.
    """
    check_place("--svg", svg)
    alone = len(places) == 1
    if alone and not Path(places[0]).is_dir():
        raise ConfigError(f"{places[0]} is not the directory of a run: name one, or two or more jobs")
    sides = sides_of_run(_evaluated(read_run(Path(places[0])))) if alone else _sides(places, url, key)
    if len(sides) < 2:
        raise RunError(f"{places[0]} has one setting only; name another run or job to compare it with")
    differences = compare(sides, best_first=alone)
    say(_means(sides))
    print_differences(differences)
    if svg is not None:
        replace_file(svg, draw_curves([mean_curves(side) for side in sides], "settings").encode("utf-8", "replace"))
        say(f"curves: {svg}")


def _evaluated(run: RunRecord) -> RunRecord:
    """A run without the jobs that ended before their first evaluation, if others have one."""
    jobs = tuple(job for job in run.jobs if job.evaluations.xs)
    if not jobs:
        return run
    for job in run.jobs:
        if job not in jobs:
            say(f"{job.name} ({job.state}) is left out: it has no held-out evaluation")
    return replace(run, jobs=jobs)


def _sides(places: Sequence[str], url: str | None, key: str | None) -> list[Side]:
    runs = [place for place in places if Path(place).is_dir() and not (Path(place) / "metrics.jsonl").is_file()]
    if runs and len(runs) < len(places):
        raise ConfigError(f"{runs[0]} is a run, and not all others are: compare runs with runs, or jobs with jobs")
    names = short_names(places)
    if runs:
        return [replace(side_of_run(Path(place)), name=name) for name, place in zip(names, places, strict=True)]
    return [side_of_job(name, _job(place, url, key)) for name, place in zip(names, places, strict=True)]


def short_names(places: Sequence[str]) -> list[str]:
    """Shorten paths to as many last parts as needed to tell them apart."""
    parts = [Path(place).parts for place in places]
    n = 1
    while n < max(map(len, parts)) and len({one[-n:] for one in parts}) < len(parts):
        n += 1
    return [str(Path(*one[-n:])) for one in parts]


def _job(place: str, url: str | None, key: str | None) -> EvaluatedJob:
    """A job's directory, or a job of a service."""
    if Path(place).is_dir():
        return read_evaluated(Path(place))
    with motet.Client(url, key) as client:
        job, lines = client.job(place), client.steps(place)
        record = JobRecord(
            name=job.name, state=job.state, message=job.message, inexact=(), config_text="", config={"job": job.spec},
            base=job.base or "", planned=job.steps, steps=tuple(lines), timings=(), pairs=(), pair_versions=None,
            versions=(),
        )  # fmt: skip
        sampled = any(REWARD in line.get("eval", {}) for line in lines)
        newest = int(record.evaluations.xs[-1]) if sampled else 0
        rollouts = client.rollouts(place, newest, limit=MOST_ROLLOUTS, purpose="eval").data if sampled else []
        return evaluated(record, rollouts)


def _means(sides: Sequence[Side]) -> str | Table:
    """The held-out figure of each side, best first; by task if there are several."""
    tasks = list(dict.fromkeys(key[0] for side in sides for key in side.jobs))
    shown = tasks if 1 < len(tasks) <= _MOST_TASKS else []
    rows = [
        [_measured(side), *(_figure(side.mean(task)) for task in shown), _figure(side.mean()), str(len(side.jobs))]
        for side in sorted(sides, key=lambda side: -side.mean())
    ]
    headings = ["held-out", *(f">{task.replace(',', ';')}" for task in shown), ">mean", ">jobs"]
    return table(rows, ",".join(headings), empty="", folds=("held-out",))


def _measured(side: Side) -> str:
    """The side's name; of a single job also the version whose figure it is, and the best one if that is another."""
    if len(side.jobs) != 1:
        return side.name
    (job,) = side.jobs.values()
    best = job.record.best
    also = f"; best: v{best[0]}, {best[1]:.3f}" if best and best[0] != job.version and not math.isnan(best[1]) else ""
    return f"{side.name} (v{job.version}{also})"


def print_differences(differences: Sequence[Difference], *, pairs: bool = True) -> None:
    """Print the differences of each side from the first; with `pairs`, the number of job pairs has a column."""
    if not differences:
        return
    say(f"against {differences[0].first}:")
    headings = f"side,{'>pairs of jobs,' * pairs}>problems,>difference,verdict"
    rows = [
        [one.second, *([str(one.jobs)] if pairs else []), str(one.problems or ""), signed(one.more), one.verdict]
        for one in differences
    ]
    say(table(rows, headings, empty="", folds=("side",)))
    for line in _explained(differences):
        say(line)


def signed(more: Mean) -> str:
    """A difference with its interval."""
    low, high = more.mean - more.half, more.mean + more.half
    return f"{more.mean:+.3f}{'' if math.isnan(more.half) else f' [{low:+.3f}, {high:+.3f}]'}"


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _explained(differences: Sequence[Difference]) -> list[str]:
    """What the intervals cover, and their limits."""
    kinds = {"pairs of jobs" if one.jobs > 1 else "problems" for one in differences}
    over = "pairs of jobs" + (", or over problems where there is one pair" if len(kinds) > 1 else "")
    over = over if "pairs of jobs" in kinds else "problems"
    together = f", for all {len(differences)} differences together" if len(differences) > 1 else ""
    notes = [f"{one.second}: {note}" for one in differences for note in one.notes]
    return [f"[…]: 95 % interval by Student's t over {over}{together}", *notes]
