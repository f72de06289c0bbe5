"""Compare runs, or jobs, on the held-out problems that they share: paired differences, with intervals.

sides = sides_of_run(read_run(path))          # the settings of one run, or a `Side` for each run or job
for one in compare(sides): ...
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from motet.core.errors import RunError
from motet.observe.names import seed_of, task_of, variant_of
from motet.observe.report.read import JobRecord, Line, RunRecord, Series, number, read_job, read_lines, read_run, series
from motet.observe.report.svg import Curves
from motet.runtime.settings import Mean, common_name, setting_of

Key = tuple[str, str]
"""Task and seed; jobs of two sides with the same key are a pair."""


@dataclass(frozen=True)
class EvaluatedJob:
    """A job and its newest evaluation."""

    record: JobRecord
    version: int
    figure: float
    """Held-out reward, accuracy or log-likelihood."""
    problems: Mapping[str, float]
    """Mean reward of each held-out problem, by its key in `by_problem`; empty where none was sampled."""
    read: int
    """Answers that were read, of `answers` that the evaluation sampled."""
    answers: int


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a job, a run, or a setting of a run."""

    name: str
    jobs: Mapping[Key, EvaluatedJob]

    def mean(self, task: str | None = None) -> float:
        """Held-out figure of a task, or the mean over all tasks; NaN without one."""
        tasks = [task] if task is not None else sorted({key[0] for key in self.jobs})
        figures = [[job.figure for key, job in self.jobs.items() if key[0] == name] for name in tasks]
        return fmean([fmean(some) for some in figures if some] or [math.nan])


@dataclass(frozen=True)
class Difference:
    """The difference of a second side from a first one."""

    first: str
    second: str
    jobs: int
    """Number of job pairs."""
    problems: int
    """Number of paired held-out problems: the smallest of all pairs of jobs; 0 if the jobs sample none."""
    more: Mean
    """The mean over pairs of jobs, or over problems if there is one pair."""
    notes: tuple[str, ...]
    """Limits of the comparison, for a person."""

    @property
    def verdict(self) -> str:
        """Whether the second side is better than the first, or why that is unknown."""
        low, high = self.more.mean - self.more.half, self.more.mean + self.more.half
        if math.isnan(self.more.half):
            return "cannot tell from one pair"
        if low <= 0 <= high:
            return "cannot tell"
        return "better" if low > 0 else "worse"


def evaluated(record: JobRecord, rollouts: Iterable[Line], version: int | None = None) -> EvaluatedJob:
    """A job with the rollouts of its newest evaluation, or of the evaluation of a `version`.

    Raises:
        RunError: nothing was evaluated.
    """
    figures = {int(x): y for x, y in record.evaluations.points}
    if not figures:
        raise RunError(f"job {record.name} has no held-out evaluation to compare; set eval.every, or data.holdout")
    lines = tuple(rollouts)
    rewards = {
        problem: [reward for line in some if (reward := number(line.get("reward"))) is not None]
        for problem, some in by_problem(lines).items()
    }
    at = next(reversed(figures)) if version is None else version
    counts = dict(record.columns.get("eval/rollouts", Series()).known.points)
    answers = int(counts.get(at, len(lines)))
    problems = {problem: fmean(some) for problem, some in rewards.items() if some}
    return EvaluatedJob(record, at, figures[at], problems, len(lines), answers)


