"""Losses of one job's segment: pure functions of tensors.

A loss is a sum over the tokens of the segment, divided by a figure of the job's complete step, so the losses and
gradients of micro-batches add up to those of the step. Nothing here looks beyond the one segment.

Legend: N trainable tokens of the segment, S its samples. π is the trained policy, `old` the policy in the denominator
of ratios: the sampler, or with `correct_sampler` the policy at the start of the step. A are the advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet.core.batch import Loss, LossFunctions, LossInputs, LossStats, Sample, TokenLosses
from motet.core.types import FloatArray

MOST_LOG_RATIO = 20.0
"""Largest log ratio in a loss. Above it the ratio is e^20 and has no gradient, so no term overflows, or turns an advantage
of 0 into NaN."""


@dataclass(frozen=True)
class PolicyLoss:
    """Settings of `policy_losses`; see `PolicyGradient`."""

    name: str
    """A key of `LOSSES`."""
    clip_low: float
    clip_high: float
    importance_cap: float
    correct_sampler: bool
    kl_coef: float
    kl_type: str
    """A key of `KL_ESTIMATORS`."""


def ppo_clip(low: float, high: float, inputs: LossInputs, log_ratio_N: Tensor) -> TokenLosses:
    """−min(ρ·A, clip(ρ, low, high)·A), ρ = π / old.

    Source: PPO (Schulman et al. 2017, arXiv 1707.06347), eq. 7; two bounds after DAPO (arXiv 2503.14476), eq. 10.
    """
    return _clipped_surrogate(low, high, _exp(inputs, log_ratio_N), inputs.advantages_N)


def gspo(low: float, high: float, inputs: LossInputs, log_ratio_N: Tensor) -> TokenLosses:
    """PPO's clip on the ratio of the sequence, s = exp(mean over its tokens of log π / old), with gradient through s.

    Each token carries its sample's loss, so that reduction `sequence` gives the paper's mean over sequences.
    Typical ranges are tiny: 3e-4 below and 4e-4 above.
    Source: GSPO (Zheng et al. 2025, arXiv 2507.18071), eq. 5 to 7.
    """
    means_N = _means_of_sequences(inputs, log_ratio_N, torch.ones_like(log_ratio_N))
    return _clipped_surrogate(low, high, _exp(inputs, means_N), inputs.advantages_N)


def _means_of_sequences(inputs: LossInputs, values_N: Tensor, mask_N: Tensor) -> Tensor:
    """The mean over the masked tokens of each token's sequence [N]."""
    # index_select, not indexing: the backward of indexing may add in any order.
    zeros_S = values_N.new_zeros(inputs.n_samples)
    lengths_S = zeros_S.index_add(0, inputs.sample_N, mask_N)
    means_S = zeros_S.index_add(0, inputs.sample_N, values_N * mask_N) / lengths_S.clamp(min=1)
    return means_S.index_select(0, inputs.sample_N)


def _clipped_surrogate(low: float, high: float, ratio_N: Tensor, advantages_N: Tensor) -> TokenLosses:
    clipped_N = ((ratio_N < low) & (advantages_N < 0)) | ((ratio_N > high) & (advantages_N > 0))
    surrogate_N = torch.where(clipped_N, ratio_N.detach().clamp(low, high), ratio_N) * advantages_N
    return -surrogate_N, clipped_N


def cispo(low: float, high: float, inputs: LossInputs, log_ratio_N: Tensor) -> TokenLosses:
    """−sg(clip(ρ, low, high)) · A · log π: the weight is capped, no token loses its gradient.

    Source: MiniMax-M1 (2025, arXiv 2506.13585), eq. 4 and 5. `clipped` counts capped tokens.
    """
    ratio_N = _exp(inputs, log_ratio_N.detach())
    loss_N = -ratio_N.clamp(low, high) * inputs.advantages_N * inputs.logprobs_N
    return loss_N, (ratio_N < low) | (ratio_N > high)


def importance_sampling(inputs: LossInputs, log_ratio_N: Tensor) -> TokenLosses:
    """−ρ·A, without a bound. Source: Tinker's `importance_sampling`; TRPO's surrogate (arXiv 1502.05477), eq. 14."""
    return -_exp(inputs, log_ratio_N) * inputs.advantages_N, _nowhere(log_ratio_N)


