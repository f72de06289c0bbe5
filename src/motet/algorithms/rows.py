"""Algorithms that learn from rows of data: nothing is sampled, and every gradient is a weight on a log probability.

A loss of the log probabilities of whole answers, L(log π(y₁), log π(y₂), …), has the gradient Σ ∂L/∂log π(yᵢ) · ∇log π(yᵢ). Its
factors are found in forward passes, and the backward pass is that of cross entropy with them as weights: exact, and however
a step is cut into micro-batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from motet.algorithms.algorithm import Algorithm, StepBatch, is_address
from motet.batch import Example, LossInputs, Row, Sample, TokenLosses
from motet.types import FloatArray

Figures = NDArray[np.float64]


@dataclass(frozen=True)
class RowLogprobs:
    """The log probability of each token of the samples of a step [T], 0 where nothing is learned."""

    policy: Sequence[FloatArray]
    reference: Sequence[FloatArray]
    """Empty where the algorithm has none."""

    def sums(self, samples: Sequence[Sample]) -> tuple[Figures, Figures]:
        """Of each sample the whole log probability, by the policy and by the reference, [S]."""
        masks = [sample.loss_mask for sample in samples]
        policy, reference = (
            np.array([values[mask].sum(dtype=np.float64) for values, mask in zip(of, masks, strict=True)])
            for of in (self.policy, self.reference)
        )
        return policy, reference


class RowAlgorithm(Algorithm):
    """What every algorithm has that learns from rows."""

    rows: ClassVar[str]
    """What a row must have: a name in `tasks.rows.READERS`."""
    score: ClassVar[str] = "loss"
    """The figure of an evaluation that tells the best version: the lower the better."""

    rows_per_step: int = Field(16, ge=1, le=10**6)
    """Rows of one step."""

    @property
    def kind(self) -> str:
        """What a row is read for; see `tasks.rows`."""
        return self.rows

    @property
    def compares(self) -> bool:
        """Whether weights depend on what policy and reference think of the samples."""
        return False

    @abstractmethod
    def batch(self, rows: Sequence[Row]) -> StepBatch:
        """Samples of a step."""

    @abstractmethod
    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """What metrics tell of samples."""

    def weighed(self, batch: StepBatch, scored: RowLogprobs) -> StepBatch:
        """The samples with the weights that their scores give them."""
        return batch

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Cross entropy."""
        from motet.algorithms.losses import cross_entropy

        return cross_entropy(inputs)


class Preference(RowAlgorithm):
    """Learning from what people liked better, or liked: how much likelier an answer became than the reference finds it."""

    reference: str = "start"
    """What the policy is compared with: `start` (the adapter as the job begins with it), `base`, or a PEFT directory."""
    beta: float = Field(0.1, gt=0, le=1e3)
    """How much a difference of log probabilities counts; the larger, the closer the policy stays to the reference."""

    @field_validator("reference")
    @classmethod
    def _no_server(cls, reference: str) -> str:
        if is_address(reference):
            raise ValueError("no server is asked here, only in `distill`; give `start`, `base` or a PEFT directory")
        return reference

    @property
    def compares(self) -> bool:
        """Whether weights depend on what policy and reference think of the samples."""
        return True

    @property
    def compared_with(self) -> str:
        """What reference logprobs are of."""
        return self.reference


def sample_of(example: Example, weight: float = 1.0) -> Sample:
    """An example with a weight on each token that is learned."""
    mask, nothing = example.loss_mask, np.zeros(len(example.token_ids), np.float32)
    weights = np.where(mask, np.float32(weight), np.float32(0))
    if example.shares is not None:
        weights = weights[:, None] * example.shares
    versions = np.full(len(example.token_ids), -1, np.int32)
    return Sample(example.token_ids, mask, nothing, nothing, versions, weights, example.targets)


def with_weights(samples: Sequence[Sample], weights_S: Figures) -> tuple[Sample, ...]:
    """The samples, each with one weight on all that is learned of it."""
    return tuple(
        replace(sample, weights=np.where(sample.loss_mask, np.float32(weight), np.float32(0)))
        for sample, weight in zip(samples, weights_S, strict=True)
    )


def sigmoid(values: Figures) -> Figures:
    """1 / (1 + exp(−x)), without overflow."""
    halves: Figures = 0.5 * (1 + np.tanh(0.5 * values))
    return halves
