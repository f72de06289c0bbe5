"""Supervised fine-tuning: a row's answer becomes the target of the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from motet.algorithms.advantages import normalisation
from motet.algorithms.algorithm import StepBatch
from motet.algorithms.rows import RowAlgorithm, RowLogprobs, sample_of
from motet.core.batch import Row


class Supervised(RowAlgorithm):
    """Learning from rows with an answer: conversations, or an answer column. Nothing is sampled."""

    rows: ClassVar[str] = "answer"

    type: Literal["sft"] = "sft"
    turns: Literal["all", "last"] = "all"
    """Which of an assistant's turns are learned, of those whose `weight` is not 0."""
    reduction: Literal["token", "sequence"] = "token"
    """What token losses are averaged over: all tokens of the step, or each row and then rows."""

    @property
    def kind(self) -> str:
        """The kind of rows; see `data.rows`."""
        return "last_answer" if self.turns == "last" else self.rows

    def batch(self, rows: Sequence[Row], positions: int | None = None) -> StepBatch:
        """Samples of a step."""
        lengths = [sum(example.n_learned for example in row.examples) for row in rows]
        weights, denominator = normalisation(lengths, self.reduction, 1)
        weighed = zip(rows, weights, strict=True)
        samples = (sample_of(example, float(weight)) for row, weight in weighed for example in row.examples)
        return StepBatch(tuple(samples), denominator)

    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """The mean negative log-likelihood of a token."""
        tokens = sum(sample.n_trainable for sample in batch.samples)
        return {"nll": -sum(float(values.sum(dtype=np.float64)) for values in scored.policy) / tokens, "tokens": tokens}


class SoftTargets(Supervised):
    """Distillation from rows: the targets are a teacher's probabilities of its likeliest tokens."""

    rows: ClassVar[str] = "soft"

    type: Literal["soft_targets"] = "soft_targets"  # type: ignore[assignment]
    turns: Literal["all"] = "all"
    """Always `all`: such a row has one answer."""

    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """The cross entropy of a token with the teacher's probabilities."""
        tokens, nll = sum(sample.n_trainable for sample in batch.samples), 0.0
        for sample, logprobs in zip(batch.samples, scored.policy, strict=True):
            assert sample.weights is not None
            own = sample.weights.sum(axis=1, dtype=np.float64)
            likelihood = (sample.weights * logprobs).sum(axis=1, dtype=np.float64)
            nll -= float((likelihood[own > 0] / own[own > 0]).sum())
        return {"nll": nll / tokens, "tokens": tokens}
