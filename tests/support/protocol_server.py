"""A real HTTP server that speaks the protocol of one of `PROTOCOLS` in front of the fake base, and goes wrong on request.

with ProtocolServer("vllm") as server:
    server.faults.errors["generate"] = 2
    ...  # requests to server.url
    assert server.counts.requests["/v1/completions"] == 3

It runs in a thread with an event loop of its own. Adapters are read from directories that a `FakeTrainer` wrote, and a
request's seed is the engine's seed key, so an answer can be compared with that of a `FakeEngine` in the test.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from types import TracebackType

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tests.support.protocol_core import Backend, Call, Dialect, PacedEngine, Refusal, Route
from tests.support.protocol_faults import FOREVER, Counts, Faults, Setup
from tests.support.protocol_sglang import Sglang
from tests.support.protocol_vllm import LOST, Vllm
from tests.support.waiting import PATIENCE

__all__ = ["FOREVER", "Counts", "Faults", "ProtocolServer", "Setup"]

PROTOCOLS: dict[str, Callable[[Backend], Dialect]] = {"vllm": Vllm, "sglang": Sglang}
"""By the value of `rollout.engine`."""


class ProtocolServer:
    """A server at 127.0.0.1; starts on entering its context, and may be stopped and started again on the same port.

    Args:
        dialect: whose protocol, a name of `PROTOCOLS`.
        setup: how it was launched.
    """

    def __init__(self, dialect: str = "vllm", setup: Setup | None = None) -> None:
        self.setup = setup or Setup()
        self.faults = Faults()
        self.counts = Counts()
        self.port = 0
        """Chosen at the first start, and kept."""
        self.dialect = dialect
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it runs; False after `stop` and when the engine died."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def entries(self) -> tuple[str, ...]:
        """The adapters that are loaded now."""
        return self._protocol.entries

    @property
    def asleep(self) -> bool:
        """Whether it has freed its memory."""
        return self._backend.asleep

    @property
    def engine(self) -> PacedEngine:
        """The engine since the last start; `requests` are all that it accepted."""
        return self._backend.engine

    def start(self) -> None:
        """Listen, without any adapter; returns when requests are answered."""
        assert not self.alive
        self._backend = Backend(self.setup, self.faults, self.counts)
        self._protocol = PROTOCOLS[self.dialect](self._backend)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{self.dialect} server", daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        self._raise_bugs()

    def stop(self) -> None:
        """Drop every connection at once and stop listening, as a process that is killed; adapters are lost."""
        if self._thread is not None:
            if self._loop is not None and self.alive:
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()
        self._thread = self._loop = None

    def lose_adapters(self) -> None:
        """Forget every adapter, as after a restart that nobody saw; requests that run go on."""
        done = threading.Event()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._protocol.lose)
        self._loop.call_soon_threadsafe(done.set)
        assert done.wait(PATIENCE)

    def __enter__(self) -> ProtocolServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()
        if error is None:
            self._raise_bugs()

    def _raise_bugs(self) -> None:
        if self.counts.bugs:
            raise self.counts.bugs[0]

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.counts.bugs.append(error)
            self._ready.set()

    async def _serve(self) -> None:
        # else asyncio keeps Nagle's delay
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._stopping = asyncio.Event()
        self._dropped: set[tuple[str, int]] = set()  # connections that faults ended, by the client's address
        self._loop = asyncio.get_running_loop()
        await self._server.startup(sockets=[listener])
        self._ready.set()
        await self._stopping.wait()
        await self._close()

    async def _close(self) -> None:
        """uvicorn would wait for requests to end; a killed process does not."""
        state = self._server.server_state
        for server in self._server.servers:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(5):  # closing while a connection is being accepted would lose its socket
            await asyncio.sleep(0)
        for server in self._server.servers:
            server.close()
        while state.connections or state.tasks:
            for connection in list(state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and give up when its client does."""
        try:
            call = await _read(scope, receive)
        except ClientDisconnect:
            return
        route = self._protocol.routes.get((scope["method"], call.path))
        answering = asyncio.create_task(self._answer(scope, send, call, route))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            left = not answering.done() and scope["client"] not in self._dropped and not self._stopping.is_set()
            self.counts.disconnects += left and route is not None and route.kind == "generate"
        finally:
            for task in (answering, leaving):
                task.cancel()
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
            self._dropped.discard(scope["client"])
            self.counts.bugs += [one for one in results if isinstance(one, Exception)]
        if self._protocol.dead:
            self._stopping.set()

    async def _answer(self, scope: Scope, send: Send, call: Call, route: Route | None) -> None:
        self.counts.requests[call.path] += 1
        if route is None:
            await self._send(scope, send, JSONResponse({"detail": "Not Found"}, 404))
            return
        while self.faults.hangs:
            await asyncio.sleep(0.002)
        if self.faults.strikes(self.faults.drops, route.kind) or self.faults.unlucky():
            await self._drop(scope)
        if route.kind == "generate":
            self.counts.asked.append(call.body)
        await asyncio.sleep(self.faults.late.get(route.kind, 0.0) + self.faults.late.get("all", 0.0))
        response = await self._handled(call, route)
        if self.faults.strikes(self.faults.lost, route.kind):
            await self._drop(scope)
        if route.kind == "generate" and self.faults.cuts > 0 and response.status_code == 200:
            self.faults.cuts -= 1
            await self._send_part(scope, send, response)
            return
        if route.kind == "generate" and self.faults.garbled:
            response = _garbled(call, self.faults.garbled.pop(0))
        await self._send(scope, send, response)

    async def _handled(self, call: Call, route: Route) -> Response:
        token = call.headers.get("authorization", "")
        if self.setup.api_key and self._protocol.guards(call.path) and token != f"Bearer {self.setup.api_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.faults.strikes(self.faults.errors, route.kind):
            return self._protocol.error(Refusal(self.faults.error_status, LOST, "InternalServerError"))
        assert not (self._backend.asleep and route.kind in ("generate", "load", "unload")), "it sleeps"
        try:
            response = await route.answer(call)
        except Refusal as refusal:
            response = self._protocol.error(refusal)
        except KeyError as missing:
            response = self._protocol.error(Refusal(400, f"{missing} is missing", "Bad Request"))
        self.counts.most_entries = max(self.counts.most_entries, len(self.entries))
        return response

    async def _send(self, scope: Scope, send: Send, response: Response) -> None:
        async with AsyncExitStack() as stack:
            if isinstance(response, StreamingResponse):  # ends a generation even where the response never began
                await stack.enter_async_context(aclosing(response.body_iterator))  # type: ignore[type-var]
            await response(scope, _never, send)

    async def _send_part(self, scope: Scope, send: Send, response: Response) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        if isinstance(response, StreamingResponse):
            async with aclosing(response.body_iterator) as events:  # type: ignore[type-var]
                for _ in range(self.faults.cut_after):
                    event = str(await anext(events)).encode()  # type: ignore[call-overload]
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            if self.faults.cut_cleanly:
                await send({"type": "http.response.body", "body": b""})
                return
        else:
            body = bytes(response.body)
            await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
        await self._drop(scope, flush=True)

    async def _drop(self, scope: Scope, *, flush: bool = False) -> None:
        """Close the request's connection, and wait for the end of its task."""
        self._dropped.add(scope["client"])
        self.counts.drops += 1
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == scope["client"]:
                if flush:
                    connection.transport.close()
                else:
                    connection.transport.abort()
        await asyncio.Event().wait()


async def _read(scope: Scope, receive: Receive) -> Call:
    request = Request(scope, receive)
    raw = await request.body()
    body = json.loads(raw) if raw else {}
    return Call(request.url.path, body, {key.lower(): value for key, value in request.headers.items()})


def _garbled(call: Call, text: str) -> Response:
    if not call.body.get("stream"):
        return Response(text, media_type="application/json")

    async def events() -> AsyncIterator[str]:
        yield f"data: {text}\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
