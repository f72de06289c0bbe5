"""What a job has finished of its open steps and evaluations. It is in memory alone, and stays while the job has no slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from motet.algorithms.rows import RowLogprobs
from motet.core.types import FinishReason, Rollout
from motet.runtime.generation import Draft, Generation

BatchName = tuple[str, int, int]
"""The purpose of a step's groups, the step, and their seed."""
_OPEN = (None, FinishReason.ABORT)


@dataclass
class FinishedGroups:
    """What a job has sampled and scored for steps and evaluations that are not recorded yet.

    Nothing else bounds it than the size of a step and of an evaluation (`limits.step_tokens`): about 20 bytes for a token.
    """

    rows: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    """By version: those of its held-out rows that are scored, in order."""
    _groups: dict[tuple[BatchName, int], tuple[tuple[Rollout, ...] | None, int, dict[tuple[int, int], Draft]]] = field(
        default_factory=dict
    )
    """By batch and position: the rollouts and the tokens sampled for them; without rollouts, the finished turns."""

    def take_up(
        self, batch: BatchName, position: int, generation: Generation
    ) -> tuple[tuple[Rollout, ...] | None, int]:
        """The rollouts of a group, None if it is not finished, and the tokens sampled for it so far.

        If it waited for scores, `generation` gets its finished turns.
        """
        rollouts, tokens, drafts = self._groups.get((batch, position), (None, 0, {}))
        generation.drafts |= drafts
        return rollouts, tokens or generation.tokens

    def add(
        self,
        batch: BatchName,
        position: int,
        generation: Generation,
        rollouts: tuple[Rollout, ...] | None,
        *,
        own: bool,
    ) -> None:
        """Add a group. If it is not finished, add its finished first turns: those after them may depend on scores.

        A user's `own` environment may ask otherwise the next time.
        """
        drafts = {
            key: draft
            for key, draft in generation.drafts.items()
            if rollouts is None and not own and key[0] == 0 and draft.finish not in _OPEN
        }
        self._groups[batch, position] = rollouts, 0 if rollouts is None else generation.tokens, drafts

    def forget(self, purpose: str = "", until: int | None = None) -> list[Any]:
        """Forget the groups of a purpose, by default of all, and return them; with `until`, those of later steps stay."""
        if not purpose:
            self.rows.clear()
        of_purpose = [
            key for key in self._groups if purpose in ("", key[0][0]) and (until is None or key[0][1] <= until)
        ]
        return [self._groups.pop(key) for key in of_purpose]
