"""Presets: what the name of an algorithm means, in parts that a job can replace one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from motet.algorithms.advantages import AdvantageKind, Reduction
from motet.config import AlgorithmConfig
from motet.types import LossSpec

LossType = Literal["ppo_clip", "importance_sampling", "cispo", "gspo", "reinforce"]


@dataclass(frozen=True)
class Preset:
    """What a preset chooses where the job does not."""

    advantage: AdvantageKind
    loss: LossType
    reduction: Reduction


PRESETS: dict[str, Preset] = {
    # DeepSeekMath, arXiv 2402.03300, with DAPO's token reduction, as TRL runs it by default.
    "grpo": Preset("grpo", "ppo_clip", "token"),
    # arXiv 2503.20783: neither the group's standard deviation nor the answer's length.
    "dr_grpo": Preset("centered", "ppo_clip", "constant"),
    # arXiv 2503.14476: clip-higher (0.2 / 0.28, Motet's default), token reduction; dynamic sampling is `oversampling`.
    "dapo": Preset("grpo", "ppo_clip", "token"),
    # arXiv 2402.14740: the log probability of the whole answer, a sum over its tokens, averaged over answers.
    "rloo": Preset("rloo", "reinforce", "constant"),
    # Williams 1992: the same sum, with one baseline for the step.
    "reinforce": Preset("batch_baseline", "reinforce", "constant"),
    # MiniMax-M1, arXiv 2506.13585, eq. 4: GRPO's advantages, averaged over the tokens of the batch.
    "cispo": Preset("grpo", "cispo", "token"),
    # arXiv 2507.18071, eq. 5: GRPO's advantages, averaged over sequences.
    "gspo": Preset("grpo", "gspo", "sequence"),
    # Tinker's loss of the same name: a sum over tokens; `constant` is that sum up to a factor.
    "importance_sampling": Preset("centered", "importance_sampling", "constant"),
    # arXiv 1707.06347 without a critic: the step's mean reward is the baseline.
    "ppo": Preset("batch_baseline", "ppo_clip", "token"),
}

TOKEN_CLIP = (0.2, 0.28)
"""Clip range of token ratios, from DAPO (arXiv 2503.14476, section 4.1)."""

GSPO_CLIP = (3e-4, 4e-4)
"""Clip range of sequence ratios, from GSPO's experiments (arXiv 2507.18071, section 5.1)."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with every choice made."""

    advantage: AdvantageKind
    loss: LossType
    reduction: Reduction
    clip_low: float
    clip_high: float
    kl_coef: float
    kl_type: Literal["k1", "k2", "k3"]
    importance_cap: float
    correct_sampler: bool

    @property
    def needs_reference(self) -> bool:
        """Whether samples must carry the base's logprobs."""
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether samples must carry the logprobs of the policy at the start of the step."""
        return self.correct_sampler

    def loss_spec(self, temperature: float) -> LossSpec:
        """What the trainer is told; the temperature is the sampler's."""
        return LossSpec(
            type=self.loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            kl_coef=self.kl_coef,
            kl_type=self.kl_type,
            importance_cap=self.importance_cap,
            correct_sampler=self.correct_sampler,
            temperature=temperature,
        )


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Fill in what the job left open.

    Fields that are set win over the preset. Clip ranges go with the resolved loss: a sequence ratio is a geometric mean
    over tokens and stays near 1, so `gspo` clips at 1 − 3e-4 and 1 + 4e-4 unless the job gives a range, all others at
    DAPO's 0.2 and 0.28.
    """
    preset = PRESETS[config.type]
    loss = config.loss or preset.loss
    clip_low, clip_high = GSPO_CLIP if loss == "gspo" else TOKEN_CLIP
    return Algorithm(
        advantage=config.advantage or preset.advantage,
        loss=loss,
        reduction=config.reduction or preset.reduction,
        clip_low=clip_low if config.clip_low is None else config.clip_low,
        clip_high=clip_high if config.clip_high is None else config.clip_high,
        kl_coef=config.kl.coef,
        kl_type=config.kl.type,
        importance_cap=config.importance_cap,
        correct_sampler=config.correct_sampler,
    )
