"""An episode as its address serves it: requests of stock clients in, answers as their protocols have them out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from motet import apart
from motet.agents import anthropic_messages, chat_completions, responses
from motet.agents.episode import AgentCall, AgentEpisode
from motet.agents.structure import check_grammar
from motet.errors import EngineError, EpisodeRefusal, LimitError

_WIRES: Mapping[str, tuple[ModuleType, type[BaseModel]]] = {
    "chat/completions": (chat_completions, chat_completions.ChatRequest),
    "responses": (responses, responses.ResponsesRequest),
    "messages": (anthropic_messages, anthropic_messages.MessagesRequest),
}
ROUTES = tuple(_WIRES)
"""What an agent may post to, by the end of its path."""
MODELS = "models"
"""What it may get."""
OVER = "there is no such episode, or it is over"
RETRY = "x-stainless-retry-count"
"""The header in which the stock clients count their attempts."""
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True)
class EpisodeAnswer:
    """What a request is answered."""

    status: int
    pieces: Iterable[str]
    """The body; of a stream, in the pieces in which it is sent."""
    media_type: str = JSON


class ServedEpisode:
    """One episode and the answers that were given in it. Lives in one event loop."""

    def __init__(self, episode: AgentEpisode) -> None:
        self.episode = episode
        self._answers: dict[bytes, asyncio.Task[list[AgentCall]]] = {}
        """To the last request with each body: one that is sent again gets the same."""

    def close(self) -> None:
        """Answer no more; requests under way are refused."""
        self.episode.close()
        for answer in self._answers.values():
            answer.cancel()

    async def answer(self, route: str, body: bytes, *, again: bool) -> EpisodeAnswer:
        """Answer a request to one of `ROUTES`, or `MODELS`; `again`: its client sends it once more."""
        if route == MODELS:
            model = {"id": self.episode.model, "object": "model", "created": 0, "owned_by": "motet"}
            return EpisodeAnswer(200, [json.dumps({"object": "list", "data": [model]})])
        wire, kind = _WIRES[route]
        try:
            wanted: Any = kind.model_validate_json(body)
            calls = await self._calls(wanted, body, again=again)
        except ValidationError as error:
            mistakes = error.errors(include_url=False)[:5]
            return refusal(
                400, "; ".join(f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}" for one in mistakes)
            )
        except (EpisodeRefusal, EngineError, LimitError) as error:  # 400: the stock clients send all others again
            return refusal(400, str(error))
        except asyncio.CancelledError:
            if not self.episode.closed:
                raise
            return refusal(404, OVER)
        given = (wanted, calls, self.episode.model, int(time.time()), self.episode.context.chat)
        if wanted.stream:
            return EpisodeAnswer(200, wire.events(*given), EVENTS)
        return EpisodeAnswer(200, [json.dumps(wire.answer(*given))])

    async def _calls(self, wanted: Any, body: bytes, *, again: bool) -> list[AgentCall]:
        """The turns that answer a request; one that is sent again, because its answer was lost, gets the same ones."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = self._answers.get(digest) if again else None
        if asked is None or (asked.done() and asked.exception() is not None):
            episode = self.episode
            messages, tools = wanted.conversation(episode.context.chat), wanted.offered
            if not messages:
                raise EpisodeRefusal("the conversation has no message that is read here; give one")

            async def sample() -> list[AgentCall]:
                limits = wanted.limits
                await check_grammar(limits.grammar, apart.here(), episode.model)
                n = getattr(wanted, "n", None) or 1
                return [await episode.complete(messages, tools, limits) for _ in range(n)]

            asked = self._answers[digest] = asyncio.create_task(sample())
        return await asyncio.shield(asked)


def refusal(status: int, message: str) -> EpisodeAnswer:
    """An error as the stock clients read it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return EpisodeAnswer(status, [json.dumps({"error": error})])
