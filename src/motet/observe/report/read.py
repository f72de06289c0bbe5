"""Reads a run from disk as records. Files may be missing, incomplete or damaged: everything readable is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.config import RewardConfig
from motet.core.errors import RunError
from motet.core.plain_yaml import mapping_in
from motet.rewards.reward_elsewhere import weights_of
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.diagnoses import Diagnoses
from motet.runtime.evaluations import CHANCE, Evaluations
from motet.runtime.held_out import ACCURACY, LOG_LIKELIHOOD, REWARD, named_best, newest_commit, recommended, rule_text
from motet.runtime.metrics import BESIDE
from motet.runtime.settings import Setting, setting_of, settings

Line = Mapping[str, Any]
MAX_POINTS = 600
"""Most points of a curve; longer ones are averaged over equal parts."""
_JOB_FILES = ("job.yaml", "metrics.jsonl", "status.json")


@dataclass(frozen=True)
class Series:
    """A curve. A y that is NaN is a gap: a step without this measurement."""

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()

    @property
    def points(self) -> list[tuple[float, float]]:
        """Pairs of x and y."""
        return list(zip(self.xs, self.ys, strict=True))

    @property
    def known(self) -> Series:
        """The curve without gaps."""
        return series(self.points)

    def thinned(self, limit: int = MAX_POINTS) -> Series:
        """The curve with at most about `limit` points; a gap remains if a whole part is one."""
        if len(self.xs) <= limit:
            return self
        size = math.ceil(len(self.xs) / limit)
        stretches = [slice(start, start + size) for start in range(0, len(self.xs), size)]
        return Series(*(tuple(_mean(values[part]) for part in stretches) for values in (self.xs, self.ys)))


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class Pair:
    """A held-out problem with answers before and after training."""

    prompt: Any
    answer: Any
    before: Line | None
    after: Line | None
    """Lines of the rollout log; None where that evaluation lacks the problem."""


@dataclass(frozen=True)
class JobRecord:
    """One job's files."""

    name: str
    state: str
    message: str
    inexact: tuple[str, ...]
    config_text: str
    """The text of job.yaml."""
    config: Mapping[str, Any]
    """The values of job.yaml; empty if it cannot be read."""
    base: str
    planned: int | None
    """Number of steps to train, if job.yaml has it."""
    steps: tuple[Line, ...]
    """metrics.jsonl."""
    timings: tuple[Line, ...]
    pairs: tuple[Pair, ...]
    pair_versions: tuple[int, int] | None
    """The versions that the pairs compare."""
    versions: tuple[int, ...]
    """Versions on disk."""
    committed: Committed | None = None
    """The counters of the newest commit; None before the first, and where it is damaged."""

    @property
    def job(self) -> Mapping[str, Any]:
        """The job's settings in job.yaml; empty if they cannot be read."""
        job = self.config.get("job")
        return job if isinstance(job, dict) else {}

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings from the metrics."""
        diagnoses, timings = diagnoses_of(self.job), {number(line.get("step")): line for line in self.timings}
        diagnoses.choose(self.committed.best_version if self.committed else None)
        for line in self.steps:
            step = number(line.get("step"))
            timed = timings.get(step, {})
            diagnoses.see({**line, **{name: timed.get(name) for name in BESIDE}})
            if step is not None and isinstance(evaluation := line.get("eval"), Mapping):
                diagnoses.see_evaluation(int(step), evaluation)
        return tuple(diagnoses.warnings.values())

    @property
    def done(self) -> int:
        """Number of finished steps."""
        return sum("loss" in line for line in self.steps)  # the last line has an evaluation only

    @cached_property
    def columns(self) -> Mapping[str, Series]:
        """Fields of metrics.jsonl over steps; nested fields are named like `eval/reward`, and a null is a gap."""
        points_of: dict[str, list[tuple[float, float]]] = {}
        for line in self.steps:
            if (step := number(line.get("step"))) is not None:
                for field, value in numbers_in(line):
                    points_of.setdefault(field, []).append((step, value))
        return {field: Series(*zip(*points, strict=True)) for field, points in points_of.items()}

    @property
    def evaluations(self) -> Series:
        """Held-out reward, accuracy or log-likelihood over versions: a step's line evaluates the version it starts from."""
        nll = self.columns.get("eval/nll", Series())
        measured = self.columns.get("eval/reward") or self.columns.get("eval/accuracy")
        return (measured or Series(nll.xs, tuple(-value for value in nll.ys))).known

    @property
    def intervals(self) -> Mapping[float, float]:
        """Half of the 95 % interval of each held-out figure, by version, where it is known."""
        seen, steps = Evaluations(), [(number(line.get("step")), line.get("eval")) for line in self.steps]
        for step, evaluation in steps:
            if step is not None and isinstance(evaluation, Mapping):
                seen.add(int(step), evaluation)
        errors = {at: evaluation.error for at, evaluation in seen.by_version.items()}
        return {at: CHANCE * error for at, error in errors.items() if 0 < error < math.inf}

    @property
    def figure(self) -> str:
        """The name of the held-out figure."""
        known = [name for name in (REWARD, ACCURACY) if self.columns.get(f"eval/{name}")]
        return known[0] if known else LOG_LIKELIHOOD

    @property
    def best(self) -> tuple[int, float] | None:
        """The version to take, and its held-out figure, NaN if it has none; None if no version is on disk."""
        points = [(int(x), y) for x, y in self.evaluations.points]
        return recommended(points, named_best(self.committed), self.versions)

    @property
    def rule(self) -> str:
        """What a person reads where another figure than the one shown chose the best version."""
        return rule_text(self.committed.best_by, self.figure) if self.committed and self.evaluations.xs else ""

    def used(self, start: float) -> Series:
        """Tokens sampled and trained so far, over minutes since `start`."""
        lines = [line for line in self.timings if number(line.get("time")) is not None]
        return _over_time(lines, start, accumulate(map(_tokens, lines)))

    @property
    def tokens(self) -> int:
        """Tokens sampled and trained, by the timings."""
        return int(sum(map(_tokens, self.timings)))


