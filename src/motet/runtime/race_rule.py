"""Who of a race goes on: a pure function of the rewards of the same held-out rows, whatever the order of arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from motet.runtime.settings import Mean

CONFIRMS = 3
"""Every third held-out row confirms the winner, and no decision uses it."""

Verdict = Literal["leads", "goes on", "worse", "dropped", "failed"]


@dataclass(frozen=True)
class RaceStanding:
    """A candidate at a decision."""

    name: str
    verdict: Verdict
    """`worse` is dropped with proof: its interval is below 0. `dropped` is not shown worse, but not among the best."""
    mean: float | None = None
    """Held-out reward on the rows that decide; None of a job that failed."""
    difference: float | None = None
    """From the leader, mean over the same rows; None of the leader."""
    low: float | None = None
    high: float | None = None
    """Interval of the difference; None with fewer than two rows."""

    @property
    def stays(self) -> bool:
        """Whether it goes on."""
        return self.verdict in ("leads", "goes on")


def deciding(rows: Sequence[float]) -> list[float]:
    """The rows that decide."""
    return [value for place, value in enumerate(rows) if place % CONFIRMS != CONFIRMS - 1]


def confirming(rows: Sequence[float]) -> list[float]:
    """The rows that no decision uses."""
    return [value for place, value in enumerate(rows) if place % CONFIRMS == CONFIRMS - 1]


def mean_of(rows: Sequence[float]) -> float:
    """Over the rows whose reward is known; -inf without any."""
    known = [value for value in rows if math.isfinite(value)]
    return fmean(known) if known else -math.inf


def paired(ours: Sequence[float], theirs: Sequence[float], level: float) -> Mean | None:
    """Mean of `ours − theirs` over rows that have both, with its interval by Student's t; None where no row has both."""
    known = [a - b for a, b in zip(ours, theirs, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return Mean.of(known, level) if known else None


def ranked(rows: Mapping[str, Sequence[float]]) -> list[str]:
    """Candidates, the best mean first; by name among equals."""
    means = {name: mean_of(some) for name, some in rows.items()}
    return sorted(rows, key=lambda name: (-means[name], name))


def decide(rows: Mapping[str, Sequence[float]], keep: int, level: float, rungs: int) -> tuple[RaceStanding, ...]:
    """The best `keep` candidates go on, without those that are shown worse than the leader.

    Args:
        rows: by candidate, the rewards of the rows that decide, in the same order; NaN where no reward is known.
        keep: the most that go on.
        level: of all intervals of all decisions together.
        rungs: how many decisions there are: each has an equal share of the error, split over all pairs of its candidates.

    Returns:
        A standing for each, the best mean first.
    """
    order = ranked(rows)
    pairs = max(1, len(order) * (len(order) - 1) // 2)
    each = 1 - (1 - level) / (rungs * pairs)
    standings = []
    for place, name in enumerate(order):
        mean = mean_of(rows[name])
        if place == 0:
            standings.append(RaceStanding(name, "leads", _known(mean)))
            continue
        gap = paired(rows[name], rows[order[0]], each)
        low, high = (None, None) if gap is None or gap.n < 2 else (gap.mean - gap.half, gap.mean + gap.half)
        worse = high is not None and high < 0
        verdict: Verdict = "worse" if worse else "goes on" if place < keep else "dropped"
        standings.append(RaceStanding(name, verdict, _known(mean), None if gap is None else gap.mean, low, high))
    return tuple(standings)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
