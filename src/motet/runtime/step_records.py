"""Records of a sampled step and a trained step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from motet.algorithms.algorithm import StepBatch
from motet.core.batch import LossStats, OptimStats
from motet.core.types import Group


@dataclass
class SampledStep:
    """All groups of one step, in data order, with their cost."""

    step: int
    version: int
    groups: list[Group]
    seconds: float
    reward_seconds: float
    tokens: int
    """Tokens that were sampled."""
    positions: tuple[int, ...] = ()
    """The groups' positions in the sequence of problems, where steps do not take fixed windows."""

    def with_more(self, more: SampledStep) -> SampledStep:
        """The step with further groups appended, whose cost has that of the step."""
        return replace(
            self,
            groups=self.groups + more.groups,
            seconds=self.seconds + more.seconds,
            reward_seconds=more.reward_seconds,
            tokens=more.tokens,
        )

    @property
    def oldest(self) -> int:
        """The oldest version that sampled one of its tokens."""
        branches = (branch for group in self.groups for rollout in group.rollouts for branch in rollout.branches)
        sampled = (branch.versions[branch.loss_mask] for branch in branches if branch.sampled)
        return min((int(versions.min()) for versions in sampled), default=self.version)


@dataclass(frozen=True)
class Valued:
    """Results of training a critic."""

    loss: float
    """Before the first update."""
    explained: float
    """Share of the returns' variance that its values explain."""


@dataclass(frozen=True)
class LearnedStep:
    """The trained batch of a step, and its statistics."""

    batch: StepBatch
    stats: LossStats
    """Of the first update."""
    optim: OptimStats | None
    """Of the last update; None if nothing was trainable."""
    tokens: int
    """Tokens that passed through the trainer."""
    valued: Valued | None = None
    """Set with a critic."""
    roles: Mapping[str, LearnedStep] = field(default_factory=dict)
    """Of a team, by role; the fields above are then of all roles together."""


@dataclass
class Supply:
    """Progress through the sequence of problems, where steps do not take fixed windows."""

    position: int = 0
    """The first problem that was never begun."""
    pending: set[int] = field(default_factory=set)
    """Problems begun but not trained."""
