"""The engine's side of external scoring: it asks the service's process, which knows the scorers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from motet.config import RewardConfig
from motet.core.errors import EngineError, ScorerAway
from motet.core.plain_json import as_json
from motet.data.problems import RowTurns
from motet.hosts.messages import CancelScore, FromHost, ScoreRequest, ScoresAnswered
from motet.rewards.reward_elsewhere import NO_DETAILS, AnswerDetails, ScoreOrReason, from_wire

_NOBODY = "nobody is there to score this job's rollouts"


class AskedOfService:
    """Pending requests for scores. Use in one event loop."""

    def __init__(self, send: Callable[[FromHost], None]) -> None:
        """`send` raises `EngineError` where a message is too long."""
        self._send = send
        self._open: dict[int, tuple[ScoreRequest, asyncio.Future[ScoresAnswered]]] = {}
        self._keys = itertools.count()
        self._rows = RowTurns()

    async def __call__(
        self,
        job: str,
        reward: RewardConfig,
        problem: dict[str, Any],
        completions: list[str],
        seen: AnswerDetails = NO_DETAILS,
    ) -> list[ScoreOrReason]:
        """Request scores and wait for them. Raises ScorerAway if no scorer is connected, and the job must stop."""
        written = await self._rows.run(job, lambda: as_json(problem))
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        wanted = reward.model_dump(mode="json")
        request = ScoreRequest(key, job, wanted, written, completions, seen.transcripts, seen.parts, seen.state)
        self._open[key] = request, answer
        try:
            self._send(request)
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
            raise ScorerAway(_NOBODY)
        return from_wire(scored.scores, len(completions))

    @property
    def asked(self) -> bool:
        """Whether requests are pending."""
        return bool(self._open)

    def hear(self, scored: ScoresAnswered) -> None:
        """Handle an answer; one that is no longer awaited is dropped."""
        _, waiting = self._open.get(scored.key, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(scored)

    def ask_again(self) -> None:
        """Send pending requests to another service."""
        for request, answer in self._open.values():
            if not answer.done():
                self._send(request)
