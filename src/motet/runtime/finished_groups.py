"""Finished groups of a job's open steps and evaluations. They are in memory alone, and stay while the job has no slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet.core.types import FinishReason, Rollout
from motet.runtime.generation import Draft, Generation

BatchName = tuple[str, int, int]
"""The purpose of a step's groups, the step, and their seed."""
_Place = tuple[BatchName, int]
"""A batch, and the position of a group in it."""
_OPEN = (None, FinishReason.ABORT)


@dataclass
class FinishedGroups:
    """What a job has sampled for steps and evaluations that are not recorded yet."""

    _groups: dict[_Place, tuple[tuple[Rollout, ...], int]] = field(default_factory=dict)
    """With the tokens sampled for each."""
    _unscored: dict[_Place, dict[tuple[int, int], Draft]] = field(default_factory=dict)

    def take_up(
        self, batch: BatchName, position: int, generation: Generation
    ) -> tuple[tuple[Rollout, ...] | None, int]:
        """The rollouts of a group, None if it is not finished, and the tokens sampled for it so far.

        If it waited for scores, `generation` gets its finished turns.
        """
        if (found := self._groups.get((batch, position))) is not None:
            return found
        generation.drafts |= self._unscored.pop((batch, position), {})
        return None, generation.tokens

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
        if rollouts is not None:
            self._groups[batch, position] = rollouts, generation.tokens
        elif not own:
            drafts = generation.drafts.items()
            self._unscored[batch, position] = {
                key: one for key, one in drafts if key[0] == 0 and one.finish not in _OPEN
            }

    def forget(self, purpose: str = "", until: int | None = None) -> None:
        """Forget the groups of a purpose, by default of all; with `until`, those of later steps stay."""
        for kept in (self._groups, self._unscored):
            for batch, position in list(kept):
                if purpose in ("", batch[0]) and (until is None or batch[1] <= until):
                    del kept[batch, position]
