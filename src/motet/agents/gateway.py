"""Episodes over HTTP: each has an address and a key of its own, under which agents find the protocols of stock clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from motet.agents import anthropic_messages, chat_completions, responses
from motet.agents.episode import AgentCall, AgentEpisode
from motet.errors import EngineError, EpisodeRefusal

_WIRES: Mapping[str, tuple[ModuleType, type[BaseModel]]] = {
    "chat/completions": (chat_completions, chat_completions.ChatRequest),
    "responses": (responses, responses.ResponsesRequest),
    "messages": (anthropic_messages, anthropic_messages.MessagesRequest),
}
"""What an agent may post to, by the end of its path."""
_OVER = "there is no such episode, or it is over"
_RETRY = "x-stainless-retry-count"
"""The stock clients count their attempts in it."""


@dataclass(eq=False)
class _Open:
    episode: AgentEpisode
    key: str
    answers: dict[bytes, asyncio.Task[list[AgentCall]]] = field(default_factory=dict)
    """To the last request with each body: one that is sent again gets the same."""


class Gateway:
    """Episodes over HTTP, on a free port of this machine. Lives in one event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, _Open] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    def open(self) -> None:
        """Listen."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def close(self) -> None:
        """Listen no more."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = None

    @contextlib.contextmanager
    def serving(self, episode: AgentEpisode) -> Iterator[tuple[str, str]]:
        """The base URL and the key of an episode, as long as it lasts."""
        name, one = secrets.token_hex(8), _Open(episode, secrets.token_urlsafe(24))
        self._episodes[name] = one
        try:
            yield f"http://127.0.0.1:{self._port}/episodes/{name}/v1", one.key
        finally:
            episode.close()
            del self._episodes[name]
            for answer in one.answers.values():
                answer.cancel()

    def _app(self) -> Starlette:
        path = "/episodes/{episode}/v1"
        answers = [
            Route(f"{path}/{name}", _refusing(functools.partial(self._answer, *wire)), methods=["POST"])
            for name, wire in _WIRES.items()
        ]
        return Starlette(routes=[*answers, Route(f"{path}/models", _refusing(self._models))])

    def _known(self, request: Request) -> _Open:
        """Whose episode a request is for.

        Raises:
            _Stop: there is none, or the key is another's.
        """
        one = self._episodes.get(request.path_params["episode"])
        if one is None:
            raise _Stop(404, _OVER)
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), one.key.encode()):
            raise _Stop(401, "the key is not that of this episode")
        return one

    async def _models(self, request: Request) -> Response:
        model = {"id": self._known(request).episode.model, "object": "model", "created": 0, "owned_by": "motet"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, wire: ModuleType, kind: type[BaseModel], request: Request) -> Response:
        one, body = self._known(request), await request.body()
        wanted: Any = kind.model_validate_json(body)
        calls = await self._calls(one, wanted, body, again=request.headers.get(_RETRY, "0") != "0")
        given = (wanted, calls, one.episode.model, int(time.time()), one.episode.context.chat)
        if wanted.stream:
            return StreamingResponse(wire.events(*given), media_type="text/event-stream")
        return JSONResponse(wire.answer(*given))

    async def _calls(self, one: _Open, wanted: Any, body: bytes, *, again: bool) -> list[AgentCall]:
        """The turns that answer a request; one that is sent again, because its answer was lost, gets the same ones."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        asked = one.answers.get(digest) if again else None
        if asked is None or (asked.done() and asked.exception() is not None):
            episode = one.episode
            messages, tools, limits = wanted.conversation(episode.context.chat), wanted.offered, wanted.limits

            async def sample() -> list[AgentCall]:
                n = getattr(wanted, "n", None) or 1
                return [await episode.complete(messages, tools, limits) for _ in range(n)]

            asked = one.answers[digest] = asyncio.create_task(sample())
        return await asyncio.shield(asked)


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _refusing(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose refusals are errors as the stock clients read them."""

    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except _Stop as error:
            return _refusal(error.status, str(error))
        except (EpisodeRefusal, EngineError, ValidationError) as error:  # 400: the stock clients send all others again
            return _refusal(400, str(error))
        except asyncio.CancelledError:
            return _refusal(404, _OVER)

    return answer


def _refusal(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
