"""The HTTP address of an episode: answers requests of stock clients in their formats."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from motet.chat.completer import EVENTS, AnswerPiece, ChatFormat, Conversation, Reply, refuse_unsupported, whole
from motet.chat.completions import ChatRequest
from motet.chat.messages import MessagesRequest
from motet.chat.responses import ResponsesRequest
from motet.chat.structure import check_grammar
from motet.chat.turn_formats.token_text import token_bytes
from motet.core.errors import ChatRefusal, EngineError, LimitError
from motet.core.json_text import json_text
from motet.core.stops import met
from motet.core.types import FinishReason
from motet.environments.agent_episode import AgentEpisode
from motet.process import isolated_calls

_FORMATS: Mapping[str, type[ChatFormat]] = {
    "chat/completions": ChatRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
ROUTES = tuple(_FORMATS)
"""The request models of an episode's POST routes, by the end of the path."""
MODELS = "models"
"""GET route of an episode."""
OVER = "there is no such episode, or it is over"
RETRY = "x-stainless-retry-count"
"""The header in which the stock clients count their attempts."""
JSON = "application/json"


@dataclass(frozen=True)
class EpisodeAnswer:
    """The response to a request."""

    status: int
    body: str
    media_type: str = JSON


@dataclass(frozen=True)
class _Given:
    """Complete pieces that can be read repeatedly."""

    pieces: Sequence[AnswerPiece]

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        for piece in self.pieces:
            yield piece


class ServedEpisode:
    """One episode and the answers that were given in it, each in one piece. Lives in one event loop."""

    def __init__(self, episode: AgentEpisode, payer: str = "") -> None:
        """`payer` is the tenant, if there are several; in its turns, long work is done apart."""
        self.episode, self._payer = episode, payer
        self._replies: dict[bytes, asyncio.Task[Reply]] = {}
        """The answer to the last request with each body, for repeated requests; those that failed leave."""
        self._running = set[asyncio.Task[Reply]]()

    def close(self) -> None:
        """Refuse further and running requests."""
        self.episode.close()
        for reply in self._running:
            reply.cancel()

    async def answer(self, route: str, body: bytes, *, again: bool) -> EpisodeAnswer:
        """Answer a request to one of `ROUTES`, or `MODELS`; `again`: the client repeats it."""
        if route == MODELS:
            model = {"id": self.episode.model, "object": "model", "created": 0, "owned_by": "motet"}
            return EpisodeAnswer(200, json.dumps({"object": "list", "data": [model]}))
        try:
            wanted = _FORMATS[route].model_validate_json(body)
            reply = await self._reply(wanted, body, again=again)
        except ValidationError as error:
            faults = error.errors(include_url=False)[:5]
            mistakes = (f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}" for fault in faults)
            return refusal(400, "; ".join(mistakes))
        except (ChatRefusal, EngineError, LimitError) as error:  # 400: the stock clients retry all others
            return refusal(400, str(error), error.code)
        except asyncio.CancelledError:
            if not self.episode.closed:
                raise
            return refusal(404, OVER)
        if wanted.stream:
            return EpisodeAnswer(200, "".join([event async for event in wanted.events(reply)]), EVENTS)
        return EpisodeAnswer(200, json_text(wanted.answer(reply, await whole(reply.pieces))))

    async def _reply(self, wanted: ChatFormat, body: bytes, *, again: bool) -> Reply:
        """The reply to a request; a repeated request, whose answer was lost, gets the same one."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = self._replies.get(digest) if again else None
        if asked is None:
            refuse_unsupported(wanted)
            asked = self._replies[digest] = asyncio.create_task(self._sampled(wanted.conversation()))
            self._running.add(asked)
            asked.add_done_callback(self._running.discard)
            asked.add_done_callback(lambda done: self._drop_failed(digest, done))
        return await asyncio.shield(asked)

    async def _sampled(self, asked: Conversation) -> Reply:
        """The whole answer."""
        episode = self.episode
        await check_grammar(asked.limits.grammar, isolated_calls.here(), self._payer)
        calls = [await episode.complete(asked.messages, asked.tools, asked.limits) for _ in range(asked.n)]
        chat = episode.context.chat
        pieces = [
            AnswerPiece(
                index,
                call.id,
                [("thought", call.parts.thought), ("text", call.parts.speech)],
                call.parts.calls,
                "length" if call.chunk.finish_reason is FinishReason.LENGTH else "stop",
                ids := call.chunk.token_ids.tolist(),
                call.chunk.logprobs.tolist(),
                [token_bytes(chat.tokenizer, token) for token in ids] if asked.logprobs else [],
                met(chat.completion_text(ids), asked.limits.stop) if asked.limits.stop else "",
                call.thought_tokens,
                call.parts.unread,
            )
            for index, call in enumerate(calls)
        ]
        read = calls[0].prompt
        return Reply(calls[0].id, episode.model, len(read), _Given(pieces), read.tolist() if asked.token_ids else ())

    def _drop_failed(self, digest: bytes, done: asyncio.Task[Reply]) -> None:
        """Free what a refused request holds: its body, and its error."""
        failed = done.cancelled() or done.exception() is not None
        if failed and self._replies.get(digest) is done:
            del self._replies[digest]


def refusal(status: int, message: str, code: str = "") -> EpisodeAnswer:
    """An error in the form that the stock clients read."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code or None}
    return EpisodeAnswer(status, json.dumps({"error": error}))
