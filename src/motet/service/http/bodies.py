"""How much of a request is read: a body is refused as soon as it is known to be too large, before it lies anywhere.

Of somebody without a good key nothing but small bodies is read. JSON is parsed at one go, while nobody else is answered, so
that each path takes only what it has a use for. Also refused here are addresses with a NUL character, which no database
keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.config.service import HttpConfig

MOST = 2**20
"""Bytes of a body where no other limit is set."""
MOST_PROMPT = 4 * 2**20
"""Of a request for completions, to try a grader, or to submit several jobs; of what an agent asks. A base with few positions
has a lower limit for prompts."""
MOST_SCORES = 8 * 2**20
"""Of what a reward worker hands in."""
MOST_OF_NOBODY = 2**16
"""Of a request whose key has not been looked at."""
MOST_GRADIENT = 32 * 2**20
"""Of what a client wants a gradient of."""
_GRADIENT = "/tinker/api/v1/forward_backward"
_PROMPTS = {
    "/tinker/api/v1/asample": 16, "/v1/chat/completions": 64, "/v1/responses": 64, "/v1/messages": 64,
    "/v1/completions": 16 * 64,
}  # fmt: skip
"""Bytes of a body for each position of the base: of a token's id, of a token's text as JSON, of 16 such texts."""
_LONG = ("/v1/fine_tuning/alpha/graders/run", "/v1/submissions")
_SCORES = "/scoring/results"
_EPISODES = "/episodes/"
_EPISODE_BYTES = 64
_AROUND = 2**16  # what a form has around its file, and a prompt around its tokens
_DRAIN_SECONDS = 5.0
MOST_VALUES, MOST_TEXTS, MOST_CONTAINERS = 2**19, 2**16, 2**13
"""Of JSON: values of any kind; texts, with the names of fields; lists and objects. As many take less than 100 ms to be read."""
MOST_DIGITS = 640
"""Of a whole number; the time that one takes grows with their square."""
_SPREAD = 8
"""Bytes of memory for a byte of JSON, roughly."""
_SPOOLED = 2**20
"""Bytes of an uploaded file that are in memory; the rest is on the disk."""
_NOBODY, _NOBODYS_PART = "", 8
_SOON = {"Retry-After": "1"}


class OpenBytes:
    """Memory that open requests take, of everybody and of each tenant. From any thread."""

    def __init__(self, config: HttpConfig) -> None:
        self._most, self._most_of_one = int(config.open_mb * 2**20), int(config.open_mb_per_tenant * 2**20)
        self._taken = Counter[str]()
        self._total = 0
        self._lock = threading.Lock()

    def take(self, payer: str, size: int, *, always: bool = False) -> None:
        """Count so many bytes of a tenant, `always` also where there is no room; nobody's have a small part for all of them.

        Raises:
            HTTPException: there is no room now (429), or there never is (413).
        """
        most = self._most_of_one if payer else self._most // _NOBODYS_PART
        if size > most and not always:
            raise HTTPException(413, f"this request takes {size >> 20} MB of memory; {most >> 20} MB are the most here")
        with self._lock:
            if not always and (self._taken[payer] + size > most or self._total + size > self._most):
                whose = "your" if self._taken[payer] + size > most else "all"
                raise HTTPException(
                    429,
                    f"{whose} open requests take all the memory that there is for them; try again in a moment",
                    _SOON,
                )
            self._taken[payer] += size
            self._total += size

    def give_back(self, payer: str, size: int) -> None:
        """Bytes that were taken are free again."""
        with self._lock:
            self._taken[payer] -= size
            self._total -= size
            if not self._taken[payer]:
                del self._taken[payer]

    def fits(self, payer: str, size: int) -> bool:
        """Whether there is room."""
        most = self._most_of_one if payer else self._most // _NOBODYS_PART
        with self._lock:
            return self._taken[payer] + size <= most and self._total + size <= self._most


class Bodies:
    """Reads of a request what its path may send."""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        room: OpenBytes,
        uploads: Mapping[str, float],
        refusal: Callable[..., Response],
        payer: Callable[[Request], str],
        asker: Callable[[Request], str],
        positions: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        """What it depends on.

        Args:
            app: what answers.
            config: limits of open requests.
            room: memory that bodies take.
            uploads: the limit in MB of each path that takes files.
            refusal: makes an answer of a status and a message.
            payer: the tenant of a request's key, `nobody` where there are no keys; empty where its key is not good.
            asker: the key of a request, or where it comes from; looks nothing up.
            positions: the most tokens of a prompt, of any base; 0 while that is not known.
            stopping: whether the service stops.
        """
        self._app, self._refusal, self._payer, self._asker = app, refusal, payer, asker
        self._config, self._room = config, room
        self._positions, self._stopping = positions, stopping
        self._requests = Counter[str]()
        """Open ones, by asker."""
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
        asker, most, what = self._asker(Request(scope)), self._config.requests_per_key, "requests"
        if scope["path"].endswith("/stream"):
            asker, most, what = f"streams of {asker}", self._config.streams_per_key, "streams"
        if self._requests[asker] >= most:
            words = f"{most} {what} of one key are open, the most here; wait for some, or end them"
            await self._refusal(429, words, headers=_SOON)(scope, receive, send)
            return
        self._requests[asker] += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._requests[asker] -= 1
            if not self._requests[asker]:
                del self._requests[asker]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        limit = self._limits.get(path) or _limit(path, self._positions())
        words = self._words.get(path, f"this request may have {limit / 2**20:.3g} MB at most")
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            await self._refusal(413, words)(scope, receive, send)
            await _drain(receive, max(limit, MOST_PROMPT))
            return
        large = int(length) > MOST_OF_NOBODY if length.isdigit() else b"transfer-encoding" in headers
        uploads = path in self._limits and scope["method"] == "POST"
        payer = _NOBODY
        if uploads or large or not self._room.fits(_NOBODY, _SPREAD * MOST_OF_NOBODY):
            payer = await asyncio.to_thread(self._payer, Request(scope))
            if (uploads or large) and not payer:
                await self._refusal(401, "give an API key that is good: Authorization: Bearer mk-…")(
                    scope, receive, send
                )
                await _drain(receive, MOST)
                return
        reads_json = not uploads and path != _GRADIENT  # whatever the client calls it
        weight = (_SPREAD, limit) if reads_json else (1, _SPOOLED if uploads else limit)
        body = _Body(receive, limit, words, self._room, payer, weight, JsonSize() if reads_json else None)
        try:
            await self._app(scope, body.receive, send)
        except asyncio.CancelledError:  # the server gives up whoever is stuck
            if not self._stopping():
                raise
        finally:
            body.close()


def _limit(path: str, positions: int) -> int:
    """Bytes of a body of a path that takes no files."""
    if path == _GRADIENT:
        return MOST_GRADIENT
    if (each := _PROMPTS.get(path) or (_EPISODE_BYTES if path.startswith(_EPISODES) else 0)) and positions:
        return min(MOST_PROMPT, _AROUND + positions * each)
    if each or path in _LONG:
        return MOST_PROMPT
    return MOST_SCORES if path.endswith(_SCORES) else MOST


class JsonSize:
    """Counts the values of JSON in UTF-8 as it arrives; of a text's own characters none counts."""

    def __init__(self) -> None:
        self._values = self._quotes = self._containers = 0
        self._rest = b""
        """A backslash at the end of the last part."""

    def add(self, part: bytes) -> None:
        """Count one more part.

        Raises:
            HTTPException: there are too many values, or it is not in UTF-8.
        """
        if b"\0" in part:  # as in UTF-16, where any byte may look like a quote
            raise HTTPException(400, "a JSON body has no NUL bytes; send it in UTF-8")
        part = (self._rest + part).replace(b"\\\\", b"")
        self._rest = b"\\" if part.endswith(b"\\") else b""
        pieces = part.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._quotes % 2 :: 2])
        self._quotes += len(pieces) - 1
        containers = outside.count(b"[") + outside.count(b"{")
        self._containers += containers
        self._values += containers + outside.count(b",")
        for what, count, most in (
            ("values", self._values, MOST_VALUES),
            ("texts", self._quotes // 2, MOST_TEXTS),
            ("lists and objects", self._containers, MOST_CONTAINERS),
        ):
            if count > most:
                raise HTTPException(413, f"this request may have {most} {what} at most; send it in parts")


class _Body:
    """What is received, up to a limit; beyond it an error goes through whoever reads."""

    def __init__(
        self,
        receive: Receive,
        limit: int,
        words: str,
        room: OpenBytes,
        payer: str,
        weight: tuple[int, int],
        json: JsonSize | None,
    ) -> None:
        """`weight` has the memory for each byte, and the most bytes that are in memory."""
        self._receive, self._limit, self._words = receive, limit, words
        self._room, self._payer, (self._each, self._most) = room, payer, weight
        self._json = json
        self._read = self._taken = 0

    async def receive(self) -> Message:
        """The next part of it."""
        message: Message = await self._receive()
        part = message.get("body", b"")
        self._read += len(part)
        if self._read > self._limit:
            raise HTTPException(413, self._words)
        if self._json is not None:
            self._json.add(part)
        if more := self._each * min(self._read, self._most) - self._taken:
            self._room.take(self._payer, more)
            self._taken += more
        return message

    def close(self) -> None:
        """The request is answered."""
        if self._taken:
            self._room.give_back(self._payer, self._taken)
            self._taken = 0


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
