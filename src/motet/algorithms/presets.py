"""Published algorithms by what sets each apart: how rewards become advantages, the loss of a token, and its mean."""

from __future__ import annotations

from typing import Literal

from motet.algorithms.advantages import AdvantageKind, Reduction
from motet.algorithms.policy_gradient import LossName, PolicyGradient


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
    """PPO (arXiv 1707.06347) without a critic: the step's mean reward is the baseline."""

    type: Literal["ppo"] = "ppo"
    advantage: AdvantageKind = "batch_baseline"