def by_problem(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Rollouts by prompt and reference answer, and by row where several rows have both.

    Such rows may differ in earlier messages: a rollout's prompt is the last one.
    """
    rows: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        problem = json.dumps([line.get("prompt"), line.get("answer")], sort_keys=True, default=str)
        rows.setdefault(problem, {}).setdefault(str(line.get("problem")), []).append(line)
    return {
        f"{problem} {row}" if len(some) > 1 else problem: of_row
        for problem, some in rows.items()
        for row, of_row in some.items()
    }


def evaluated_at(path: Path, record: JobRecord, version: int) -> EvaluatedJob:
    """`evaluated` of a job's directory."""
    return evaluated(record, read_lines(path / "rollouts" / f"eval-{version}.jsonl"), version)


def read_evaluated(path: Path) -> EvaluatedJob:
    """The newest evaluation of a job's directory."""
    record = read_job(path)
    return evaluated_at(path, record, int(record.evaluations.xs[-1]) if record.evaluations.xs else 0)


def side_of_job(name: str, job: EvaluatedJob) -> Side:
    """A single job as a side."""
    return Side(name, {("", ""): job})


def side_of_run(path: Path) -> Side:
    """All jobs of a run as a side; jobs of two runs are paired by name."""
    return Side(str(path), {(job.name, ""): read_evaluated(path / job.name) for job in read_run(path).jobs})


def sides_of_run(run: RunRecord) -> list[Side]:
    """The settings of a run as sides.

    They come from the values that its sweeps vary besides task and seed, or from jobs that differ in more than their
    seed.
    """
    swept = any(variant_of(job.name) for job in run.jobs)
    groups: dict[str, list[JobRecord]] = {}
    for job in run.jobs:
        groups.setdefault(variant_of(job.name) if swept else setting_of(job.config) or job.name, []).append(job)
    sides = []
    for name, jobs in groups.items():
        keyed: dict[Key, EvaluatedJob] = {}
        for job in jobs:
            task = task_of(job.name) if swept else ""
            nth = sum(key[0] == task for key in keyed)
            keyed[task, seed_of(job.name) or f"#{nth}"] = read_evaluated(run.path / job.name)
        sides.append(Side(name if swept else common_name([job.name for job in jobs]), keyed))
    return sides


def compare(sides: Sequence[Side], *, best_first: bool) -> list[Difference]:
    """The difference of each side from the first, or from the best.

    The intervals hold together at 95 % (Bonferroni), so that among many sides none seems better by chance. With
    `best_first`, the figures choose the first side, so the correction counts all pairs.

    Raises:
        RunError: two sides have nothing in common.
    """
    first = max(sides, key=lambda side: (side.mean(), side.name)) if best_first else sides[0]
    n = math.comb(len(sides), 2) if best_first else len(sides) - 1
    return [_difference(first, side, 1 - 0.05 / n) for side in sides if side is not first]


def _difference(first: Side, second: Side, level: float) -> Difference:
    pairs = [(job, second.jobs[key]) for key, job in first.jobs.items() if key in second.jobs]
    if len(first.jobs) == len(second.jobs) == 1:
        pairs = list(zip(first.jobs.values(), second.jobs.values(), strict=True))
    if not pairs:
        raise RunError(f"{first.name} and {second.name} have no job of the same name and seed to compare")
    differences = [_of_pair(*pair) for pair in pairs]
    alone = len(pairs) == 1
    figures = differences[0] if alone else [fmean(some) for some in differences]
    problems = min(len(job.problems.keys() & other.problems.keys()) for job, other in pairs)
    notes = list(dict.fromkeys(itertools.chain.from_iterable(_notes(*pair) for pair in pairs)))
    if alone:
        notes.append("one job a side: another seed may come out differently")
    if left := len(first.jobs) + len(second.jobs) - 2 * len(pairs):
        notes.append(f"{left} job{'' if left == 1 else 's'} without a partner left out")
    return Difference(first.name, second.name, len(pairs), problems, Mean.of(figures, level), tuple(notes))


def _of_pair(job: EvaluatedJob, other: EvaluatedJob) -> list[float]:
    """The differences on held-out problems of both; the difference of the figures if one side samples none."""
    if not job.problems or not other.problems:
        return [other.figure - job.figure]
    same = [problem for problem in job.problems if problem in other.problems]
    if not same:
        raise RunError(f"{job.record.name} and {other.record.name} have no held-out problem in common")
    return [other.problems[problem] - job.problems[problem] for problem in same]


def _notes(job: EvaluatedJob, other: EvaluatedJob) -> Iterable[str]:
    mine, others = job.problems.keys(), other.problems.keys()
    if mine != others and mine and others:
        yield f"{len(mine & others)} of {max(len(mine), len(others))} held-out problems are in both, and count"
    for side in (job, other):
        if 0 < side.read < side.answers:
            yield (
                f"only the first {side.read:,} of the {side.answers:,} held-out answers of {side.record.name} were read, and "
                "count"
            )
    if job.version != other.version:
        yield f"compared at different versions, v{job.version} and v{other.version}"
    if job.record.job.get("rewards") != other.record.job.get("rewards"):
        yield "their rewards differ: each is measured by its own"


def mean_curves(side: Side) -> Curves:
    """The mean curves of a side's jobs, at points where all have a value."""
    jobs = [job.record for job in side.jobs.values()]
    rewards, held_out = [job.columns.get("reward", Series()) for job in jobs], [job.evaluations for job in jobs]
    figures = " and ".join(dict.fromkeys(job.figure for job in jobs))
    return Curves(side.name, _mean_series(rewards), _mean_series(held_out), figures)


def _mean_series(curves: Sequence[Series]) -> Series:
    tables = [dict(curve.points) for curve in curves]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return series((x, fmean(table[x] for table in tables)) for x in shared)
