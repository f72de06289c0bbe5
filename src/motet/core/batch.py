"""Training data: the groups of a step become `Sample`s, and samples of several adapters are packed into one `Batch`.

Legend of array suffixes in comments: T tokens of one sequence (prompt included), K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np

from motet.core.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

TokenLosses: TypeAlias = "tuple[Tensor, Tensor]"
"""Loss of each token [N], and whether the clip touched it [N] bool."""

LEAST_LOGPROB = -10_000.0
"""Counts for a logprob of −∞, which has no gradient: of a target that has lost its whole probability, or a reference's."""


@dataclass(frozen=True)
class Sample:
    """A trainable token sequence. Worked example, prompt of 2 tokens and completion of 3:

    token_ids  [11, 12, 21, 22, 2]
    loss_mask  [ 0,  0,  1,  1, 1]
    logprobs   [ 0,  0, -.5, -.1, -.2]   the sampler's
    advantages [ 0,  0, .7, .7, .7]
    """

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T]
    logprobs: FloatArray  # [T]
    advantages: FloatArray  # [T]
    versions: IntArray  # [T]
    weights: FloatArray | None = None  # [T] or [T, K] factor of each token's loss in the sum; None is all ones
    targets: IntArray | None = None  # [T] or [T, K] tokens to predict at each position; None is token_ids
    reference_logprobs: FloatArray | None = None  # [T] of the base, if a loss or a metric needs it
    proximal_logprobs: FloatArray | None = None  # [T] of the policy at the step's start, for off-policy corrections
    ratio_mask: FloatArray | None = None  # [T] 1 where a token counts in the ratio of its sequence; None is all ones

    @property
    def n_tokens(self) -> int:
        """Length of the sequence, prompt included."""
        return len(self.token_ids)

    @property
    def n_trainable(self) -> int:
        """Number of tokens that carry a loss."""
        return int(self.loss_mask.sum())

    @property
    def n_targets(self) -> int:
        """Number of targets of each trainable token."""
        return 1 if self.targets is None or self.targets.ndim == 1 else self.targets.shape[1]

    @property
    def work(self) -> int:
        """Charged work: its tokens, times the targets of each."""
        return self.n_tokens * self.n_targets


