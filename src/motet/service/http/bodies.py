"""The way of every request into the service: its key, its rate, and then its body, within limits.

A body is refused as soon as it is known to be too large, before it is stored. A large answer takes memory of its tenant
until its client has read it, however slowly. Without a valid key, only small bodies are read. Parsing JSON blocks all
other requests, so each path has its own limit, and a large body counts as several requests of its tenant's rate.
Addresses with a NUL character are refused too, because databases cannot store them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from motet.config.service import HttpConfig
from motet.core.errors import ContextFull
from motet.service.errors import Refusal
from motet.service.http.auth import HEALTH, Access, address
from motet.service.http.connections import BYTES_OF_A_REQUEST, GONE
from motet.service.http.json_size import MOST_NUMBERS, MOST_TEXTS, MOST_VALUES, MOST_VALUES_OF_NOBODY, NO_KEY, JsonSize
from motet.service.http.open_bytes import SOON, OpenBytes
from motet.service.request_log import asked_of
from motet.service.turns import Floods, Turns

MOST = 2**20
"""Default limit of a body in bytes."""
MOST_PROMPT = 4 * 2**20
"""Limit for prompts (lower on a base with few positions), trials of graders, and submissions of several jobs."""
MOST_SCORES = 8 * 2**20
"""Limit for results of reward workers."""
MOST_OF_NOBODY = 2**16
"""Limit before the key is checked."""
MOST_GRADIENT = 32 * 2**20
"""Limit for a client's gradient requests."""
_GRADIENT = "/tinker/api/v1/forward_backward"
_PROMPTS = {
    "/tinker/api/v1/asample": 16, "/v1/chat/completions": 64, "/v1/responses": 64, "/v1/messages": 64,
    "/v1/completions": 16 * 64,
}  # fmt: skip
"""Bytes of a body per position of the base: of a token id, of a token's text as JSON, of 16 such texts."""
_JOBS = "/v1/submissions"
_LONG = ("/v1/fine_tuning/alpha/graders/run", _JOBS)
_LEASES = ("/work/rewards/lease", "/work/episodes/lease")
_SCORES = ("/work/rewards/results", "/work/{kind}/results")
_EPISODES, _EPISODE_BYTES = "/episodes/", 64
_AROUND = 2**16  # extra bytes of a form around its file, and of a request around its prompt
_NUMBERS = ("/tinker/api/v1/asample", "/v1/completions")
ANSWER_OF_A_REQUEST = 2**18
"""Bytes of an answer that count as one more request; files and leases of workers do not count."""
MOST_DIGITS = 640
"""Most digits of a whole number, because parsing time grows with their square."""
MOST_FIELDS = 1000
"""Fields of an address's query: to read them takes 0.5 ms."""
_AT_ONCE = 8
"""Answers that are sent in one turn of the event loop."""
_SPREAD = 8
"""Approximate bytes of memory per byte of JSON."""
_SPOOLED = 2**20
"""Most bytes of an uploaded file in memory."""
_LARGEST_AT_ONCE = 4
"""Largest uploads that a tenant's open uploads may take on the disk."""
_BODY = "motet.body"
"""Key of the `_Body` in a request's scope."""
_PIECE = 2**16
"""Bytes of an answer that are sent at once; smaller answers are not counted."""


