"""Which rewards run behind a wall (`motet.wall`): those that a service scores, and everywhere those that ship with Motet.

A person's own code, in `motet run` and in a reward worker, is as free as its owner, unless its job says `wall: true`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet import wall
from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks.reward_installed import Installed

EVALUATING = frozenset({"scorer", "math", "code"})
"""Rewards that ship with Motet and evaluate an answer, or parts of it, as Python."""

SANDBOXED = frozenset({"code"})
"""Rewards that ship with Motet whose process starts another one for each answer, behind a wall of its own."""


@dataclass(frozen=True)
class Walls:
    """What a place asks of the processes that score."""

    required: bool = False
    """Whether what evaluates answers is refused where this machine has no wall; otherwise it runs without one."""
    exempt: frozenset[str] = frozenset()
    """Rewards that ship with Motet and run without a wall all the same."""
    missing: Callable[[], str] = wall.missing
    """Why this machine has no wall; empty where it has one."""

    def around(self, reward: RewardConfig, installed: Installed | None = None) -> bool:
        """Whether a reward runs behind a wall; `installed` is what its name stands for, where an operator installed it.

        Raises:
            RewardError: it must, and there is none.
        """
        ours = installed is None and reward.function is None and ":" not in reward.name
        if ours:
            wanted = reward.wall is not False and reward.name not in self.exempt
        else:
            wanted = bool(reward.wall) if installed is None else installed.wall
        if not wanted or not (reason := self.missing()):
            return wanted and not (ours and reward.name in SANDBOXED)
        if ours and reward.wall is None and not (self.required and reward.name in EVALUATING):
            return False
        name = f"reward {reward.name!r} has to run behind a wall, and this machine has none ({reason})"
        if not self.required:
            raise RewardError(f"{name}. `wall: false` lets it run without")
        raise RewardError(
            f"{name}. The service's operator can name it under `unwalled`, or give `wall: false` with its function"
        )
