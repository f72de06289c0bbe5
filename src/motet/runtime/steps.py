"""What a step sampled, and what it trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from motet.algorithms.algorithm import StepBatch
from motet.batch import LossStats, OptimStats
from motet.types import Group


@dataclass
class SampledStep:
    """All groups of one step, in data order, and what they cost."""

    step: int
    version: int
    groups: list[Group]
    seconds: float
    reward_seconds: float
    tokens: int
    """Tokens that were sampled."""
    positions: tuple[int, ...] = ()
    """The groups' positions in the sequence of problems, where they are not a window of it."""

    def with_more(self, more: SampledStep) -> SampledStep:
        """The step with groups that were sampled after these."""
        return replace(
            self,
            groups=self.groups + more.groups,
            seconds=self.seconds + more.seconds,
            reward_seconds=self.reward_seconds + more.reward_seconds,
            tokens=self.tokens + more.tokens,
        )

    @property
    def oldest(self) -> int:
        """The oldest version that sampled a token."""
        branches = (branch for group in self.groups for rollout in group.rollouts for branch in rollout.branches)
        sampled = (branch.versions[branch.loss_mask] for branch in branches if branch.sampled)
        return min((int(versions.min()) for versions in sampled), default=self.version)


@dataclass(frozen=True)
class Valued:
    """What a critic learned in a step."""

    loss: float
    """Before the first update."""
    explained: float
    """Share of the returns' variance that its values explained."""


@dataclass(frozen=True)
class LearnedStep:
    """What a step trained and what came of it."""

    batch: StepBatch
    stats: LossStats
    """Of the first update."""
    optim: OptimStats | None
    """Of the last update; None where nothing was trainable."""
    tokens: int
    """Tokens that were run through the trainer."""
    valued: Valued | None = None
    """Where there is a critic."""
