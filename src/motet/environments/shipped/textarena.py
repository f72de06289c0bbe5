"""`environment: textarena`: one-player games of the package `textarena`, such as GuessTheNumber-v0."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import textarena
from textarena.wrappers import ActionFormattingWrapper

_RAW = "-raw"
_OWN = textarena.ObservationType.PLAYER_ACTION


class Game:
    """One game; rows with equal columns start the same game, so the rollouts of a group play the same one."""

    def __init__(self, game: str = "GuessTheNumber-v0", **options: Any) -> None:
        """`game` is its name in the package; `options` are the game's, such as `max_number`."""
        # Without the package's wrappers, an observation has only new text, and moves need no brackets.
        self._game = ActionFormattingWrapper(textarena.make(game.removesuffix(_RAW) + _RAW, **options))
        self.done = False

    def reset(self, **row: Any) -> str:
        """Begin; a column `seed` selects the game."""
        seed = row.get("seed", zlib.crc32(json.dumps(row, sort_keys=True).encode()))
        random.seed(seed)
        self._game.reset(num_players=1, seed=seed)
        return self._said()

    def step(self, text: str) -> str | None:
        """Make a move."""
        self.done, _ = self._game.step(text)
        return None if self.done else self._said()

    def get_reward(self) -> float:
        """The game's reward; 0 if the game did not end."""
        rewards, _ = self._game.close() if self.done else ({}, None)
        return float((rewards or {}).get(0, 0.0))

    def _said(self) -> str:
        _, observation = self._game.get_observation()
        return "\n".join(message for _, message, kind in observation if kind is not _OWN)
