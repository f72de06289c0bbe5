"""Warnings from the lines of metrics.jsonl.

Rewards that fail, signal that is missing or lost, answers that grow alike, a policy far from the base, versions that got worse,
rewards that rise while something else says that the answers are no better.

signs = Signs()
for line in lines:
    signs.see(line)
signs.warnings
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
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
CUT_OFF = 0.5
"""The share of answers that end at `max_tokens` from which on there is a warning, where the reward rises with the length."""
ALIKE = 0.5
"""The share of distinct answers, as a part of the share at first, at which there is a warning unless the reward has risen."""


@dataclass(frozen=True)
class _Evaluation:
    version: int
    reward: float
    error: float
    """Standard error of the reward."""


@dataclass
class Signs:
    """The first and the newest steps of one job."""

    monitors: Collection[str] = ()
    """Rewards of weight 0, by the names of their parts: they are measured and not trained on."""
    first: list[Line] = field(default_factory=list)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    kl: float | None = None
    """The newest KL to the base that was measured."""
    rollouts: int = 0
    """Of all steps."""
    failed: int = 0
    """Those without a reward."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rollouts by the reason why they have no reward, where it is known."""
    peak: tuple[int, float] | None = None
    """The step with the highest mean reward of those with signal, and that reward."""
    earliest: _Evaluation | None = None
    best: _Evaluation | None = None
    last: _Evaluation | None = None

    def see(self, line: Line) -> None:
        """Take in the next step's line, with its `errors` where they are known."""
        if "no_signal" not in line:
            return
        if len(self.first) < LEAST:
            self.first.append(line)
        self.recent.append(line)
        self.kl = next(_numbers([line], "kl_base"), self.kl)
        self.rollouts += int(next(_numbers([line], "rollouts"), 0))
        self.failed += int(next(_numbers([line], "failed"), 0))
        if isinstance(errors := line.get("errors"), Mapping):
            self.errors.update({str(reason): int(n) for reason, n in errors.items() if isinstance(n, int)})
        reward, share = _mean([line], "reward"), _mean([line], "no_signal")
        if share < NO_SIGNAL and not reward <= (self.peak or (0, -math.inf))[1]:
            self.peak = int(line.get("step", 0)), reward

    def see_evaluation(self, version: int, evaluation: Line) -> None:
        """Take in the held-out reward of a version; other figures say nothing."""
        reward = _mean([evaluation], "reward")
        if math.isfinite(reward):
            error = _mean([evaluation], "reward_stderr")
            self.last = _Evaluation(version, reward, error if math.isfinite(error) else math.inf)
            self.earliest = self.earliest or self.last
            if self.best is None or reward > self.best.reward:
                self.best = self.last

    @property
    def warnings(self) -> dict[str, str]:
        """What a person should look at: a sentence for each kind of trouble (`failed`, `lost`, `no signal`, `alike`, …)."""
        warnings = {"failed": self._failed(), "worse": self._worse()}
        risen = _risen(self.first, self.recent)
        if risen and len(self.recent) == RECENT:
            warnings["gamed"] = self._gamed()
        if len(self.recent) >= LEAST and not risen:
            warnings["lost"] = self._lost()
            if not warnings["lost"]:
                warnings["no signal"] = no_signal(_mean(self.recent, "no_signal"), _mean(self.recent, "reward"))
                warnings["alike"] = _alike(_mean(self.first, "distinct"), _mean(self.recent, "distinct"))
        if self.kl is not None and self.kl >= FAR and len(self.recent) >= LEAST and (not risen or warnings["worse"]):
            warnings["far"] = (
                f"far from the base: KL {self.kl:.2g} nats per token; lower optimizer.lr, or set algorithm.kl.coef"
            )
        return {kind: warning for kind, warning in warnings.items() if warning}

    def _failed(self) -> str:
        if not self.failed:
            return ""
        why = f", commonest: {self.errors.most_common(1)[0][0]}" if self.errors else ""
        return f"{self.failed} of {self.rollouts} rollouts have no reward{why}"

    def _lost(self) -> str:
        """Where a reward that had signal fell to where nearly no group has any."""
        last = list(self.recent)[-LEAST:]
        now, spread = _mean(last, "reward"), _mean(self.first, "reward_std")
        if self.peak is None or not _mean(last, "no_signal") >= NO_SIGNAL or not self.peak[1] - now > spread / 2:
            return ""
        rates = list(_numbers([*self.first, *self.recent], "lr"))
        rate = f" (it is {rates[-1]:.2g})" if rates else ""
        return (
            f"had signal and lost it after step {self.peak[0]} (mean reward {self.peak[1]:.2g}, now {now:.2g}): the learning "
            f"rate is too high; lower optimizer.lr{rate} and begin again"
        )

    def _gamed(self) -> str:
        """What speaks against a reward that rises: a monitor or held-out rewards that fall, or answers that never end."""
        last, reasons = list(self.recent)[-LEAST:], []
        for name in self.monitors:
            before, now = (list(_numbers(map(_parts, lines), name)) for lines in (self.first, last))
            if len(before) > 1 and len(now) > 1 and fmean(before) - fmean(now) > 2 * _error(before, now):
                reasons.append(f"{name} falls ({fmean(before):.2g} to {fmean(now):.2g})")
        if (
            self.earliest
            and self.last
            and self.earliest.reward - self.last.reward > 2 * math.hypot(self.earliest.error, self.last.error)
        ):
            reasons.append(f"held-out reward falls ({self.earliest.reward:.2g} to {self.last.reward:.2g})")
        longer, cut = _mean(last, "length") > 2 * _mean(self.first, "length"), _mean(last, "truncated")
        if longer and cut >= CUT_OFF > _mean(self.first, "truncated"):
            reasons.append(f"{cut:.0%} of the answers end at max_tokens")
        if not reasons:
            return ""
        return (
            f"the reward rises while {' and '.join(reasons)}: it may measure something else than you want; read the "
            "rollouts with the highest reward"
        )

    def _worse(self) -> str:
        """Where the newest version is worse on held-out problems by more than chance explains."""
        best, last = self.best, self.last
        if best is None or last is None or not best.reward - last.reward > 2 * math.hypot(best.error, last.error):
            return ""
        return (
            f"v{last.version} is worse on held-out problems than v{best.version} ({last.reward:.2f} against "
            f"{best.reward:.2f}): take v{best.version}"
        )


def no_signal(share: float, reward: float) -> str:
    """A warning where most groups teach nothing.

    Args:
        share: of the groups whose rewards are all equal.
        reward: mean reward.
    """
    if not share >= NO_SIGNAL or math.isnan(reward):  # where no answer has a reward, that is the trouble
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


def _parts(line: Line) -> Line:
    parts = line.get("reward_parts")
    return parts if isinstance(parts, Mapping) else {}


def _error(*samples: Sequence[float]) -> float:
    """Standard error of the difference between the means of two samples."""
    return math.sqrt(sum(variance(sample) / len(sample) for sample in samples))


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
