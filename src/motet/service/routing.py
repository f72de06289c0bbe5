"""Routes that leave the event loop to others: how they read bodies, and where they work.

JSON is read by a fast parser, a form piece by piece in threads. A route whose function is not async runs
in the turn of its tenant, and its answer is encoded there.
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from motet.core.plain_yaml import DEEPEST
from motet.service.depends import principal
from motet.service.http.auth import address
from motet.service.http.bodies import has_nul
from motet.service.http.forms import FormReader
from motet.service.request_log import asked_of

if TYPE_CHECKING:
    from motet.service.composition import Service

_MOST_BOUNDARY = 100
_PIECE = 2**18
"""Bytes of a form that are searched and written at once."""
_REQUEST: ContextVar[weakref.ref[Request]] = ContextVar("request")
"""The request that this task answers; a timer of the server keeps the task's context for seconds after the answer."""


class _Request(Request):
    async def body(self) -> bytes:
        """The body. Raises HTTPException if a text of it has a NUL character, which no database keeps."""
        body = await super().body()
        if has_nul(self):
            raise HTTPException(422, "a text of the body has a NUL character (\\u0000); take it out")
        return body

    async def json(self) -> Any:
        """The body as JSON; `pydantic_core` reads a quarter of a million numbers in 14 ms, Python's parser in 80 ms.

        Raises JSONDecodeError, and HTTPException for half of a surrogate pair or too many levels.
        """
        if not hasattr(self, "_json"):
            try:
                self._json = from_json(await self.body(), allow_inf_nan=True)
            except ValueError as error:
                words = str(error)
                if "recursion" in words:
                    deep = f"this is nested more than {DEEPEST} deep, which nothing here needs; write it flatter"
                    raise HTTPException(400, deep) from error
                if "hex escape" in words:
                    half = f"a text of the JSON has half of a surrogate pair ({words}); send the whole character"
                    raise HTTPException(400, half) from error
                raise json.JSONDecodeError(words, "", 0) from error
        return self._json

    async def form(self, **_: Any) -> FormData:  # type: ignore[override]
        """The form: one file and few small fields. Raises HTTPException for another type."""
        if self._form is None:
            kind, options = parse_options_header(self.headers.get("content-type"))
            boundary = options.get(b"boundary", b"")
            if kind and (kind != b"multipart/form-data" or not 0 < len(boundary) <= _MOST_BOUNDARY):
                words = f"send the file as multipart/form-data, with a boundary of at most {_MOST_BOUNDARY} bytes"
                raise HTTPException(400, words)
            self._form = await self._read(FormReader(boundary)) if kind else FormData()
        return self._form

    async def _read(self, reader: FormReader) -> FormData:
        parts, size = list[bytes](), 0
        try:
            async for part in self.stream():
                parts.append(part)
                size += len(part)
                if size >= _PIECE or not part:
                    whole, parts, size = b"".join(parts), [], 0
                    await run_in_threadpool(reader.add, whole)
            await run_in_threadpool(reader.add, b"".join(parts))
            return reader.form()
        except BaseException:
            reader.close()
            raise


class TenantRoute(APIRoute):
    """A route that reads its body within limits. It runs in the turn of its tenant, unless its function is async."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.in_turn = not inspect.iscoroutinefunction(endpoint)
        super().__init__(path, self._in_turn(endpoint) if self.in_turn else endpoint, **options)

    def _in_turn(self, endpoint: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(endpoint)
        async def run(**given: Any) -> Any:
            request = _REQUEST.get()()
            assert request is not None  # its handler waits for this
            service: Service = request.app.state.service
            whose = asked_of(request.scope).tenant_id or address(request)
            reads, scope = request.method in ("GET", "HEAD"), request.scope
            changed = next((one for one in given.values() if isinstance(one, Response)), None)

            def work() -> Any:
                return self._answer(endpoint(**given), changed)

            if not reads:
                return await service.write_threads.run(whose, work)
            return await service.answer_threads.run(whose, lambda: service.access.timed(scope, work))

        return run

    def _answer(self, found: Any, changed: Response | None) -> Any:
        """What a function returned as a response: FastAPI would encode it in the event loop.

        `changed` is the response whose status and headers the function may have set.
        """
        if self.response_field is None or isinstance(found, Response):
            return found
        value, errors = self.response_field.validate(found, {}, loc=("response",))
        if errors:  # FastAPI tells them
            return found
        content = self.response_field.serialize_json(value, exclude_none=self.response_model_exclude_none)
        status = self.status_code if changed is None else changed.status_code or self.status_code
        answer = Response(content, status or 200, media_type="application/json")
        if changed is not None:
            answer.headers.raw.extend(changed.headers.raw)
        return answer

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that reads in this way."""
        handle, asks = super().get_route_handler(), _asks(self.dependant)

        async def limited(request: Request) -> Response:
            service: Service = request.app.state.service
            if asks and service.access.looked_up(request):  # before the body is parsed
                service.access.principal(request)
            reading = _Request(request.scope, request.receive)
            _REQUEST.set(weakref.ref(reading))
            return await handle(reading)

        return limited


def _asks(dependant: Dependant) -> bool:
    """Whether a route needs a key."""
    return dependant.call is principal or any(map(_asks, dependant.dependencies))