def reinforce(inputs: LossInputs) -> TokenLosses:
    """−A·log π. Source: Williams 1992. No ratio: off-policy data are corrected only by `correct_sampler`."""
    return -inputs.advantages_N * inputs.logprobs_N, _nowhere(inputs.logprobs_N)


def _exp(inputs: LossInputs, log_ratio_N: Tensor) -> Tensor:
    bounded_N = _bounded(log_ratio_N)
    return torch.exp(bounded_N) if inputs.functions is None else inputs.functions.exp(bounded_N)


def _bounded(log_ratio_N: Tensor) -> Tensor:
    # not clamp, whose backward gives NaN the gradient 0
    return torch.where(log_ratio_N > MOST_LOG_RATIO, MOST_LOG_RATIO, log_ratio_N)


def _nowhere(like_N: Tensor) -> Tensor:
    return torch.zeros_like(like_N, dtype=torch.bool)


LOSSES: dict[str, Callable[[PolicyLoss, LossInputs, Tensor], TokenLosses]] = {
    "ppo_clip": lambda own, inputs, log_ratio_N: ppo_clip(1 - own.clip_low, 1 + own.clip_high, inputs, log_ratio_N),
    "importance_sampling": lambda _, inputs, log_ratio_N: importance_sampling(inputs, log_ratio_N),
    "cispo": lambda own, inputs, log_ratio_N: cispo(0.0, own.importance_cap, inputs, log_ratio_N),
    "gspo": lambda own, inputs, log_ratio_N: gspo(1 - own.clip_low, 1 + own.clip_high, inputs, log_ratio_N),
    "reinforce": lambda _, inputs, __: reinforce(inputs),
}


def kl_k1(log_r_N: Tensor, _: LossFunctions | None = None) -> Tensor:
    """k1 = −log r: unbiased in value. As a loss its gradient is 0 in expectation: it only adds noise."""
    return -log_r_N


def kl_k2(log_r_N: Tensor, _: LossFunctions | None = None) -> Tensor:
    """k2 = ½ (log r)²: a little biased in value. On-policy its gradient is that of KL(π ‖ base): the right one."""
    return 0.5 * log_r_N**2


