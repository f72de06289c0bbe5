"""Which rewards run behind a wall (`motet.process.wall`): those scored by a service, and everywhere those that ship with Motet.

A user's own code in `motet run` or a reward worker has its owner's rights, unless its job says `wall: true`. Code whose text
others send to a service always has a wall.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.process import wall
from motet.rewards.reward_installed import Installed

EVALUATING = frozenset({"scorer", "math", "code"})
"""Rewards that ship with Motet and evaluate an answer, or parts of it, as Python."""

SANDBOXED = frozenset({"code"})
"""Built-in rewards whose process starts another process, with its own wall, for each answer."""

NO_WALL = (
    "code that others send runs behind the wall alone, which does not hold on this machine; `motet doctor` says why"
)


@dataclass(frozen=True)
class Walls:
    """Requirements on scoring processes."""

    required: bool = False
    """Whether rewards that evaluate answers are refused on a machine without walls; otherwise they run without one."""
    exempt: frozenset[str] = frozenset()
    """Built-in rewards that may run without a wall all the same."""
    missing: Callable[[], str] = wall.missing
    """Why this machine has no wall; empty if it has one."""

    def around(self, reward: RewardConfig, installed: Installed | None = None) -> bool:
        """Whether a reward runs behind a wall; `installed` is the operator's reward of its name, if any.

        Raises RewardError if it must, but this machine has no walls.
        """
        if reward.code is not None:
            if reason := self.missing():
                raise RewardError(f"reward {reward.name!r}: {NO_WALL} ({reason})")
            return True
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
