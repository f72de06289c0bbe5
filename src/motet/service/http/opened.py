"""Resources that keys hold: running requests, leases, samples. They end within seconds of their key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.service.database.tenants import Tenants

LOOK_SECONDS = 1.0
_AT_ONCE = 8
"""Requests that end in one turn of the event loop."""
ENDED = "this key was revoked or has expired; what it had opened has ended"
_OPEN = "motet.open"
"""Key of the `OpenRequest` in a request's scope."""
_log = logging.getLogger(__name__)


class Holder(Protocol):
    """A part of the service that holds resources for keys beyond a request."""

    def keys(self) -> Collection[str]:
        """The ids of keys that hold something."""
        ...

    async def end(self, keys: Collection[str]) -> None:
        """Release what these keys hold."""
        ...


@dataclass(eq=False)
class OpenRequest:
    """A running request."""

    cut: asyncio.Timeout
    key: str = ""
    """The id of its key; empty until it is known."""


def opened_by(request: Request, key: str) -> None:
    """Record the key id of a request. Thread-safe."""
    if (one := request.scope.get(_OPEN)) is not None:
        one.key = key


class KeyWatch:
    """Checks every second the keys that hold something, and releases what ended keys hold. Use in one event loop."""

    def __init__(self, tenants: Tenants, holders: Sequence[Holder]) -> None:
        self._tenants, self._holders = tenants, holders
        self._requests: set[OpenRequest] = set()
        self._checking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def open(self, scope: Scope, cut: asyncio.Timeout) -> Iterator[None]:
        """Watch a request; `cut` expires when its key ends."""
        if self._checking is None:
            self._checking = asyncio.create_task(self._keep_checking())
        one = scope[_OPEN] = OpenRequest(cut)
        self._requests.add(one)
        try:
            yield
        finally:
            self._requests.discard(one)

    async def check(self) -> None:
        """Check once."""
        held = {one.key for one in self._requests}.union(*(holder.keys() for holder in self._holders)) - {""}
        if not held:
            return
        ended = await asyncio.to_thread(self._tenants.ended_keys, held)
        if not ended:
            return
        for count, one in enumerate([one for one in self._requests if one.key in ended]):
            if one in self._requests and not one.cut.expired():
                one.cut.reschedule(0.0)
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
        for holder in self._holders:
            await holder.end(ended)

    def close(self) -> None:
        """Stop checking."""
        if self._checking is not None:
            self._checking.cancel()

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.check()
            except Exception:  # the database is away; the next check may succeed
                _log.exception("the keys in use could not be looked at")


class EndsWithKey:
    """Aborts requests whose key ends: with a 401, or with an error event in a started stream."""

    def __init__(self, app: ASGIApp, watch: KeyWatch, refusal: Callable[[int, str], Response]) -> None:
        """`refusal` makes a response from a status and a message."""
        self._app, self._watch, self._refusal = app, watch, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message = {}

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            await send(message)

        try:
            async with asyncio.timeout(None) as cut:
                with self._watch.open(scope, cut):
                    await self._app(scope, receive, noted)
        except TimeoutError:
            if not cut.expired():
                raise
            answer = self._refusal(401, ENDED)
            if not start:
                await answer(scope, receive, send)
            elif _streams_events(start):  # other responses stay incomplete, and the server closes the connection
                body = f"event: error\ndata: {json.dumps(json.loads(bytes(answer.body)))}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": False})


def _streams_events(start: Message) -> bool:
    kind = dict(start.get("headers", ())).get(b"content-type", b"")
    return bytes(kind).startswith(b"text/event-stream")