def kl_k3(log_r_N: Tensor, functions: LossFunctions | None = None) -> Tensor:
    """k3 = r − 1 − log r: unbiased, never negative. Its gradient is that of KL(base ‖ π): about right near the base."""
    expm1 = torch.expm1 if functions is None else functions.expm1
    bounded_N = _bounded(log_r_N)
    return expm1(bounded_N) - bounded_N


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Estimators of KL(q ‖ p) per token drawn from q, with r = p / q. Source: Schulman 2020, "Approximating KL divergence";
for the gradients Tang and Munos 2025 (arXiv 2506.09477)."""


def policy_losses(settings: PolicyLoss, inputs: LossInputs) -> TokenLosses:
    """W · policy loss + kl_coef · KL(π ‖ reference), per token.

    w is 1, or with `correct_sampler` the truncated importance weight sg(min(proximal / sampler, importance_cap)); the
    ratio of the policy loss is then π / proximal. Sources: decoupled PPO (Hilton et al. 2022, arXiv 2110.00641);
    truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training").

    Raises:
        ValueError: a KL penalty without reference logprobs.
    """
    inputs = inputs.finite
    log_ratio_N = inputs.logprobs_N - _old_logprobs(settings, inputs)
    loss_N, clipped_N = LOSSES[settings.name](settings, inputs, log_ratio_N)
    if settings.correct_sampler:
        loss_N = loss_N * _sampler_weights(settings, inputs)
    if settings.kl_coef > 0:
        loss_N = loss_N + settings.kl_coef * _kl_to_base(settings, inputs)
    return loss_N, clipped_N


def cross_entropy(inputs: LossInputs) -> TokenLosses:
    """−log π of each target."""
    return -inputs.logprobs_N, _nowhere(inputs.logprobs_N)


def value_losses(clip: float, inputs: LossInputs) -> TokenLosses:
    """½·max((v − R)², (clip(v, v₀ ± clip) − R)²); see `algorithms.critic.ValueLoss`."""
    values_N, olds_N, returns_N = inputs.logprobs_N, inputs.sampler_logprobs_N, inputs.advantages_N
    near_N = torch.minimum(torch.maximum(values_N, olds_N - clip), olds_N + clip)
    plain_N, clipped_N = (values_N - returns_N) ** 2, (near_N - returns_N) ** 2
    return 0.5 * torch.maximum(plain_N, clipped_N), clipped_N > plain_N


def client_losses(name: str, settings: Mapping[str, float], inputs: LossInputs) -> TokenLosses:
    """A loss of `algorithms.client.CLIENT_LOSSES`, with the ratio r = π / sampler and absolute bounds on it.

    Source: the Tinker API's documentation, "Loss functions". `cispo` has no gradient through its weight; `dro` is
    −(A·log π − β/2 (log r)²); `gspo` is `ppo` with the ratio of the sequence, whose gradient goes to each token by itself
    (GSPO-token: arXiv 2507.18071, eq. 13 to 15).
    """
    inputs = inputs.finite
    logprobs_N, advantages_N = inputs.logprobs_N, inputs.advantages_N
    if name == "cross_entropy":
        return cross_entropy(inputs)
    log_ratio_N = logprobs_N - inputs.sampler_logprobs_N
    if name == "dro":
        return 0.5 * settings["beta"] * log_ratio_N**2 - logprobs_N * advantages_N, _nowhere(logprobs_N)
    if name == "importance_sampling":
        return importance_sampling(inputs, log_ratio_N)
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    if name == "cispo":
        return cispo(low, high, inputs, log_ratio_N)
    if name == "gspo":
        mask_N = torch.ones_like(log_ratio_N) if inputs.ratio_mask_N is None else inputs.ratio_mask_N
        log_ratio_N = _means_of_sequences(inputs, log_ratio_N.detach(), mask_N) + logprobs_N - logprobs_N.detach()
    return ppo_clip(low, high, inputs, log_ratio_N)


@torch.no_grad()
def value_of(
    loss: Loss, samples: Sequence[Sample], logprobs: Sequence[FloatArray], functions: LossFunctions | None
) -> float:
    """Σ weight · token loss of samples, from logprobs of their targets ([T] or [T, K] each)."""

    def gathered(values: Iterable[FloatArray | None]) -> Tensor:
        parts = [at_targets(sample, value) for sample, value in zip(samples, values, strict=True)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    logprobs_N = gathered(logprobs)
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros_like(logprobs_N),
        sampler_logprobs_N=gathered(sample.logprobs for sample in samples),
        advantages_N=gathered(sample.advantages for sample in samples),
        weights_N=gathered(sample.weights for sample in samples),
        sample_N=torch.from_numpy(
            np.repeat(np.arange(len(samples)), [sample.n_trainable * sample.n_targets for sample in samples])
        ),
        n_samples=len(samples),
        ratio_mask_N=gathered(sample.ratio_mask for sample in samples),
        functions=functions,
    )
    return float(_sum_of_samples(inputs, loss.token_losses(inputs)[0] * inputs.weights_N))


def _sum_of_samples(inputs: LossInputs, losses_N: Tensor) -> Tensor:
    """The sum of samples' losses in float64, each a multiple of 2⁻³²: below 2²¹ it is exact, so it has no order."""
    losses_S = losses_N.new_zeros(inputs.n_samples, dtype=torch.float64)
    return (losses_S.index_add(0, inputs.sample_N, losses_N.double()) * 2.0**32).round().sum() / 2.0**32


def at_targets(sample: Sample, values: FloatArray | None) -> FloatArray:
    """A field [T] or [T, K] at each target of the trainable positions; 1 without the field."""
    if values is None:
        return np.ones(sample.n_trainable * sample.n_targets, np.float32)
    chosen = values[sample.loss_mask]
    return chosen.reshape(-1) if chosen.ndim == 2 else chosen.repeat(sample.n_targets)