@dataclass(frozen=True)
class Example:
    """A token sequence from a data row, and which of its tokens are trained."""

    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T]
    targets: IntArray | None = None  # [T, K] tokens that a teacher finds likely at each position; None is token_ids
    shares: FloatArray | None = None  # [T, K] the teacher's probabilities of them

    @property
    def n_learned(self) -> int:
        """Number of trained tokens."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Row:
    """A data row in the form that an algorithm trains on: one example, or several to compare."""

    examples: tuple[Example, ...]
    liked: bool = True
    """Positive or negative feedback, for rows that have it."""


def shared_prompts(samples: Sequence[Sample]) -> tuple[int, ...]:
    """For each sample, the number of prompt tokens that it shares with the sample before it.

    A prompt ends at a sample's first trained token. Samples of a group are consecutive, so only the first runs its
    prompt.
    """
    shared = [0] * len(samples)
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        length = int(np.argmax(sample.loss_mask))
        same = length == int(np.argmax(before.loss_mask))
        if same and np.array_equal(before.token_ids[:length], sample.token_ids[:length]):
            shared[index] = length
    return tuple(shared)


def shared_prefixes(samples: Sequence[Sample]) -> tuple[int, ...]:
    """For each sample, the length of its common prefix with the sample before it; its last token never counts.

    Branches of a rollout, and rollouts of a group that begin alike, thus compute their common prefix once.
    """
    shared = [0] * len(samples)
    for index in range(1, len(samples)):
        before, own = samples[index - 1].token_ids, samples[index].token_ids[:-1]
        length = min(len(before), len(own))
        same = before[:length] == own[:length]
        shared[index] = length if same.all() else int(np.argmin(same))
    return tuple(shared)


class Optimizer:
    """Settings of one step of an optimizer that goes element by element, and the step; the trainer keeps its state."""

    STATE: ClassVar[tuple[str, ...]]
    """Names of its fp32 vectors, each of the masters' size and zero before the first step."""
    lr: float
    clip_norm: float

    def step(self, number: int, masters: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Masters and state after step `number` (from 1), as new tensors, fp32 [N] each; the gradient is clipped already.

        Each operation rounds once, as products, sums, quotients, roots and signs do: no thread or processor changes a bit.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Settings of one AdamW step, which kernels take."""

    STATE = ("exp_avg", "exp_avg_sq")
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it."""


class LossFunctions(Protocol):
    """Functions for losses and their sums with results that do not depend on the processor."""

    def exp(self, x: Tensor) -> Tensor:
        """e^x."""
        ...

    def expm1(self, x: Tensor) -> Tensor:
        """e^x − 1."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """A sum, fp64 []."""
        ...


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss; float32 on one device. Logprobs are `log_softmax(fp32 logits / temperature)` of the token."""

    logprobs_N: Tensor  # [N]
    """Of the policy; the only tensor with a gradient."""
    entropy_N: Tensor  # [N]
    """Of the policy's whole distribution; a metric only."""
    sampler_logprobs_N: Tensor  # [N]
    advantages_N: Tensor  # [N]
    weights_N: Tensor  # [N]
    """Factor of each token in the sum (`normalisation`, spread over the sample's tokens)."""
    sample_N: Tensor  # [N] int64
    """Which sample the token belongs to, from 0 to n_samples − 1."""
    n_samples: int
    reference_logprobs_N: Tensor | None = None  # [N]
    """Of the base; needed for a KL penalty, and then also a metric."""
    proximal_logprobs_N: Tensor | None = None  # [N]
    """Of the policy at the start of the step; `correct_sampler` uses it."""
    ratio_mask_N: Tensor | None = None  # [N]
    """1 where a token counts in the ratio of its sequence, else 0; a client's `gspo` uses it."""
    functions: LossFunctions | None = None
    """Functions of Motet's kernels; None uses torch's."""
    by_sample: bool = False
    """As of the segment."""

    @cached_property
    def finite(self) -> LossInputs:
        """These, with `LEAST_LOGPROB` for −∞. NaN and +∞ stay, for they are faults."""
        reference_N, proximal_N = self.reference_logprobs_N, self.proximal_logprobs_N
        return replace(
            self,
            logprobs_N=_finite(self.logprobs_N),
            sampler_logprobs_N=_finite(self.sampler_logprobs_N),
            reference_logprobs_N=None if reference_N is None else _finite(reference_N),
            proximal_logprobs_N=None if proximal_N is None else _finite(proximal_N),
        )


def _finite(logprobs_N: Tensor) -> Tensor:
    return logprobs_N.where(logprobs_N != -math.inf, LEAST_LOGPROB)


class Loss(Protocol):
    """The loss of a segment; every algorithm implements it."""

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Losses that are weighted, summed and divided by the segment's denominator; may look at one segment only."""
        ...


@dataclass(frozen=True)
class Segment:
    """Whole samples of one adapter, in the order they are trained: a micro-batch of one job."""

    adapter: str
    samples: tuple[Sample, ...]
    loss: Loss | None = None
    """Required for a backward pass."""
    denominator: float = 1.0
    """Divides summed token losses; computed from the job's complete step."""
    temperature: float = 1.0
    """Temperature of the logprobs."""
    share_prefixes: bool = False
    """Whether neighbouring samples share their whole common prefix, not only a group's prompt."""
    by_sample: bool = False
    """Whether samples share no rows, and their gradients are added as whole numbers: then no order or cut changes a bit."""

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """For each sample, the number of initial tokens that use the rows of the sample before it."""
        if self.by_sample:
            return (0,) * len(self.samples)
        return shared_prefixes(self.samples) if self.share_prefixes else shared_prompts(self.samples)

    @property
    def n_tokens(self) -> int:
        """Packed length before padding to whole rows; shared tokens count once."""
        return sum(sample.n_tokens for sample in self.samples) - sum(self.shared)

    @property
    def work(self) -> int:
        """Charged work: the tokens of its samples, times the targets of each."""
        return sum(sample.work for sample in self.samples)

    @cached_property
    def packed_work(self) -> int:
        """Packed tokens, or predicted ones if there are more, each times its targets."""
        packed = sum(
            (sample.n_tokens - saved) * sample.n_targets
            for sample, saved in zip(self.samples, self.shared, strict=True)
        )
        return max(packed, sum(sample.n_trainable * sample.n_targets for sample in self.samples))


@dataclass(frozen=True)
class Batch:
    """Segments of several adapters, trained in one forward and backward pass."""

    segments: tuple[Segment, ...]

    @property
    def n_tokens(self) -> int:
        """Packed length, before padding to whole rows."""
        return sum(segment.n_tokens for segment in self.segments)


@dataclass(frozen=True)
class LossStats:
    """Sums over the trainable tokens of a segment; sums of segments add up to those of a step."""

    tokens: int = 0
    loss: float = 0.0
    """Already divided by the denominator."""
    entropy: float = 0.0
    ratio: float = 0.0
    """Sum of policy / sampler probability ratios."""
    ratio_max: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient the clip removed."""
    kl_sampler: float = 0.0
    """Sum of k3 estimates of KL(sampler ‖ policy)."""
    kl_base: float = 0.0
    """Sum of k3 estimates of KL(policy ‖ base), if there are reference logprobs."""
    kl_base_tokens: int = 0
    logprob_gap: float = 0.0
    """Largest |trainer − sampler| logprob."""

    def __add__(self, other: LossStats) -> LossStats:
        """Combine two segments: sums add, maxima take the larger (a NaN stays)."""
        figures = {name: value + getattr(other, name) for name, value in vars(self).items()}
        for name in ("ratio_max", "logprob_gap"):
            figures[name] = float(np.maximum(getattr(self, name), getattr(other, name)))
        return LossStats(**figures)


@dataclass(frozen=True)
class Trained:
    """Result of a training pass for one segment."""

    stats: LossStats
    logprobs: tuple[FloatArray, ...]  # [T] or [T, K] per sample
    """Logprobs of the targets under the weights in use; 0 at positions that are not trained."""


@dataclass(frozen=True)
class OptimStats:
    """Result of one optimizer step."""

    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """The gradient was not finite: weights, the optimizer's state and its count are as before."""
    adapter_norm: float | None = None
    """Norm of all weights of the adapter after the step; None if the trainer does not report it."""
