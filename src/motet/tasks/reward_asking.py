"""The engine's half of scoring elsewhere in a service: it asks the process that talks to people, which knows who scores.

Out goes `{"score": key, "job", "reward", "problem", "completions"}`; in comes `{"do": "scored", "key", "scores"}`, or
`{"do": "scored", "key", "away": true}` where nobody is there who could score and the job is to rest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from motet.config import RewardConfig
from motet.errors import EngineError, ScorerAway
from motet.tasks.reward_elsewhere import ScoreOrReason, from_wire


class AskedOfService:
    """Scores that were asked for and have not come. Lives in one event loop."""

    def __init__(self, say: Callable[..., None]) -> None:
        """`say` sends a message, its fields given as keywords; it raises `EngineError` where that is too long."""
        self._say = say
        self._open: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._keys = itertools.count()

    async def __call__(
        self, job: str, reward: RewardConfig, problem: dict[str, Any], completions: list[str]
    ) -> list[ScoreOrReason]:
        """Ask, and wait for the scores.

        Raises:
            ScorerAway: nobody is there, and the job is to rest.
        """
        key = next(self._keys)
        answer = self._open[key] = asyncio.get_running_loop().create_future()
        given = reward.model_dump(mode="json")
        try:
            self._say(score=key, job=job, reward=given, problem=problem, completions=completions)
        except EngineError as error:  # too long
            del self._open[key]
            return [f"cannot be sent to be scored: {error}; leave large columns out of the data"] * len(completions)
        try:
            reply = await answer
        except asyncio.CancelledError:
            self._say(unscore=key)
            raise
        finally:
            del self._open[key]
        if reply.get("away"):
            raise ScorerAway("nobody is there to score this job's rollouts")
        return from_wire(reply.get("scores"), len(completions))

    @property
    def asked(self) -> bool:
        """Whether scores were asked for and have not come."""
        return bool(self._open)

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        waiting = self._open.get(message["key"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