@dataclass(frozen=True)
class RunRecord:
    """All jobs of a run directory, by name."""

    path: Path
    jobs: tuple[JobRecord, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name

    @property
    def settings(self) -> list[Setting]:
        """The jobs by setting: those that differ only in their seed are one."""
        return settings(
            (job.name, setting_of(job.config), [(int(x), y) for x, y in job.evaluations.points]) for job in self.jobs
        )

    @property
    def start(self) -> float:
        """The time when the first step of any job ended."""
        return min((_time(line) for line in self._timings), default=0.0)

    @property
    def _timings(self) -> list[Line]:
        lines = [line for job in self.jobs for line in job.timings if number(line.get("time")) is not None]
        return sorted(lines, key=_time)

    def device(self) -> dict[str, Series]:
        """Shares of time and of full batches so far, over minutes; all jobs report the same device."""
        shares: dict[str, list[float | None]] = {"decode": [], "train": [], "idle": [], "occupancy": []}
        for line in self._timings:
            given = line.get("device")
            decode, train, occupancy = (
                number(given.get(part)) if isinstance(given, dict) else None
                for part in ("decode", "train", "occupancy")
            )
            idle = None if decode is None or train is None else max(1.0 - decode - train, 0.0)
            for name, value in (("decode", decode), ("train", train), ("idle", idle), ("occupancy", occupancy)):
                shares[name].append(value)
        return {name: _over_time(self._timings, self.start, values) for name, values in shares.items()}


def read_run(path: Path) -> RunRecord:
    """Read every job of a run directory.

    Raises:
        RunError: there are no jobs.
    """
    jobs = [
        item for item in sorted(path.glob("*"), key=_natural) if any((item / file).is_file() for file in _JOB_FILES)
    ]
    if not jobs:
        below = sorted({item.parent.parent for where in ("", "runs/") for item in path.glob(f"{where}*/*/job.yaml")})
        hint = f"; did you mean {' or '.join(map(str, below[:3]))}?" if below else ""
        raise RunError(
            f"{path} has no jobs: give the directory of a run, runs/<name of the job file> unless `run:` or --run says "
            f"otherwise{hint}"
        )
    return RunRecord(path, tuple(read_job(item) for item in jobs))


def read_job(path: Path) -> JobRecord:
    """Read one job's directory."""
    directory, config = JobDirectory(path), mapping_in(path / "job.yaml")
    steps = read_lines(path / "metrics.jsonl")
    status = _object(_text(path / "status.json"))
    pairs, pair_versions = read_pairs(path / "rollouts")
    planned = number(_find(config, "steps"))
    inexact = status.get("inexact")
    return JobRecord(
        name=path.name,
        state=str(status.get("state") or ("unknown" if steps else "queued")),
        message=str(status.get("message") or ""),
        inexact=tuple(str(reason) for reason in inexact) if isinstance(inexact, list) else (),
        config_text=_text(path / "job.yaml"),
        config=config,
        base=str(_find(config, "base") or ""),
        planned=int(planned) if planned is not None else None,
        steps=steps,
        timings=read_lines(path / "timings.jsonl"),
        pairs=pairs,
        pair_versions=pair_versions,
        versions=tuple(directory.versions()),
        committed=newest_commit(directory),
    )


def read_lines(path: Path) -> tuple[Line, ...]:
    """The whole lines of a .jsonl file that are JSON objects; a line still being written is left out."""
    whole, _, _ = _text(path).rpartition("\n")
    return tuple(line for text in whole.split("\n") if (line := _object(text)))


def read_pairs(directory: Path, limit: int = 8) -> tuple[tuple[Pair, ...], tuple[int, int] | None]:
    """The first held-out problems, in data order, in the first and in the newest evaluation."""
    versions = sorted(_numbers(directory, r"eval-(\d+)\.jsonl"))
    if not versions:
        return (), None
    first, last = versions[0], versions[-1]
    before = _first_rollouts(read_lines(directory / f"eval-{first}.jsonl"))
    after = _first_rollouts(read_lines(directory / f"eval-{last}.jsonl")) if last != first else {}
    pairs = []
    for problem in list({**before, **after})[:limit]:
        line = before.get(problem) or after[problem]
        pairs.append(Pair(line.get("prompt"), line.get("answer"), before.get(problem), after.get(problem)))
    return tuple(pairs), (first, last)


def series(points: Iterable[tuple[Any, Any]]) -> Series:
    """A curve of the points with two finite coordinates."""
    known = [(x, y) for a, b in points if (x := number(a)) is not None and (y := number(b)) is not None]
    return Series(tuple(x for x, _ in known), tuple(y for _, y in known))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        result = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def numbers_in(table: Line, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line, by the path of their fields; a null becomes a gap."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif value is None or number(value) is not None:
            yield prefix + name, math.nan if value is None else float(value)


def _time(line: Line) -> float:
    return number(line.get("time")) or 0.0


def _tokens(line: Line) -> float:
    return sum(number(line.get(key)) or 0.0 for key in ("tokens_sampled", "tokens_trained"))


def _over_time(lines: Sequence[Line], start: float, values: Iterable[float | None]) -> Series:
    return series(((_time(line) - start) / 60, value) for line, value in zip(lines, values, strict=True))


def _first_rollouts(lines: Iterable[Line]) -> dict[Any, Line]:
    first: dict[Any, Line] = {}
    for line in lines:
        first.setdefault(str(line.get("problem")), line)
    return first


def _numbers(directory: Path, pattern: str) -> list[int]:
    names = (item.name for item in directory.glob("*"))
    return [int(match[1]) for name in names if (match := re.fullmatch(pattern, name))]


def _natural(path: Path) -> tuple[list[tuple[float, str]], str]:
    """Sorts job2 before job10, v1.9 before v1.10, and lr=1e-05 before lr=0.0001."""
    parts = re.split(r"((?<==)\d+(?:\.\d+)?(?:e-?\d+)?|\d+)", path.name)
    return [(float(part), "") if place % 2 else (-1.0, part) for place, part in enumerate(parts)], path.name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def diagnoses_of(job: Mapping[str, Any]) -> Diagnoses:
    """For the lines of a job with these settings."""
    return Diagnoses(_weights(job), job)


def _weights(job: Mapping[str, Any]) -> Mapping[str, float]:
    """The weights of a job's rewards; empty if they cannot be read from the file."""
    try:
        return weights_of([RewardConfig.model_validate(reward) for reward in job["rewards"]])
    except (KeyError, TypeError, ValidationError):
        return {}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _find(config: Mapping[str, Any], key: str) -> Any:
    """A key of the identity or of one of its parts."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        value = part.get(key)
        if value is not None and not isinstance(value, dict | list):
            return value
    return None
