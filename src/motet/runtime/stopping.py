"""Whether a job ends before its last step: a pure function of its lines of metrics.jsonl.

The same lines give the same answer in any company, on any host and after a resume.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean, variance
from typing import Any

from motet.config import StopConfig
from motet.runtime.held_out import figure_of
from motet.runtime.progress import STOPPED_EARLY
from motet.runtime.settings import t_quantile

_STEPS = 5
"""Steps over which `reward_above` takes the mean: the reward of one step is noisy."""
_LEVEL = 0.9
"""Of the two-sided interval whose upper end is that of the one-sided interval at 95 %."""


class Stopping:
    """Takes the lines of one job in order."""

    def __init__(self, when: StopConfig, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.reason = ""
        """Which rule held first, with its figures; it stays when later lines differ. Empty until one holds."""
        self._when = when
        self._rewards: deque[float] = deque(maxlen=_STEPS)
        compared = 0 if when.no_gain is None else 2 * when.no_gain.evaluations
        self._figures: deque[float] = deque(maxlen=compared)
        for line in lines:
            self.see(line)

    def see(self, line: Mapping[str, Any]) -> None:
        """Take in the next line."""
        if self.reason or not self._when.rules:
            return
        version = line["step"]
        if isinstance(evaluation := line.get("eval"), Mapping):
            self._evaluated(version, *figure_of(evaluation))
        kl, reward = _number(line.get("kl_base")), _number(line.get("reward"))
        if self._when.kl_above is not None and kl > self._when.kl_above:
            self._stop("kl_above", f"the KL of v{version} to the reference is {kl:.3g} nats per token")
        if math.isfinite(reward):
            self._rewards.append(reward)
        if self._when.reward_above is not None and len(self._rewards) == _STEPS:
            mean = fmean(self._rewards)
            if mean > self._when.reward_above:
                self._stop("reward_above", f"the mean reward of the newest {_STEPS} steps is {mean:.3g}")

    def _evaluated(self, version: int, name: str, figure: float) -> None:
        when = self._when
        if not math.isfinite(figure):
            return
        self._figures.append(figure)
        if when.held_out_above is not None and figure > when.held_out_above:
            self._stop("held_out_above", f"the held-out {name} of v{version} is {figure:.3g}")
        if when.no_gain is not None and len(self._figures) == self._figures.maxlen:
            gain, most = gained(self._figures)
            if most < when.no_gain.least:
                n = when.no_gain.evaluations
                self._stop(
                    "no_gain",
                    f"the held-out {name} gained {gain:.2g} over the newest {n} evaluations, at most {most:.2g} with "
                    "95 % confidence",
                )

    def _stop(self, rule: str, why: str) -> None:
        self.reason = self.reason or f"{why} (stop_when.{rule})"


def gained(figures: Iterable[float]) -> tuple[float, float]:
    """How far the mean of the newer half is above that of the older half, and the upper end of its interval.

    The interval is one-sided at 95 %, by Student's t, from the spread within both halves.
    """
    known = list(figures)
    n = len(known) // 2
    before, now = known[:n], known[n:]
    gain, error = fmean(now) - fmean(before), math.sqrt((variance(before) + variance(now)) / n)
    return gain, gain + t_quantile(_LEVEL, 2 * n - 2) * error


def stopped_early(reason: str, step: int, best: int | None) -> str:
    """What a person reads of a job that ended early, and how to train on."""
    kept = "" if best is None else f"; best version: v{best}"
    return (
        f"{STOPPED_EARLY} after step {step}: {reason}{kept}. To train on, change or remove that rule and run the same command "
        "again; on a service, submit a job whose adapter.init is this adapter"
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
