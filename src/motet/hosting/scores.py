"""The engine's half of scoring elsewhere: it asks the process that talks to people, which knows who scores."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from motet.cluster.messages import CancelScore, FromEngine, Scored, ScoreRequest
from motet.config import RewardConfig
from motet.errors import EngineError, ScorerAway
from motet.tasks.plain_json import as_json
from motet.tasks.reward_elsewhere import ScoreOrReason, Transcripts, from_wire


class AskedOfService:
    """Scores that were asked for and have not come. Lives in one event loop."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        """`send` raises `EngineError` where a message is too long."""
        self._send = send
        self._open: dict[int, asyncio.Future[Scored]] = {}
        self._keys = itertools.count()

    async def __call__(
        self,
        job: str,
        reward: RewardConfig,
        problem: dict[str, Any],
        completions: list[str],
        transcripts: Transcripts,
    ) -> list[ScoreOrReason]:
        """Ask, and wait for the scores.

        Raises:
            ScorerAway: nobody is there, and the job is to rest.
        """
        key = next(self._keys)
        answer = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            wanted = reward.model_dump(mode="json")
            self._send(ScoreRequest(key, job, wanted, as_json(problem), completions, transcripts))
        except EngineError as error:  # too long
            del self._open[key]
            reason = (
                f"cannot be sent to be scored: {error}; leave large columns out of the data, or make smaller groups"
            )
            return [reason] * len(completions)
        try:
            scored = await answer
        except asyncio.CancelledError:
            self._send(CancelScore(key))
            raise
        finally:
            del self._open[key]
        if scored.away:
            raise ScorerAway("nobody is there to score this job's rollouts")
        return from_wire(scored.scores, len(completions))

    @property
    def asked(self) -> bool:
        """Whether scores were asked for and have not come."""
        return bool(self._open)

    def hear(self, scored: Scored) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        waiting = self._open.get(scored.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(scored)
