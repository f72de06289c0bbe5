"""Jobs that differ only in their seed form a setting; its figure is a mean with a 95 % interval by Student's t."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from statistics import NormalDist, fmean, stdev
from typing import Any

_SEED = re.compile(r"-seed=-?\d+")
OVER_SEEDS = "mean over the seeds, ± half of its 95 % interval (Student's t)"
"""Describes a setting's held-out figure."""
_NORMAL_FROM = 500
"""Degrees of freedom from which the normal distribution is within 0.2 % of Student's t."""


@dataclass(frozen=True)
class Mean:
    """A mean with a confidence interval."""

    n: int
    """Number of figures."""
    mean: float
    half: float
    """Half the width of the interval; NaN for a single figure."""

    @classmethod
    def of(cls, figures: Sequence[float], level: float = 0.95) -> Mean:
        """The mean of at least one figure with its interval by Student's t at `level`."""
        n = len(figures)
        if n < 2:
            return cls(n, figures[0], math.nan)
        return cls(n, fmean(figures), t_quantile(level, n - 1) * stdev(figures) / math.sqrt(n))


@dataclass(frozen=True)
class Setting:
    """Results of all seeds of one setting."""

    name: str
    """The common part of its jobs' names."""
    jobs: tuple[str, ...]
    """Their names."""
    before: Mean | None
    """The first held-out figure, over the jobs in `held_out`."""
    held_out: Mean | None
    """The held-out figure of the newest version that some job has evaluated, over those that reached it; None before any."""


def setting_of(identity: Mapping[str, Any]) -> str:
    """A text that is equal for jobs whose identities (`identity.of_config`, or job.yaml) differ only in name and seed."""
    job = identity.get("job")
    if not isinstance(job, Mapping):
        return ""
    same = {name: part for name, part in identity.items() if name not in ("seed", "computed_before", "not_followed")}
    same["job"] = {name: part for name, part in job.items() if name not in ("name", "seed")}
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()


def settings(jobs: Iterable[tuple[str, str, Sequence[tuple[int, float]]]]) -> list[Setting]:
    """Group jobs by setting, in the order of their first jobs.

    Args:
        jobs: (name, setting, evaluations) of each job. An empty setting means unknown: the job forms its own. An evaluation is
            (version, figure); higher is better.
    """
    groups: dict[str, list[tuple[str, Sequence[tuple[int, float]]]]] = {}
    for name, setting, evaluations in jobs:
        known = [(version, value) for version, value in evaluations if math.isfinite(value)]
        groups.setdefault(setting or f" {name}", []).append((name, known))
    return [_setting(group) for group in groups.values()]


def _setting(group: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> Setting:
    names = [name for name, _ in group]
    newest = max((known[-1][0] for _, known in group if known), default=None)
    ended = [known for _, known in group if known and known[-1][0] == newest]
    before, held_out = (Mean.of([known[end][1] for known in ended]) if ended else None for end in (0, -1))
    return Setting(common_name(names), tuple(names), before, held_out)


def common_name(names: Sequence[str]) -> str:
    """The names without their seeds if those are equal, otherwise their common prefix."""
    without = {_SEED.sub("", name) for name in names}
    if len(without) == 1:
        return without.pop()
    common = commonprefix(sorted(without))  # noqa: RUF071 - of characters, not of paths
    return re.sub(r"[\W_]+(seed|s)?[\W_]*\d*$", "", common) or names[0]


def t_quantile(level: float, degrees: int) -> float:
    """The quantile t with P(|T| ≤ t) = `level` for Student's t with `degrees` degrees of freedom.

    Bisection of the closed form for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    if degrees >= _NORMAL_FROM:
        return NormalDist().inv_cdf((1 + level) / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < level else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is at most sqrt(degrees) · tan(angle)."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for place in range(degrees // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * place + 1 + odd) / (2 * place + 2 + odd)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
