"""The engine's side of external scoring: it asks the service's process, which knows the scorers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from msgspec import structs

from motet.config import RewardConfig
from motet.core.errors import EngineError, ScorerAway
from motet.core.plain_json import as_json
from motet.data.problems import RowTurns
from motet.hosts.messages import CancelScore, ScoreRequest, ScoresAnswered
from motet.rewards.reward_elsewhere import NO_DETAILS, AnswerDetails, ScoreOrReason, from_wire, in_parts

_NOBODY = "nobody is there to score this job's rollouts"
MOST_IN_A_MESSAGE = 2**20
"""Bytes of answers and conversations, as JSON: a process writes or reads a message in one piece."""


class AskedOfService:
    """Pending requests for scores. Use in one event loop."""

    def __init__(self, send: Callable[..., Future[None]]) -> None:
        """`send` sends messages in order; the result is an `EngineError` if one is too long."""
        self._send = send
        self._open: dict[int, tuple[list[ScoreRequest], asyncio.Future[ScoresAnswered]]] = {}
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
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        asked, others = reward.model_dump(mode="json"), (seen.transcripts, seen.parts, seen.state)
        pieces = await self._rows.run(
            job, lambda: [*_in_pieces(ScoreRequest(key, job, asked, as_json(problem), completions, *others))]
        )
        self._open[key] = pieces, answer
        try:
            await asyncio.wrap_future(self._send(*pieces))
            scored = await answer
        except EngineError as error:  # too long
            return [f"cannot be sent to be scored: {error}; leave large columns out of the data"] * len(completions)
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

    @property
    def pending(self) -> Iterator[ScoreRequest]:
        """Requests without an answer, for another service."""
        return (piece for pieces, answer in self._open.values() if not answer.done() for piece in pieces)


def _in_pieces(request: ScoreRequest) -> Iterator[ScoreRequest]:
    """The messages of a request; the first has the problem."""
    columns = request.completions, request.transcripts, request.parts
    sizes = [len(json.dumps(seen)) for seen in itertools.zip_longest(*columns)]
    parts = list(in_parts(range(len(sizes)), sizes, MOST_IN_A_MESSAGE)) or [[]]
    for number, some in enumerate(parts, 1):
        completions, transcripts, seen = ([column[n] for n in some] if column else [] for column in columns)
        yield structs.replace(
            request, completions=completions, transcripts=transcripts, parts=seen, more=number < len(parts)
        )
        request = structs.replace(request, problem={})