class Bodies:
    """Middleware that limits what each path may receive."""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        room: OpenBytes,
        answers: OpenBytes,
        uploads: Mapping[str, float],
        refusal: Callable[..., Response],
        access: Access,
        positions: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        """Set up the limits; `answers` is the room of answers, `uploads` has the limit in MB of each path that takes files.

        `access` says whose a request is, and counts it; `positions` the most tokens of a prompt over all bases, 0 while
        unknown.
        """
        self._app, self._refusal, self._access = app, refusal, access
        self._config, self._room, self._answers = config, room, answers
        self._positions, self._stopping = positions, stopping
        self._sending, self._floods = Turns(_AT_ONCE), Floods()
        self._requests = Counter[str]()
        """Open requests by tenant or, without a good key, by address."""
        self._uploads = Counter[str]()
        """Open uploads by tenant."""
        self._arriving = Counter[str]()
        """Bytes of open uploads by tenant; of one that does not say its length, the most that it may have."""
        self._limits = {path: int(limit * 2**20) + _AROUND for path, limit in uploads.items()}
        self._words = {
            path: f"this is larger than {limit:g} MB, the limit of this service" for path, limit in uploads.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, admitted, tenant = Request(scope), False, None
        with contextlib.ExitStack() as places:
            try:
                tenant = self._access.known_tenant(request)
                whose = tenant or address(request)
                if self._floods.floods(whose) and not scope["path"].endswith(HEALTH):
                    await self._floods.wait(whose, gone := scope.get("state", {}).get(GONE) or asyncio.Event())
                    if gone.is_set():
                        return
                if tenant is None:
                    with self._place(scope, "", address(request)):
                        tenant, admitted = await run_in_threadpool(self._access.admit, request), True
                places.enter_context(self._place(scope, tenant, tenant or address(request)))
                if not admitted and tenant:
                    tenant = await run_in_threadpool(self._access.admit, request)
                elif not admitted:
                    tenant = self._access.admit(request)
            except Refusal as error:
                whose = tenant or address(request)
                if self._access.refused(scope, whose):
                    self._floods.add(whose)
                await self._refuse(scope, receive, send, error.status, error.message, headers=error.headers)
            else:
                await self._answer(scope, receive, send, tenant)

    @contextlib.contextmanager
    def _place(self, scope: Scope, tenant: str, whose: str) -> Iterator[None]:
        """A place among the open requests of a tenant or an address. Raises Refusal if it has no free one."""
        most, what = self._config.requests_per_tenant, "requests"
        if tenant and scope["path"].endswith("/stream"):
            whose, most, what = f"streams of {whose}", self._config.streams_per_tenant, "streams"
        if self._requests[whose] >= most:
            words = f"{most} {what} of this {'tenant' if tenant else 'address'} are open, the most here; wait for some to end"
            raise Refusal(429, words, headers=SOON)
        self._requests[whose] += 1
        try:
            yield
        finally:
            self._requests[whose] -= 1
            if not self._requests[whose]:
                del self._requests[whose]

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, status: int, words: str, **more: Any) -> None:
        asked_of(scope).reason = words
        await self._refusal(status, words, **more)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, payer: str) -> None:
        refuse = functools.partial(self._refuse, scope, receive, send)
        if "\0" in scope["path"] or b"%00" in (query := scope["query_string"]) or b"\0" in query:
            return await refuse(422, "the address has a NUL character; take it out")
        if query.count(b"&") >= MOST_FIELDS:
            return await refuse(422, f"the address has more than {MOST_FIELDS} fields")
        scope["headers"] = [one for one in scope["headers"] if one[0] != b"range" or b"," not in one[1]]
        path = scope["path"].rstrip("/")
        limit = self._limits.get(path) or _limit(path, self._positions())
        words = self._words.get(path, f"this request may have {limit / 2**20:.3g} MB at most")
        length = (headers := dict(scope["headers"])).get(b"content-length", b"")
        too_long = length.isdigit() and int(length) > limit
        if too_long and path in _PROMPTS and path.startswith("/v1/") and (most := self._positions()):
            told = f"This model's maximum context length is {most} tokens, and the prompt is too long for that: {words}"
            return await refuse(400, told, code=ContextFull.code)
        if too_long and path != _GRADIENT:  # whose route uses up its number
            return await refuse(413, words)
        large = int(length) > MOST_OF_NOBODY if length.isdigit() else b"transfer-encoding" in headers
        uploads = path in self._limits and scope["method"] == "POST"
        if (uploads or large) and not payer:
            return await refuse(401, NO_KEY)
        if payer and scope["method"] not in ("GET", "HEAD") and self._answers.full(payer):
            return await refuse(
                429, "your unread answers use all the memory for answers; read them first", headers=SOON
            )
        if uploads and self._uploads[payer] >= (most := self._config.waiting_per_tenant):
            words = f"{most} uploads of this tenant are open, the most here; wait for some to end"
            return await refuse(429, words, headers=SOON)
        size = 0 if not uploads else int(length) if length.isdigit() else limit
        if uploads and self._arriving[payer] + size > _LARGEST_AT_ONCE * max(self._limits.values()):
            words = f"open uploads of this tenant take {self._arriving[payer] >> 20} MB; wait for some to end"
            return await refuse(429, words, headers=SOON)
        reads_json = not uploads and path != _GRADIENT  # whatever content type the client sends
        weight = (_SPREAD, limit) if reads_json else (1, _SPOOLED if uploads else limit)
        json = JsonSize(*most_values(path, payer)) if reads_json else None
        charge = functools.partial(self._access.charge, scope)
        scope[_BODY] = body = _Body(receive, limit, words, self._room, payer, weight, json, charge)
        self._uploads[payer] += uploads  # each is a file on the disk until it is checked
        self._arriving[payer] += size
        try:
            await self._app(scope, body.receive, self._in_pieces(scope, body, receive, send))
        except asyncio.CancelledError:  # the server cancels stuck requests at shutdown
            if not self._stopping():
                raise
        finally:
            body.close()
            del scope[_BODY]  # which has the scope
            self._uploads[payer] -= uploads
            self._arriving[payer] -= size

    def _in_pieces(self, scope: Scope, body: _Body, receive: Receive, send: Send) -> Send:
        """Send whole answers in pieces, because the server keeps what a client does not read, and waits only between two."""
        start = list[Message]()

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._sending.enter()
            if message["type"] == "http.response.start" and _length(message) > _PIECE:
                start.append(message)  # until it is known whether there is room
                return
            content = message.get("body", b"")
            if not start or message.get("more_body"):
                for one in (*start, message):
                    await send(one)
                start.clear()
                return
            if not scope["path"].endswith(_LEASES):
                self._access.charge(scope, len(content) / ANSWER_OF_A_REQUEST)
            try:
                if (payer := asked_of(scope).tenant_id) and not body.held:
                    # what a request has changed is told in any case
                    body.hold(self._answers, payer, len(content), always=scope["method"] != "GET")
            except HTTPException as error:
                await self._refusal(error.status_code, error.detail, headers=error.headers)(scope, receive, send)
                return
            await send(start.pop())
            for place in range(0, max(1, len(content)), _PIECE):  # the answer to HEAD is empty
                more = place + _PIECE < len(content)
                await send({**message, "body": content[place : place + _PIECE], "more_body": more})

        return sent


