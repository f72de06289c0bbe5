"""DAPO (Yu et al. 2025, arXiv 2503.14476): clip-higher, a mean over tokens, dynamic sampling, and a soft limit on length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from motet.algorithms.credit import stretches
from motet.algorithms.policy_gradient import OfTokens, PolicyGradient
from motet.core.types import Group, Rollout


class Dapo(PolicyGradient):
    """DAPO: GRPO's advantages over groups that all have a signal. Clip ranges and mean are those of every algorithm here."""

    type: Literal["dapo"] = "dapo"
    oversampling: float = Field(3.0, ge=1, le=8)
    """Dynamic sampling (section 3.2): a step has this many times groups_per_step problems and samples them in data order
    until groups_per_step groups have a signal."""
    overlong_buffer: int = Field(0, ge=0, le=10**7)
    """Soft overlong punishment (section 3.4): within this many tokens of max_tokens the reward falls by up to 1; 0 turns it
    off."""

    def mistake(self, max_tokens: int) -> str | None:
        """A buffer longer than answers."""
        if self.overlong_buffer <= max_tokens:
            return None
        return (
            f"algorithm.overlong_buffer: {self.overlong_buffer} is more than sampling.max_tokens, {max_tokens}, so every "
            "answer would be punished; lower it"
        )

    def advantages(self, groups: Sequence[Group], max_tokens: int) -> Sequence[Sequence[OfTokens]]:
        """GRPO's advantages of the rewards plus the punishment."""
        judged = [
            group.rewarded(lambda rollout: rollout.reward + self.punishment(rollout, max_tokens)) for group in groups
        ]
        return super().advantages(judged, max_tokens)

    def punishment(self, rollout: Rollout, max_tokens: int) -> float:
        """Between −1 and 0, eq. 13: 0 if the longest turn has up to max_tokens − overlong_buffer tokens, −1 at max_tokens."""
        if not self.overlong_buffer:
            return 0.0
        longest = max((last - first for branch in rollout.branches for first, last in stretches(branch)), default=0)
        over = longest - (max_tokens - self.overlong_buffer)
        return -min(max(over / self.overlong_buffer, 0.0), 1.0)
