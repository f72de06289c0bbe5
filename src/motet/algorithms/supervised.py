"""Supervised fine-tuning: a row's answer becomes the target of the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from motet.algorithms.advantages import normalisation
from motet.algorithms.algorithm import Algorithm, StepBatch
from motet.batch import Sample
from motet.types import IntArray

if TYPE_CHECKING:
    from motet.algorithms.losses import LossInputs, TokenLosses


class Supervised(Algorithm):
    """Learning from rows with an answer: the data's last assistant turn, or its answer column. Nothing is sampled."""

    type: Literal["sft"] = "sft"
    rows_per_step: int = Field(16, ge=1, le=10**6)
    """Rows of one step."""
    reduction: Literal["token", "sequence"] = "token"
    """What token losses are averaged over: all tokens of the step, or each answer and then answers."""

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        """Cross entropy."""
        from motet.algorithms.losses import cross_entropy

        return cross_entropy(inputs)

    def batch(self, rows: Sequence[tuple[IntArray, int]]) -> StepBatch:
        """Samples of a step.

        Args:
            rows: of each row its token ids and how many of them are the prompt.
        """
        weights_S, denominator = normalisation([len(ids) - prompt for ids, prompt in rows], self.reduction, 1)
        samples = (_sample(*row, float(weight)) for row, weight in zip(rows, weights_S, strict=True))
        return StepBatch(tuple(samples), denominator)


def _sample(token_ids: IntArray, prompt: int, weight: float) -> Sample:
    mask = np.arange(len(token_ids)) >= prompt
    nothing = np.zeros(len(token_ids), np.float32)
    weights = np.where(mask, np.float32(weight), np.float32(0))
    return Sample(token_ids, mask, nothing, nothing, np.full(len(token_ids), -1, np.int32), weights)
