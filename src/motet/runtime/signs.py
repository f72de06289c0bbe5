"""What the lines of metrics.jsonl warn of: no signal, a policy far from the base, answers that grow alike.

signs = Signs()
for line in lines:
    signs.see(line)
signs.warnings
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

Line = Mapping[str, Any]
RECENT = 10
"""Steps that a warning looks back on."""
LEAST = 5
"""Steps before the first warning, and how many at each end say whether the reward has risen."""
NO_SIGNAL = 0.75
"""Share of groups without signal from which on there is a warning, unless the reward has risen."""
FAR = 1.0
"""KL to the base in nats per token from which on there is a warning."""
ALIKE = 0.5
"""The share of distinct answers, as a part of the share at first, at which there is a warning unless the reward has risen."""


@dataclass
class Signs:
    """The first and the newest steps of one job."""

    first: list[Line] = field(default_factory=list)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    kl: float | None = None
    """The newest KL to the base that was measured."""

    def see(self, line: Line) -> None:
        """Take in the next line; one that holds an evaluation alone says nothing."""
        if "no_signal" not in line:
            return
        if len(self.first) < LEAST:
            self.first.append(line)
        self.recent.append(line)
        self.kl = next(_numbers([line], "kl_base"), self.kl)

    @property
    def warnings(self) -> dict[str, str]:
        """What a person should look at: a sentence for each kind of trouble (`no signal`, `alike`, `far`)."""
        warnings: dict[str, str] = {}
        if len(self.recent) < LEAST:
            return warnings
        if not _risen(self.first, self.recent):
            warnings["no signal"] = no_signal(_mean(self.recent, "no_signal"), _mean(self.recent, "reward"))
            warnings["alike"] = _alike(_mean(self.first, "distinct"), _mean(self.recent, "distinct"))
        if self.kl is not None and self.kl >= FAR:
            warnings["far"] = (
                f"far from the base: KL {self.kl:.2g} nats per token; lower optimizer.lr, or set algorithm.kl.coef"
            )
        return {kind: warning for kind, warning in warnings.items() if warning}


def no_signal(share: float, reward: float) -> str:
    """A warning where most groups teach nothing.

    Args:
        share: of the groups whose rewards are all equal.
        reward: mean reward.
    """
    if not share >= NO_SIGNAL:
        return ""
    return (
        f"no signal in {share:.0%} of the groups (mean reward {reward:.2g}): too hard or too easy for this base; take other "
        "problems, give partial rewards, or raise algorithm.group_size"
    )


def _alike(before: float, now: float) -> str:
    if not now <= ALIKE * before:
        return ""
    return (
        f"answers grow alike, and not better: {now:.0%} of a group's are distinct, at first {before:.0%}; lower "
        "optimizer.lr, or raise sampling.temperature"
    )


def _risen(first: Sequence[Line], recent: Iterable[Line]) -> bool:
    """Whether the reward has risen by more than half of its spread: what then has no signal was learned."""
    newest = list(recent)[-LEAST:]
    spread = _mean([*first, *newest], "reward_std")
    return _mean(newest, "reward") - _mean(first, "reward") > spread / 2


def _mean(lines: Iterable[Line], key: str) -> float:
    known = list(_numbers(lines, key))
    return fmean(known) if known else math.nan


def _numbers(lines: Iterable[Line], key: str) -> Iterator[float]:
    for line in lines:
        value = line.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield float(value)
