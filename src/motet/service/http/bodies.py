"""How much of a request is read: a body is refused as soon as it is known to be too large, before it lies anywhere.

Of somebody without a good key nothing but small bodies is read. JSON is parsed at one go, while nobody else is answered, so
that each path takes only what it has a use for. Also refused here are addresses with a NUL character, which no database
keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST = 2**20
"""Bytes of a body where no other limit is set."""
MOST_PROMPT = 4 * 2**20
"""Of a request for completions, to try a grader, or to submit several jobs; of what an agent asks."""
MOST_SCORES = 8 * 2**20
"""Of what a reward worker hands in."""
MOST_OF_NOBODY = 2**16
"""Of a request whose key has not been looked at."""
MOST_GRADIENT = 32 * 2**20
"""Of what a client wants a gradient of."""
_GRADIENT = "/tinker/api/v1/forward_backward"
_PROMPTS = (
    "/tinker/api/v1/asample", "/v1/chat/completions", "/v1/completions", "/v1/fine_tuning/alpha/graders/run", "/v1/submissions"
)  # fmt: skip
_SCORES = "/scoring/results"
_EPISODES = "/episodes/"
_AROUND = 2**16  # what a form has around its file
_DRAIN_SECONDS = 5.0


class Bodies:
    """Reads of a request what its path may send."""

    def __init__(
        self,
        app: ASGIApp,
        uploads: Mapping[str, float],
        refusal: Callable[[int, str], Response],
        allowed: Callable[[Request], bool],
        stopping: Callable[[], bool],
    ) -> None:
        """`uploads` is the limit in MB of each path that takes files; `refusal` makes an answer of a status and a message."""
        self._app, self._refusal, self._allowed, self._stopping = app, refusal, allowed, stopping
        self._limits = {path: int(limit * 2**20) + _AROUND for path, limit in uploads.items()}
        self._words = {
            path: f"this is larger than {limit:g} MB, the limit of this service" for path, limit in uploads.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "\0" in scope["path"] or b"%00" in scope["query_string"] or b"\0" in scope["query_string"]:
            await self._refusal(422, "the address has a NUL character; take it out")(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        limit = self._limits.get(path) or _limit(path)
        words = self._words.get(path, f"this request may have {limit // 2**20} MB at most")
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            await self._refusal(413, words)(scope, receive, send)
            await _drain(receive, limit)
            return
        large = int(length) > MOST_OF_NOBODY if length.isdigit() else b"transfer-encoding" in headers
        uploads = path in self._limits and scope["method"] == "POST"
        if (uploads or large) and not await asyncio.to_thread(self._allowed, Request(scope)):
            await self._refusal(401, "give an API key that is good: Authorization: Bearer mk-…")(scope, receive, send)
            await _drain(receive, MOST)
            return
        try:
            await self._app(scope, _bounded(receive, limit, words), send)
        except asyncio.CancelledError:  # the server gives up whoever is stuck
            if not self._stopping():
                raise


def _limit(path: str) -> int:
    """Bytes of a body of a path that takes no files."""
    if path == _GRADIENT:
        return MOST_GRADIENT
    if path in _PROMPTS or path.startswith(_EPISODES):
        return MOST_PROMPT
    return MOST_SCORES if path.endswith(_SCORES) else MOST


def _bounded(receive: Receive, limit: int, words: str) -> Receive:
    """What is received, up to a limit; beyond it a 413, which goes through whoever reads."""
    read = 0

    async def bounded() -> Message:
        nonlocal read
        message: Message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise HTTPException(413, words)
        return message

    return bounded


async def _drain(receive: Receive, limit: int) -> None:
    """Take what comes anyway for a moment: a connection closed under a sender may lose the answer on its way."""
    read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while read <= limit:
                message = await receive()
                read += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
