"""Faults of the service itself: each is told once in the log with the id of its request, and ends as an answer."""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.service.errors import TINKER, AnyJSON, error_body
from motet.service.request_log import asked_of

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 300.0
"""Before the same fault is told again, with how often it came meanwhile."""
_MOST_KINDS = 200
FUTURE = f"{TINKER}api/v1/retrieve_future"


@dataclass
class _Kind:
    """One place where the service fails."""

    told: float
    times: int = 0
    """Since it was told."""


class FaultLog:
    """Tells each fault once in a while: a client may repeat its request hundreds of times a second."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def tell(self, error: BaseException, what: str, identity: str) -> str:
        """Log a fault unless it was just told; returns what a client is told."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        name = f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in last]}"
        known, now = self._kinds.get(name), time.monotonic()
        if known is None or now - known.told > _AGAIN_SECONDS:
            again = "" if known is None or not known.times else f" (and {known.times} times since it was told)"
            _log.error("%s failed, request id %s%s", what, identity, again, exc_info=error)
            self._kinds.pop(name, None)
            self._kinds[name] = _Kind(now)
            if len(self._kinds) > _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
        else:
            known.times += 1
        return (
            f"{type(error).__name__}; internal error of Motet, told in the log of the service; the id of this request is "
            f"{identity}"
        )


class Faults:
    """ASGI middleware inside `RequestLog`: no exception of a route leaves it.

    The `tinker` package repeats a request for ever that is answered with a status from 500 on. Below its prefix a fault
    is a failed future, or a 400, both of which it takes as final.
    """

    def __init__(self, app: ASGIApp, log: FaultLog) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            asked = asked_of(scope)
            asked.reason = str(error)
            told = self._log.tell(error, f"{scope['method']} {scope['path']}"[:200], asked.id)
            if not started:  # the server closes the connection of an answer that has begun and does not end
                await _answer(scope["path"], told)(scope, receive, send)


def _answer(path: str, message: str) -> Response:
    if path == FUTURE:
        return failed_future(message)
    return error_body(400 if path.startswith(TINKER) else 500, message)


def failed_future(message: str) -> AnyJSON:
    """A future that has failed, which the package raises as an error of its user's command."""
    return AnyJSON({"error": message, "category": "server"})
