"""Episodes over HTTP: each has its own address and key, and speaks the protocols of stock clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motet.agents.episode import AgentEpisode
from motet.agents.served_episode import MODELS, OVER, RETRY, ROUTES, ServedEpisode, refusal


class Gateway:
    """Episodes over HTTP, on a free port of this machine. Lives in one event loop."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[ServedEpisode, str]] = {}
        """Open episodes by name, each with its key."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    def open(self) -> None:
        """Listen."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        # asyncio sets it only for its own sockets; without it, a response's body arrives 40 ms after its head
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        """Yield the base URL and the key of an episode, valid during the block."""
        name, key, served = secrets.token_hex(8), secrets.token_urlsafe(24), ServedEpisode(episode)
        self._episodes[name] = served, key
        try:
            yield f"http://127.0.0.1:{self._port}/episodes/{name}/v1", key
        finally:
            del self._episodes[name]
            served.close()

    def _app(self) -> Starlette:
        path = "/episodes/{episode}/v1"
        posts = [Route(f"{path}/{route}", functools.partial(self._answer, route), methods=["POST"]) for route in ROUTES]
        return Starlette(routes=[*posts, Route(f"{path}/{MODELS}", functools.partial(self._answer, MODELS))])

    async def _answer(self, route: str, request: Request) -> Response:
        """Answer a request to an episode's address with its key."""
        served, key = self._episodes.get(request.path_params["episode"], (None, ""))
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if served is None:
            answer = refusal(404, OVER)
        elif not secrets.compare_digest(given.encode(), key.encode()):
            answer = refusal(401, "the key is not that of this episode")
        else:
            again = request.headers.get(RETRY, "0") != "0"
            answer = await served.answer(route, await request.body(), again=again)
        return Response(answer.body, answer.status, media_type=answer.media_type)


class _Server(uvicorn.Server):
    """A server that leaves signals to the owner of the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
