"""Published algorithms, each defined by its advantages, its token loss and its mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from motet.algorithms.advantages import AdvantageKind, Reduction
from motet.algorithms.credit import rewards_at_ends
from motet.algorithms.critic import CriticConfig
from motet.algorithms.policy_gradient import LossName, OfTokens, PolicyGradient
from motet.core.types import Group


class Grpo(PolicyGradient):
    """DeepSeekMath (arXiv 2402.03300), with DAPO's mean over tokens, as TRL runs it by default."""

    type: Literal["grpo"] = "grpo"


class DrGrpo(PolicyGradient):
    """Dr. GRPO (arXiv 2503.20783): neither the group's standard deviation nor the answer's length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    advantage: AdvantageKind = "centered"
    reduction: Reduction = "constant"


class Rloo(PolicyGradient):
    """RLOO (arXiv 2402.14740): the log probability of the whole answer, a sum over its tokens, averaged over answers."""

    type: Literal["rloo"] = "rloo"
    advantage: AdvantageKind = "rloo"
    loss: LossName = "reinforce"
    reduction: Reduction = "constant"


class Reinforce(PolicyGradient):
    """Williams 1992: the same sum, with one baseline for the step."""

    type: Literal["reinforce"] = "reinforce"
    advantage: AdvantageKind = "batch_baseline"
    loss: LossName = "reinforce"
    reduction: Reduction = "constant"


class Cispo(PolicyGradient):
    """MiniMax-M1 (arXiv 2506.13585), eq. 4: GRPO's advantages, averaged over the tokens of the batch."""

    type: Literal["cispo"] = "cispo"
    loss: LossName = "cispo"


class Gspo(PolicyGradient):
    """GSPO (arXiv 2507.18071), eq. 5: GRPO's advantages, averaged over sequences."""

    type: Literal["gspo"] = "gspo"
    loss: LossName = "gspo"
    reduction: Reduction = "sequence"


class ImportanceSampling(PolicyGradient):
    """Tinker's loss of the same name: a sum over tokens; `constant` is that sum up to a factor."""

    type: Literal["importance_sampling"] = "importance_sampling"
    advantage: AdvantageKind = "centered"
    loss: LossName = "importance_sampling"
    reduction: Reduction = "constant"


class Ppo(PolicyGradient):
    """PPO (arXiv 1707.06347). Without a critic the step's mean reward is the baseline."""

    type: Literal["ppo"] = "ppo"
    advantage: AdvantageKind = "batch_baseline"
    critic: CriticConfig | None = None
    """A critic that estimates the advantage of each token; `{}` uses its defaults."""

    @model_validator(mode="after")
    def _the_critic_gives_advantages(self) -> Ppo:
        if self.critic is not None and self.discount != 1:
            raise ValueError("discount: with a critic every token discounts; set critic.gamma instead")
        if self.critic is not None and self.advantage != "batch_baseline":
            raise ValueError("advantage: the critic gives the advantages; leave one of the two out")
        return self

    @property
    def needs_values(self) -> CriticConfig | None:
        """The critic, if there is one."""
        return self.critic

    def advantages(self, groups: Sequence[Group], max_tokens: int) -> Sequence[Sequence[OfTokens]]:
        """With a critic: the rewards, which the critic turns into advantages."""
        if self.critic is None:
            return super().advantages(groups, max_tokens)
        of_turns = self.credit == "return_to_go"
        return [[rewards_at_ends(rollout, of_turns=of_turns) for rollout in group.scored] for group in groups]