def _length(start: Message) -> int:
    """The length of an answer; 0 if it is not known."""
    return int(dict(start.get("headers", ())).get(b"content-length", b"0"))


def _limit(path: str, positions: int) -> int:
    """Limit in bytes for a path without files."""
    if path == _GRADIENT:
        return MOST_GRADIENT
    if (each := _PROMPTS.get(path) or (_EPISODE_BYTES if path.startswith(_EPISODES) else 0)) and positions:
        return min(MOST_PROMPT, _AROUND + positions * each)
    if each or path in _LONG:
        return MOST_PROMPT
    return MOST_SCORES if path.endswith(_SCORES) else MOST


def most_values(path: str, payer: str) -> tuple[int, int]:
    """Limits of values and of texts in a body of JSON; what describes many jobs has twice as many."""
    if not payer:
        return MOST_VALUES_OF_NOBODY, MOST_TEXTS
    if path == _JOBS:
        return 2 * MOST_VALUES, 2 * MOST_TEXTS
    return MOST_NUMBERS if path in _NUMBERS else MOST_VALUES, MOST_TEXTS


def has_nul(request: Request) -> bool:
    """Whether a text of a body of JSON that has arrived has a NUL character."""
    body: _Body | None = request.scope.get(_BODY)
    return body is not None and body.json is not None and body.json.has_nul


def when_sent(request: Request, call: Callable[[], object]) -> None:
    """Call a function when the answer to a request is sent, or its client has gone.

    Use it in the event loop: in a thread, the request may have ended.
    """
    body: _Body = request.scope[_BODY]
    body.answer.callback(call)


def take(request: Request, size: int) -> None:
    """Count more memory of a request until it is answered. Raises HTTPException without room (429)."""
    body: _Body = request.scope[_BODY]
    body.take(size)


def hold(request: Request, room: OpenBytes, tenant_id: str, size: int) -> Callable[[], None]:
    """Count memory of the answer to a request until it is sent, in a room for answers: requests must not starve them.

    Returns:
        What gives it back at once, for an answer that is small after all.

    Raises:
        HTTPException: no room now (429); one answer at a time always fits.
    """
    body: _Body = request.scope[_BODY]
    return body.hold(room, tenant_id, size)


class _Body:
    """Receives a body up to a limit; above it, the reader gets an error."""

    def __init__(
        self,
        receive: Receive,
        limit: int,
        words: str,
        room: OpenBytes,
        payer: str,
        weight: tuple[int, int],
        json: JsonSize | None,
        charge: Callable[[float], object],
    ) -> None:
        """`weight`: memory per byte, and the most bytes in memory; `charge` counts so many more requests."""
        self._receive, self._limit, self._words = receive, limit, words
        self._room, self._payer, (self._each, self._most) = room, payer, weight
        self.json, self._charge, self._charged, self._read, self._taken = json, charge, 1.0, 0, 0
        self.answer = contextlib.ExitStack()
        """Called when the answer is sent."""
        self.held = False
        """Whether memory of the answer is counted."""

    async def receive(self) -> Message:
        """The next message."""
        message: Message = await self._receive()
        part = message.get("body", b"")
        self._read += len(part)
        if self._read > self._limit:
            raise HTTPException(413, self._words)
        if self.json is not None:
            self.json.add(part)
        requests = self._read / BYTES_OF_A_REQUEST if self.json is None else self.json.requests
        if (more := requests - self._charged) > 0:
            self._charge(more)
            self._charged = requests
        if (more := self._each * min(self._read, self._most) - self._taken) > 0:
            self.take(more)
        return message

    def take(self, size: int) -> None:
        """Count more memory. Raises HTTPException without room."""
        self._room.take(self._payer, size)
        self._taken += size

    def hold(self, room: OpenBytes, payer: str, size: int, *, always: bool = False) -> Callable[[], None]:
        """Count memory of the answer until it is sent. Raises HTTPException without room; one of a tenant always fits."""
        size = min(size, room.most_of_one)
        room.take(payer, size, always=always or not room.holds(payer))
        self.held = True
        held = self.answer.enter_context(contextlib.ExitStack())
        held.callback(room.give_back, payer, size)

        def give_back() -> None:
            self.held = False
            held.close()

        return give_back

    def close(self) -> None:
        """Release the memory after the response."""
        self.answer.close()
        if self._taken:
            self._room.give_back(self._payer, self._taken)
            self._taken = 0
