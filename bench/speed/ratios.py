"""The arithmetic of comparisons: costs, medians, ratios of medians, and how far paired repeats spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Compare = Literal["faster", "cost", "value"]
"""`faster`: the other's cost ÷ ours. `cost`: ours ÷ the other's. `value`: ours alone."""


@dataclass(frozen=True)
class Goal:
    """What a figure should be."""

    sign: Literal["≥", "≤", "<"]
    bound: float

    def met(self, value: float) -> bool:
        """Whether the figure is as it should be."""
        if self.sign == "≥":
            return value >= self.bound
        return value <= self.bound if self.sign == "≤" else value < self.bound


@dataclass(frozen=True)
class Ratio:
    """A comparison of repeats that took turns."""

    middle: float
    """Ratio of the medians; for `value` the median."""
    low: float
    high: float
    """The least and the greatest of the ratios of a pair of neighbouring repeats."""


def cost(answer: Mapping[str, Any], field: str = "") -> float:
    """Seconds for each unit of work, or the figure that a work answers with instead."""
    if field:
        return float(answer[field])
    return float(answer["value"]) if "value" in answer else float(answer["seconds"]) / float(answer["units"])


def middle(costs: Sequence[float]) -> float:
    """The median of the figures that are numbers; NaN where there are none."""
    known = [value for value in costs if math.isfinite(value)]
    return median(known) if known else math.nan


def compare(kind: Compare, ours: Sequence[float], others: Sequence[float] = ()) -> Ratio:
    """Compare costs of repeats; the i-th of each are neighbours in time."""
    if kind == "value":
        return Ratio(middle(ours), min(ours), max(ours))
    above, below = (others, ours) if kind == "faster" else (ours, others)
    pairs = [first / second for first, second in zip(above, below, strict=False)]
    return Ratio(middle(above) / middle(below), min(pairs), max(pairs))
