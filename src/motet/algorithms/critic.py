"""A critic: estimates the value of an unfinished answer at each token, so a token's advantage is the change of value.

Legend: T tokens of a sequence, N of them sampled by the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from motet.algorithms.algorithm import StepBatch
from motet.core.batch import LossInputs, Sample, TokenLosses
from motet.core.settings import Config
from motet.core.types import FloatArray

Values = NDArray[np.float64]


class CriticConfig(Config):
    """A second adapter on the same base with a scalar head. It takes a slot."""

    rank: int = Field(32, ge=1, le=512)
    """Rank of the critic."""
    lr: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = "auto"
    """Learning rate; `auto` takes that of the policy."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a token."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of the advantages: 1 uses observed rewards only, 0 trusts the next value of the critic."""
    clip: float = Field(0.5, gt=0)
    """How far a value may move in one step before it gets no gradient."""
    warmup_steps: int = Field(0, ge=0, le=10**6)
    """First steps in which only the critic learns."""


@dataclass(frozen=True)
class ValueLoss:
    """½·max((v − R)², (clip(v, v₀ ± `clip`) − R)²), with v₀ the value before the step.

    Source: PPO's implementation (Schulman et al. 2017; verl's `cliprange_value`). The inputs' logprobs are values, the
    sampler's logprobs v₀, and advantages the returns R.
    """

    clip: float

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Loss of each value [N], and whether the clip touched it [N]."""
        from motet.algorithms.losses import value_losses

        return value_losses(self.clip, inputs)


def generalised_advantages(rewards_N: Values, values_N: Values, gamma: float, lam: float) -> Values:
    """A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γ·V_{t+1} − V_t, over the sampled tokens of one sequence.

    Tokens that the model read in between are skipped: the next value is that of the next sampled token, and 0 after the
    last one.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16.
    """
    advantages_N, later, next_value = np.zeros_like(values_N), 0.0, 0.0
    for token in reversed(range(len(values_N))):
        delta = rewards_N[token] + gamma * next_value - values_N[token]
        later = advantages_N[token] = delta + gamma * lam * later
        next_value = values_N[token]
    return advantages_N


@dataclass(frozen=True)
class Credited:
    """The training data of a step for policy and critic."""

    policy: StepBatch
    critic: StepBatch
    explained: float
    """Share of the returns' variance that the values explained; NaN if all returns are equal."""


def credited(batch: StepBatch, values: Sequence[FloatArray], config: CriticConfig) -> Credited:
    """Advantages for the policy, standardised over the step's tokens, and returns for the critic.

    Args:
        batch: samples whose advantages are their rewards, each at its token.
        values: the critic's values, [T] for each sample.
        config: γ and λ.
    """
    advantages, olds = [], []
    for sample, values_T in zip(batch.samples, values, strict=True):
        values_N = values_T[sample.loss_mask].astype(np.float64)
        rewards_N = sample.advantages[sample.loss_mask].astype(np.float64)
        advantages.append(generalised_advantages(rewards_N, values_N, config.gamma, config.lam))
        olds.append(values_N)
    together, before = np.concatenate(advantages), np.concatenate(olds)
    returns, spread = together + before, float(np.var(together + before))
    mean, std = together.mean(), together.std()
    policy, critic = [], []
    for sample, own, old in zip(batch.samples, advantages, olds, strict=True):
        policy.append(replace(sample, advantages=_placed(sample, (own - mean) / (std + 1e-8))))
        critic.append(replace(sample, advantages=_placed(sample, own + old), logprobs=_placed(sample, old)))
    explained = 1 - float(np.var(returns - before)) / spread if spread else float("nan")
    return Credited(replace(batch, samples=tuple(policy)), replace(batch, samples=tuple(critic)), explained)


def _placed(sample: Sample, values_N: Values) -> FloatArray:
    """[N] at the sampled tokens of [T], 0 elsewhere."""
    placed = np.zeros(sample.n_tokens, np.float32)
    placed[sample.loss_mask] = values_N
    return placed
