"""The node agent runs beside a server: it receives versions over HTTP, writes them, and tells the server to load them.

No shared file system is needed. A version arrives as bytes with their hash; the agent returns the server's response.
It can also start the server, keep it running and end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from pathlib import Path

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from motet.config.dialects import Dialect, HttpRequest
from motet.core.errors import EngineError
from motet.rollout.connection import Clocks
from motet.rollout.server_process import ServerProcess
from motet.rollout.shipping import AWAY, DIGEST, unpack
from motet.rollout.version_files import VersionFiles

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_SECONDS = 600.0
"""Time limit of a request to the server; the sender's limit is shorter."""
LOOK_SECONDS = 5.0
"""Interval between health checks."""
_EARLY_SECONDS = 0.5
"""Interval between health checks until the server first answers."""


class NodeServer:
    """The agent's own server: restarted when it dies or hangs, given up after repeated failures without an answer."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        look_seconds: float = LOOK_SECONDS,
        hangs_seconds: float = Clocks.hangs,
        loads_seconds: float = Clocks.loads,
    ) -> None:
        """The server's output goes to `log`."""
        self._process = ServerProcess(command, dict(os.environ), log)
        self._look, self._hangs, self._loads = look_seconds, hangs_seconds, loads_seconds
        self._since = 0.0
        """Time of the server's last answer or start."""
        self.failure = "it is starting"
        """Why the server is not available, for people; empty if it is."""

    @contextlib.asynccontextmanager
    async def running(self, healthy: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """Keep the server running during the block; `healthy` checks it.

        Raises:
            EngineError: its program cannot be run.
        """
        await self._start()
        keeping = asyncio.create_task(self._keep(healthy))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await asyncio.to_thread(self._process.close)

    async def _keep(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        while True:
            try:
                if not self._process.alive:
                    self.failure = f"it {self._process.ending}"
                    await self._start()
                elif await healthy():
                    self._process.answered = True
                    self.failure, self._since = "", time.monotonic()
                elif time.monotonic() - self._since > (self._hangs if self._process.answered else self._loads):
                    await asyncio.to_thread(self._process.close)
                elif self._process.answered:
                    self.failure = "it does not answer"
            except EngineError as error:
                self.failure = f"it is given up: {error}"
                return
            await asyncio.sleep(self._look if self._process.answered else min(self._look, _EARLY_SECONDS))

    async def _start(self) -> None:
        starting = asyncio.create_task(asyncio.to_thread(self._process.start))
        try:
            await asyncio.shield(starting)
        finally:
            await asyncio.wait([starting])  # start nothing after `close`
        self._since = time.monotonic()


class NodeAgent:
    """The HTTP API that stores versions on one node and loads them into the server there."""

    def __init__(
        self, server: str, dialect: Dialect, directory: Path, key: str | None, kept: NodeServer | None = None
    ) -> None:
        """Nothing is written before the app starts.

        `directory` is for versions only; preferably in memory, such as under /dev/shm. `key` is required in requests and
        sent to `server`, a URL; None disables authentication. `kept` is the server's process, if the agent starts it.
        """
        self._dialect, self._directory, self._key, self._kept = dialect, directory, key, kept
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._server = httpx2.AsyncClient(
            base_url=server, headers=headers, timeout=httpx2.Timeout(_SECONDS, connect=5.0), trust_env=False
        )
        self._writing = asyncio.Lock()
        self._digests: dict[str, str] = {}

    def app(self) -> Starlette:
        """The ASGI app with all routes."""
        version = "/versions/{name}"
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/versions", self._guarded(self._list)),
                Route(version, self._guarded(self._put), methods=["PUT"]),
                Route(version, self._guarded(self._delete), methods=["DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._files = VersionFiles(self._directory, shared=True)
        self._earlier = {path.name for path in self._directory.iterdir()}
        """What an earlier start has left, until the server has said what it serves."""
        await self._tidy()
        async with contextlib.nullcontext() if self._kept is None else self._kept.running(self._healthy):
            yield
        await self._server.aclose()
        self._files.close()

    async def _healthy(self) -> bool:
        try:
            answer = await self._server.get("/health", timeout=self._dialect.health_seconds)
        except (httpx2.HTTPError, OSError):
            return False
        return answer.status_code == 200

    async def _tidy(self) -> None:
        """Delete versions of an earlier start that the server cannot read again, once it answers."""
        if self._earlier and (served := await self._served()) is not None:
            gone, self._earlier = self._earlier - served, set()
            for name in gone:
                await asyncio.to_thread(shutil.rmtree, self._files.path(name), ignore_errors=True)

    async def _served(self) -> Set[str] | None:
        """The versions that the server has loaded; None if it does not say."""
        answers = {}
        try:
            for path in self._dialect.about:
                answer = await self._server.get(path)
                if answer.status_code == 200:
                    answers[path] = answer.json()
            return self._dialect.facts(answers).adapters
        except (httpx2.HTTPError, EngineError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def _guarded(
        self, answer: Callable[[str, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Reject requests without the key, and invalid version names."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
                return _refused(401, "the key is not this agent's")
            name = request.path_params.get("name", "all")
            if not _NAME.fullmatch(name):
                return _refused(400, f"{name!r} is not a valid version name")
            return await answer(name, request)

        return guarded

    async def _health(self, request: Request) -> Response:
        if self._kept is not None and self._kept.failure:
            return _refused(503, f"the server of this agent is not available: {self._kept.failure}")
        return Response()

    async def _list(self, name: str, request: Request) -> Response:
        return JSONResponse({"versions": self._files.names()})

    async def _put(self, name: str, request: Request) -> Response:
        """Write a version unless it exists, and tell the server to load it."""
        content, digest = await request.body(), request.headers.get(DIGEST, "")
        async with self._writing:
            await self._tidy()
            try:
                if not self._files.path(name).exists():
                    await asyncio.to_thread(self._write, name, content, digest)
                elif self._digests.get(name, digest) != digest:
                    return _refused(
                        409, f"{name} exists already with other bytes; a version's name is never used twice"
                    )
            except EngineError as error:
                return _refused(422, str(error))
            except OSError as error:
                return _refused(507, f"{self._directory} cannot be written: {error.strerror}; free space there")
            self._digests[name] = digest
        return await self._asked(self._dialect.load(name, str(self._files.path(name))))

    def _write(self, name: str, content: bytes, digest: str) -> None:
        with self._files.write_draft(name) as draft:
            unpack(content, digest, draft)

    async def _delete(self, name: str, request: Request) -> Response:
        """Tell the server to unload a version; its files are deleted later, because the server may still read them."""
        answer = await self._asked(self._dialect.unload(name))
        if answer.status_code == 200 or self._dialect.unknown(answer.status_code, bytes(answer.body).decode()):
            self._digests.pop(name, None)
            await asyncio.to_thread(self._files.retire, name)
        return answer

    async def _asked(self, request: HttpRequest) -> Response:
        try:
            answer = await self._server.request(request.method, request.path, json=request.body)
        except (httpx2.HTTPError, OSError) as error:
            return _refused(AWAY, f"the server of this agent does not answer: {error or type(error).__name__}")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
