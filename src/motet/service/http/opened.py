"""What keys hold open: requests under way, leases, samples. All of it ends within seconds of its key."""

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
ENDED = "this key was revoked or has expired; what it had opened has ended"
_OPEN = "motet.open"
"""Where a request's scope has its `OpenRequest`."""
_log = logging.getLogger(__name__)


class Holder(Protocol):
    """A part of the service that holds something for keys after their request was answered."""

    def keys(self) -> Collection[str]:
        """The ids of those keys."""
        ...

    async def end(self, keys: Collection[str]) -> None:
        """End what these keys hold."""
        ...


@dataclass(eq=False)
class OpenRequest:
    """A request under way."""

    cut: asyncio.Timeout
    key: str = ""
    """The id of the key that it came with; empty until that is known."""


def opened_by(request: Request, key: str) -> None:
    """Note under which key, by its id, a request came. From any thread."""
    if (one := request.scope.get(_OPEN)) is not None:
        one.key = key


class KeyWatch:
    """Looks every second at the keys that hold something, and ends what those hold that were revoked or have expired.

    Lives in one event loop.
    """

    def __init__(self, tenants: Tenants, holders: Sequence[Holder]) -> None:
        self._tenants, self._holders = tenants, holders
        self._requests: set[OpenRequest] = set()
        self._looking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def open(self, scope: Scope, cut: asyncio.Timeout) -> Iterator[None]:
        """Watch over a request; when its key ends, `cut` expires."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())
        one = scope[_OPEN] = OpenRequest(cut)
        self._requests.add(one)
        try:
            yield
        finally:
            self._requests.discard(one)

    async def look(self) -> None:
        """Look once."""
        held = {one.key for one in self._requests}.union(*(holder.keys() for holder in self._holders)) - {""}
        if not held:
            return
        ended = await asyncio.to_thread(self._tenants.ended_keys, held)
        if not ended:
            return
        for one in self._requests:
            if one.key in ended and not one.cut.expired():
                one.cut.reschedule(0.0)
        for holder in self._holders:
            await holder.end(ended)

    def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:  # the database is away; the next look may succeed
                _log.exception("the keys in use could not be looked at")


class EndsWithKey:
    """Breaks off requests whose key ends meanwhile: with a 401, or where an answer has begun, with an error in its stream."""

    def __init__(self, app: ASGIApp, watch: KeyWatch, refusal: Callable[[int, str], Response]) -> None:
        """`refusal` makes an answer of a status and a message."""
        self._app, self._watch, self._refusal = app, watch, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
            elif _streams_events(start):  # anything else is left unfinished, and the server breaks the connection off
                body = f"event: error\ndata: {json.dumps(json.loads(bytes(answer.body)))}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": False})


def _streams_events(start: Message) -> bool:
    kind = dict(start.get("headers", ())).get(b"content-type", b"")
    return bytes(kind).startswith(b"text/event-stream")
