"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): learns from answers with a rating: liked or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.rows import Figures, Preference, RowLogprobs, sample_of, share_right, sigmoid, with_weights
from motet.core.batch import Example, Row
from motet.core.types import FloatArray, IntArray


class Kto(Preference):
    """Learning from ratings: `completion`, and `label`, whether it was liked.

    The reference point is the paper's: pair each prompt of the step with the answer to another one, and take how much likelier
    the policy finds these answers than the reference does. These pairs come after the step's answers; they are only scored.
    The other one is the next row with another prompt; a step whose prompts are all equal has the point 0.
    """

    rows: ClassVar[str] = "thumb"

    type: Literal["kto"] = "kto"
    rows_per_step: int = Field(16, ge=2, le=10**6)
    """Rows of one step."""
    liked_weight: float = Field(1.0, ge=0, le=1e6)
    """Factor of liked answers."""
    disliked_weight: float = Field(1.0, ge=0, le=1e6)
    """Factor of disliked answers. Choose the two to balance their numbers."""

    def batch(self, rows: Sequence[Row], positions: int | None = None) -> StepBatch:
        """The answers, then each prompt with as much of the answer to another one as fits."""
        examples = [row.examples[0] for row in rows]
        signs = [1.0 if row.liked else -1.0 for row in rows]
        answers = (sample_of(example, sign) for example, sign in zip(examples, signs, strict=True))
        pairs = _others([_prompt(example).tobytes() for example in examples])
        others = (sample_of(_exchanged(examples[row], examples[other], positions)) for row, other in pairs)
        return StepBatch((*answers, *others), float(len(rows)))

    def weighed(self, batch: StepBatch, scored: RowLogprobs) -> StepBatch:
        """Weights ±λ·β·σ(x)·σ(−x) of the answers, eq. 8, where x is an answer's gain over the reference point."""
        signs_S, over_S = self._over(batch, scored)
        weights_S = signs_S * self._factors(signs_S) * self.beta * sigmoid(over_S) * sigmoid(-over_S)
        return StepBatch(with_weights(batch.samples[: len(signs_S)], weights_S), batch.denominator)

    def figures(self, batch: StepBatch, scored: RowLogprobs) -> Mapping[str, float]:
        """The loss, and the share of answers on the right side of the reference point."""
        signs_S, over_S = self._over(batch, scored)
        losses_S = self._factors(signs_S) * sigmoid(-over_S)
        return {"loss": float(losses_S.mean()), "accuracy": share_right(over_S)}

    def _over(self, batch: StepBatch, scored: RowLogprobs) -> tuple[Figures, Figures]:
        """For each answer: its sign, and β · sign · (its gain over the reference − the reference point), [S]."""
        policy, reference = scored.sums(batch.samples)
        n = int(batch.denominator)
        signs_S = np.array([_sign(sample.weights) for sample in batch.samples[:n]])
        gains = policy - reference
        point = max(float(gains[n:].mean()), 0.0) if len(gains) > n else 0.0
        return signs_S, self.beta * signs_S * (gains[:n] - point)

    def _factors(self, signs_S: Figures) -> Figures:
        return np.where(signs_S > 0, self.liked_weight, self.disliked_weight)


def _sign(weights: FloatArray | None) -> float:
    assert weights is not None
    return float(np.sign(weights.sum()))


def _prompt(example: Example) -> IntArray:
    return example.token_ids[: int(np.argmax(example.loss_mask))]


def _others(prompts: Sequence[bytes]) -> list[tuple[int, int]]:
    """Each row with the next one around the step that has another prompt; none if all are equal."""
    n = len(prompts)
    last = next((row for row in range(n) if prompts[row] != prompts[(row + 1) % n]), None)
    found: dict[int, int] = {}
    for row in () if last is None else ((last - back) % n for back in range(n)):
        after = (row + 1) % n
        found[row] = after if prompts[row] != prompts[after] else found[after]
    return sorted(found.items())


def _exchanged(prompt_of: Example, answer_of: Example, positions: int | None) -> Example:
    """An example with the prompt of one and the answer of the other, of at most `positions` tokens."""
    prompt, start = _prompt(prompt_of), len(_prompt(answer_of))
    ids = np.concatenate([prompt, answer_of.token_ids[start:]])
    mask = np.concatenate([np.zeros(len(prompt), np.bool_), answer_of.loss_mask[start:]])
    return Example(ids[:positions], mask[:positions])
