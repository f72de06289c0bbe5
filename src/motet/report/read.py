"""What a run left on disk, as records. Files may be missing, half written or damaged: what can be read is taken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from motet.errors import RunError

Line = Mapping[str, Any]
MAX_POINTS = 1500
"""Points of one curve; longer ones are averaged over equal stretches."""
_JOB_FILES = ("job.yaml", "metrics.jsonl", "status.json")


@dataclass(frozen=True)
class Series:
    """A curve. A y that is not a number is a gap: something was done there, and this was not measured."""

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return any(map(math.isfinite, self.ys))

    @property
    def known(self) -> Series:
        """The same without gaps."""
        return series(zip(self.xs, self.ys, strict=True))

    def thinned(self, limit: int = MAX_POINTS) -> Series:
        """At most about `limit` points; a gap stays where a whole stretch is one."""
        if len(self.xs) <= limit:
            return self
        size = math.ceil(len(self.xs) / limit)
        stretches = [slice(start, start + size) for start in range(0, len(self.xs), size)]
        return Series(*(tuple(_mean(values[part]) for part in stretches) for values in (self.xs, self.ys)))

    def smoothed(self) -> Series:
        """A centred mean over about a tenth of the curve, at least five points, weighted less towards its ends."""
        known = self.known
        reach = max(1, len(known.xs) // 40)
        means = iter(_centred_means(_centred_means(known.ys, reach), reach))
        return Series(self.xs, tuple(next(means) if math.isfinite(y) else y for y in self.ys))


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _centred_means(values: Sequence[float], reach: int) -> tuple[float, ...]:
    sums = [0.0, *accumulate(values)]
    windows = ((max(at - reach, 0), min(at + reach + 1, len(values))) for at in range(len(values)))
    return tuple((sums[end] - sums[start]) / (end - start) for start, end in windows)


@dataclass(frozen=True)
class Pair:
    """The same held-out problem before and after training."""

    prompt: str
    answer: str
    before: Line | None
    after: Line | None
    """Lines of the rollout log; None where that evaluation lacks the problem."""


@dataclass(frozen=True)
class JobRecord:
    """One job's files."""

    name: str
    path: Path
    state: str
    message: str
    inexact: tuple[str, ...]
    config_text: str
    """job.yaml as it is."""
    base: str
    planned: int | None
    """Steps asked for, if job.yaml says so."""
    steps: tuple[Line, ...]
    """metrics.jsonl."""
    timings: tuple[Line, ...]
    pairs: tuple[Pair, ...]
    pair_versions: tuple[int, int] | None
    """Versions that the pairs compare."""
    versions: tuple[int, ...]
    """Adapters on disk."""

    @property
    def done(self) -> int:
        """Steps done."""
        return sum("reward" in line for line in self.steps)

    def series(self, field: str) -> Series:
        """A field of metrics.jsonl over steps, with a gap where a step has no number for it."""
        points = [
            (x, number(line[field]))
            for line in self.steps
            if field in line and (x := number(line.get("step"))) is not None
        ]
        return Series(tuple(x for x, _ in points), tuple(math.nan if y is None else y for _, y in points))

    @property
    def evaluations(self) -> Series:
        """Held-out reward over versions: the line of a step has the evaluation of the version it starts from."""
        found = ((line.get("step"), line.get("eval")) for line in self.steps)
        return series((step, part.get("reward")) for step, part in found if isinstance(part, dict))

    @property
    def best_version(self) -> int | None:
        """The version with the highest evaluation; the earlier one among equals."""
        found = self.evaluations
        if not found:
            return None
        best = max(range(len(found.ys)), key=lambda index: (found.ys[index], -index))
        return int(found.xs[best])

    @property
    def tokens(self) -> int:
        """Sampled and trained, by the timings."""
        keys = ("tokens_sampled", "tokens_trained")
        return sum(int(number(line.get(key)) or 0) for line in self.timings for key in keys)


@dataclass(frozen=True)
class RunRecord:
    """All jobs of a run directory, by name."""

    path: Path
    jobs: tuple[JobRecord, ...]

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.path.resolve().name


def read_run(path: Path) -> RunRecord:
    """Read every job of a run directory.

    Raises:
        RunError: there is none.
    """
    found = [
        item for item in sorted(path.glob("*"), key=_natural) if any((item / file).is_file() for file in _JOB_FILES)
    ]
    if not found:
        raise RunError(
            f"{path} has no jobs: give the directory of a run (`run:` in the job file, runs/default by default)"
        )
    return RunRecord(path, tuple(read_job(item) for item in found))


def read_job(path: Path) -> JobRecord:
    """Read one job's directory."""
    config_text = _text(path / "job.yaml")
    config = _config(config_text)
    steps = read_lines(path / "metrics.jsonl")
    status = _object(_text(path / "status.json"))
    pairs, pair_versions = read_pairs(path / "rollouts")
    planned = number(_find(config, "steps"))
    inexact = status.get("inexact")
    return JobRecord(
        name=path.name,
        path=path,
        state=str(status.get("state") or ("unknown" if steps else "queued")),
        message=str(status.get("message") or ""),
        inexact=tuple(str(reason) for reason in inexact) if isinstance(inexact, list) else (),
        config_text=config_text,
        base=str(_find(config, "base") or ""),
        planned=int(planned) if planned is not None else None,
        steps=steps,
        timings=read_lines(path / "timings.jsonl"),
        pairs=pairs,
        pair_versions=pair_versions,
        versions=tuple(sorted(_numbers(path / "versions", r"v(\d+)"))),
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
        answer = line.get("answer")
        pairs.append(Pair(_shown(line.get("prompt")), _shown(answer), before.get(problem), after.get(problem)))
    return tuple(pairs), (first, last)


def series(points: Iterable[tuple[Any, Any]]) -> Series:
    """A curve of the points whose both coordinates are finite numbers."""
    known = [(x, y) for a, b in points if (x := number(a)) is not None and (y := number(b)) is not None]
    return Series(tuple(x for x, _ in known), tuple(y for _, y in known))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        found = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _first_rollouts(lines: Iterable[Line]) -> dict[Any, Line]:
    found: dict[Any, Line] = {}
    for line in lines:
        found.setdefault(str(line.get("problem")), line)
    return found


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _numbers(directory: Path, pattern: str) -> list[int]:
    names = (item.name for item in directory.glob("*"))
    return [int(match[1]) for name in names if (match := re.fullmatch(pattern, name))]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts job2 before job10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _config(text: str) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


def _find(config: Mapping[str, Any], key: str) -> Any:
    """A key of the identity or of one of its parts."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        value = part.get(key)
        if value is not None and not isinstance(value, dict | list):
            return value
    return None
