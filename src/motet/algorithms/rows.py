"""Algorithms that learn from rows of data: nothing is sampled, and gradients are weights on log probabilities.

A loss of the log probabilities of whole answers, L(log π(y₁), log π(y₂), …), has the gradient Σ ∂L/∂log π(yᵢ) · ∇log
π(yᵢ). Forward passes compute its factors, and the backward pass is that of cross entropy with these factors as weights.
This is exact for any division into micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from motet.algorithms.algorithm import Algorithm, ReferenceName, StepBatch
from motet.core.batch import Example, LossInputs, Row, Sample, TokenLosses
from motet.core.types import FloatArray

Figures = NDArray[np.float64]


@dataclass(frozen=True)
class RowLogprobs:
    """The log probability of each token of a step's samples [T]; 0 at tokens that are not trained."""

    policy: Sequence[FloatArray]
    reference: Sequence[FloatArray]
    """Empty if the algorithm has no reference."""

    def sums(self, samples: Sequence[Sample]) -> tuple[Figures, Figures]:
        """The log probability of each whole sample, by the policy and by the reference, [S]."""
        masks = [sample.loss_mask for sample in samples]
        policy, reference = (
            np.array([values[mask].sum(dtype=np.float64) for values, mask in zip(of, masks, strict=True)])
            for of in (self.policy, self.reference)
        )
        return policy, reference


class RowAlgorithm(Algorithm):
    """Base of algorithms that learn from rows."""

    rows: ClassVar[str]
    """The kind of rows: a name in `data.rows.KINDS`."""
    best_by: ClassVar[str] = "log-lik"

    rows_per_step: int = Field(16, ge=1, le=10**6)
    """Rows of one step."""

    @property
    def kind(self) -> str:
        """The kind of rows; see `data.rows`."""
        return self.rows

    @property
    def compares(self) -> bool:
        """Whether weights depend on logprobs of policy and reference."""
        return False

    @abstractmethod
    def batch(self, rows: Sequence[Row], positions: int | None = None) -> StepBatch:
        """Samples of a step, none with more tokens than the base has `positions`; no row has."""

    @abstractmethod
    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """Metrics of samples."""

    def weighed(self, batch: StepBatch, scored: RowLogprobs) -> StepBatch:
        """The samples with weights from their scores."""
        return batch

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Cross entropy."""
        from motet.algorithms.losses import cross_entropy

        return cross_entropy(inputs)


class Preference(RowAlgorithm):
    """Base of learning from preferences and ratings: compares the likelihood of answers with that by the reference."""

    best_by: ClassVar[str] = "accuracy, then loss"

    reference: ReferenceName = "start"
    """What the policy is compared with: `start` (the adapter as the job begins with it), `base`, or a PEFT directory."""
    beta: float = Field(0.1, gt=0, le=1e3)
    """How much a difference of log probabilities counts; the larger, the closer the policy stays to the reference."""

    @property
    def compares(self) -> bool:
        """Whether weights depend on logprobs of policy and reference."""
        return True

    @property
    def compared_with(self) -> str:
        """The model of reference logprobs."""
        return self.reference


def sample_of(example: Example, weight: float = 1.0) -> Sample:
    """An example with a weight on each trained token."""
    mask, nothing = example.loss_mask, np.zeros(len(example.token_ids), np.float32)
    weights = np.where(mask, np.float32(weight), np.float32(0))
    if example.shares is not None:
        weights = weights[:, None] * example.shares
    versions = np.full(len(example.token_ids), -1, np.int32)
    return Sample(example.token_ids, mask, nothing, nothing, versions, weights, example.targets)


def with_weights(samples: Sequence[Sample], weights_S: Figures) -> tuple[Sample, ...]:
    """The samples, each with one weight on all its trained tokens."""
    return tuple(
        replace(sample, weights=np.where(sample.loss_mask, np.float32(weight), np.float32(0)))
        for sample, weight in zip(samples, weights_S, strict=True)
    )


def share_right(over: Figures) -> float:
    """The share of margins above 0; those of 0 count half, as a policy that equals its reference has them by chance."""
    return float((over > 0).mean() + (over == 0).mean() / 2)


def sigmoid(values: Figures) -> Figures:
    """1 / (1 + exp(−x)), without overflow."""
    halves: Figures = 0.5 * (1 + np.tanh(0.5 * values))
    return halves
