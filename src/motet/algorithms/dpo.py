"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290): learns from pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.rows import Figures, Preference, RowLogprobs, sample_of, share_right, sigmoid, with_weights
from motet.core.batch import Row


class Dpo(Preference):
    """Learning from pairs, `chosen` and `rejected`, as TRL reads them."""

    rows: ClassVar[str] = "pair"

    type: Literal["dpo"] = "dpo"
    length_normalised: bool = False
    """Compare mean log probabilities of tokens instead of sums over answers."""
    sft: float = Field(0.0, ge=0, le=1e6)
    """Weight of a supervised term: the mean cross entropy of the chosen answer's tokens (RPO, arXiv 2404.19733)."""

    def batch(self, rows: Sequence[Row], positions: int | None = None) -> StepBatch:
        """Chosen and rejected in turn."""
        return StepBatch(tuple(sample_of(example) for row in rows for example in row.examples), float(len(rows)))

    def weighed(self, batch: StepBatch, scored: RowLogprobs) -> StepBatch:
        """Weights ±β·σ(−margin) of whole answers, eq. 7, and the supervised term's."""
        margins_P, lengths_S = self._margins(batch, scored), _lengths(batch)
        weights_P = self.beta * sigmoid(-margins_P)
        weights_S = np.stack([weights_P, -weights_P], axis=1).reshape(-1)
        weights_S = weights_S / lengths_S if self.length_normalised else weights_S
        weights_S[::2] += self.sft / lengths_S[::2]
        return StepBatch(with_weights(batch.samples, weights_S), batch.denominator)

    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """The loss, the share of pairs whose chosen answer gained more than the other, and the mean margin."""
        margins_P = self._margins(batch, scored)
        likelihoods_P = scored.sums(batch.samples)[0][::2] / _lengths(batch)[::2]
        losses_P = np.logaddexp(0, -margins_P) - self.sft * likelihoods_P
        return {
            "loss": float(losses_P.mean()),
            "accuracy": share_right(margins_P),
            "margin": float(margins_P.mean()),
        }

    def _margins(self, batch: StepBatch, scored: RowLogprobs) -> Figures:
        """β · (gain of the chosen answer over the reference − gain of the rejected one), [P]."""
        policy_S, reference_S = scored.sums(batch.samples)
        gains_S = policy_S - reference_S
        gains_S = gains_S / _lengths(batch) if self.length_normalised else gains_S
        margins_P: Figures = self.beta * (gains_S[::2] - gains_S[1::2])
        return margins_P


def _lengths(batch: StepBatch) -> Figures:
    return np.array([sample.n_trainable for sample in batch.samples], np.float64)