@dataclass(frozen=True)
class TokenSums:
    """What `LossStats` are made of, where it was computed."""

    n_tokens: int
    has_reference: bool
    denominator: float
    sums: Tensor  # fp64 [8]
    """Sums: weighted losses, entropies, ratios, clipped tokens, k3 to the sampler and to the base; largest ratio and gap."""


def loss_and_sums(loss: Loss, denominator: float, inputs: LossInputs) -> tuple[Tensor, TokenSums]:
    """Σ weight · token loss / denominator, and sums for the metrics.

    Args:
        loss: the job's loss.
        denominator: that of the job's complete step (`normalisation`).
        inputs: one job's segment; may be empty.

    Returns:
        A scalar to call backward on, and the segment's sums, which `read_stats` waits for.
    """
    loss_N, clipped_N = loss.token_losses(inputs)
    weighted_N = loss_N * inputs.weights_N
    return weighted_N.sum() / denominator, _sums(denominator, inputs, weighted_N.detach(), clipped_N)


def _old_logprobs(settings: PolicyLoss, inputs: LossInputs) -> Tensor:
    if settings.correct_sampler and inputs.proximal_logprobs_N is not None:
        return inputs.proximal_logprobs_N
    return inputs.sampler_logprobs_N


def _sampler_weights(settings: PolicyLoss, inputs: LossInputs) -> Tensor:
    ratio_N = _exp(inputs, _old_logprobs(settings, inputs) - inputs.sampler_logprobs_N)
    return ratio_N.clamp(max=settings.importance_cap).detach()


def _kl_to_base(settings: PolicyLoss, inputs: LossInputs) -> Tensor:
    if inputs.reference_logprobs_N is None:
        raise ValueError("a KL penalty needs the base's logprobs: run Trainer.forward(base=True) on the samples first")
    return KL_ESTIMATORS[settings.kl_type](inputs.reference_logprobs_N - inputs.logprobs_N, inputs.functions)


@torch.no_grad()
def _sums(denominator: float, inputs: LossInputs, weighted_N: Tensor, clipped_N: Tensor) -> TokenSums:
    inputs = inputs.finite
    tokens, reference_N, own = len(weighted_N), inputs.reference_logprobs_N, inputs.functions
    if tokens == 0:
        return TokenSums(0, False, denominator, weighted_N.new_zeros(8, dtype=torch.float64))
    total = torch.sum if own is None else own.total
    log_ratio_N = inputs.logprobs_N.double() - inputs.sampler_logprobs_N.double()
    ratio_N = _exp(inputs, log_ratio_N)
    kl_base_N = None if reference_N is None else kl_k3(reference_N.double() - inputs.logprobs_N.double(), own)
    weighted = _sum_of_samples(inputs, weighted_N) if inputs.by_sample else total(weighted_N.double())
    summed = [
        inputs.entropy_N.double(),
        ratio_N,
        clipped_N.double(),
        kl_k3(log_ratio_N, own),
        log_ratio_N.new_zeros(1) if kl_base_N is None else kl_base_N,
    ]
    largest = [ratio_N.max(), log_ratio_N.abs().max()]
    sums = torch.stack([weighted, *(total(each) for each in summed), *largest])
    return TokenSums(tokens, kl_base_N is not None, denominator, sums)


def read_stats(each: Sequence[TokenSums]) -> list[LossStats]:
    """The metrics of segments, copied from their device in one transfer."""
    if not each:
        return []
    rows = torch.stack([segment.sums for segment in each]).tolist()
    return [_stats(segment, *row) for segment, row in zip(each, rows, strict=True)]


def _stats(
    own: TokenSums, loss: float, entropy: float, ratio: float, clipped: float, kl_sampler: float, kl_base: float,
    ratio_max: float, gap: float,
) -> LossStats:  # fmt: skip
    if not own.n_tokens:
        return LossStats()
    return LossStats(
        tokens=own.n_tokens,
        loss=loss / own.denominator,
        entropy=entropy,
        ratio=ratio,
        ratio_max=ratio_max,
        clipped=clipped,
        kl_sampler=kl_sampler,
        kl_base=kl_base,
        kl_base_tokens=own.n_tokens if own.has_reference else 0,
        logprob_gap=gap,
    )
