"""The agent of one job, next to the engine: its process, its episodes over HTTP, and their rollouts.

Each episode has its own address and key, and speaks the protocols of stock clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motet.config import EnvironmentConfig
from motet.core.errors import EnvironmentFault
from motet.core.types import Rollout
from motet.environments.agent_episode import AgentEpisode, rewarded
from motet.environments.agent_processes import AgentProcesses
from motet.environments.episode import GroupContext, OwnEnvironment, judged
from motet.environments.served_episode import MODELS, OVER, RETRY, ROUTES, ServedEpisode, refusal
from motet.workers.worker_link import AGAIN

MOST_BYTES = 4 * 2**20
"""Longest request, as on a service: reading it takes memory and time of all jobs."""
_IDLE_SECONDS = 75
"""How long a connection is kept without a request: longer than clients keep one, lest it close under a request."""
TOO_LONG = f"a request may have {MOST_BYTES >> 20} MB; send less"


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
        options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self._app(), timeout_keep_alive=_IDLE_SECONDS, **options)
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
            body = await _body(request)
            answer = refusal(400, TOO_LONG) if body is None else await served.answer(route, body, again=again)
        return Response(answer.body, answer.status, media_type=answer.media_type)


async def _body(request: Request) -> bytes | None:
    """The body; None if it is longer than `MOST_BYTES`. It is read to the end, so that the client reads the refusal."""
    body, n_bytes = bytearray(), 0
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes <= MOST_BYTES:
            body += part
    return bytes(body) if n_bytes <= MOST_BYTES else None


class _Server(uvicorn.Server):
    """A server that leaves signals to the owner of the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AgentRunner(OwnEnvironment):
    """Runs the agent of one job."""

    def __init__(self, job: str, config: EnvironmentConfig, log: Path) -> None:
        self._job, self._config = job, config
        self._gateway, self._processes = Gateway(), AgentProcesses(config.name, config.args, log)

    async def open(self) -> None:
        """Load the agent, and listen for its requests. Raises EnvironmentFault if it does not load."""
        self._gateway.open()
        await self._processes.usable()

    async def close(self) -> None:
        """End the process with its running agents, and stop listening."""
        await self._processes.close()
        await self._gateway.close()

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """The rollouts of one group, one episode each."""
        running = (self._run(context, index) for index in range(context.group_size))
        return await judged(list(await asyncio.gather(*running)), context)

    async def _run(self, context: GroupContext, index: int) -> Rollout:
        """One rollout; an episode whose process is killed by a signal that Motet did not send starts over, at most twice."""
        try:
            for _ in range(1 + AGAIN):
                try:
                    process = await self._processes.usable()
                except EnvironmentFault as error:  # it loaded before
                    self.clock_limited = True
                    return Rollout(context.problem, index, (), (), error=str(error))
                episode = AgentEpisode(context, index, self._job, self._config.max_turns, self._config.wall_seconds)
                with self._gateway.serving(episode) as (base_url, key):
                    returned = await self._processes.run(
                        process, context.problem, base_url, key, episode.deadline, episode.seed
                    )
                if not returned.killed:
                    break
        finally:
            await context.release(index)
        self.clock_limited = self.clock_limited or returned.late or returned.killed
        return rewarded(episode, returned.reward, returned.rewards, returned.error)
