"""Errors as responses, all of one shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError as DatabaseDataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from motet.core.errors import (
    ChatRefusal,
    ConfigError,
    ContextFull,
    DataError,
    EngineError,
    LimitError,
    MotetError,
    RewardError,
    StoreError,
)
from motet.core.json_text import json_text
from motet.process.isolated_calls import TooMuchError
from motet.runtime.disk_gate import is_full
from motet.service.database.presence import DatabaseReplaced
from motet.service.database.store import AWAY
from motet.service.request_log import asked_of

Thing = TypeVar("Thing")
_log = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "invalid_request_error", 409: "conflict_error", 413: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 503: "unavailable_error", 507: "unavailable_error",
}  # fmt: skip
_LONGEST = 10_000
"""Most characters of a message, which may quote its input."""
TINKER = "/tinker/"
"""Below this path conflicts are 400, because clients would repeat a 409 forever."""
_BAD_REQUESTS = (
    "/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/fine_tuning/", TINKER,
)  # fmt: skip
"""Paths where invalid requests are 400 instead of 422, as in the protocols of those packages."""


_PASSING = (408, 409, 429, 503, 507)
_SOON = {"Retry-After": "1"}
"""For temporary failures of the engine or the database."""


class AnyJSON(JSONResponse):
    """JSON of whatever a tenant's data or the engine's figures hold: numbers that are not finite are null."""

    def render(self, content: Any) -> bytes:
        """The body; it never fails for a number or a half character."""
        return json_text(content).encode()


class Refusal(Exception):
    """A response that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers, self.code = status, message, param, headers, code


def bad_field(field: str, reason: object) -> Refusal:
    """A refusal because of one field."""
    return Refusal(400, f"{field}: {reason}", field)


def existing(thing: Thing | None, missing: str) -> Thing:
    """Return the object. Raises Refusal if it is None; 404 with the message `missing`."""
    if thing is None:
        raise Refusal(404, missing)
    return thing


def handle_errors(app: FastAPI, without_places: Callable[[str], str]) -> None:
    """Convert every error to one shape; `without_places` removes this machine's paths from messages."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        # not the text of the whole error, which quotes what was given
        told = error.errors()[0]["msg"] if isinstance(error, RequestValidationError) else error
        asked_of(request.scope).reason = str(told)
        answer = _answer(request, error, without_places)
        let_go(error)
        return answer

    starlettes = ClientDisconnect, HTTPException, RequestValidationError
    for kind in (Refusal, *starlettes, *AWAY, DatabaseDataError, MotetError):
        app.add_exception_handler(kind, handle)

    async def of_disk(request: Request, error: Exception) -> JSONResponse:
        if not is_full(error):
            raise error
        return _answer(request, error, without_places)

    app.add_exception_handler(OSError, of_disk)


def let_go(error: BaseException) -> None:
    """Free what the frames of an error hold, among it the body of its request.

    A frame that keeps its error in a variable, as FastAPI's do, is otherwise freed by a collection of garbage, which
    holds up all requests while it frees megabytes.
    """
    told = [error]
    for one in told:
        one.__traceback__ = None
        behind = (one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()))
        told += [other for other in behind if other is not None and not any(other is known for known in told)]


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a moment later, so that its client should send it again."""
    match error:
        case Refusal():
            return error.status in _PASSING
        case HTTPException():
            return error.status_code in _PASSING
        case LimitError():
            return error.status in _PASSING
    return isinstance(error, (EngineError, ClientDisconnect, *AWAY)) or is_full(error)


def _answer(request: Request, error: Exception, without_places: Callable[[str], str] = str) -> JSONResponse:
    match error:
        case Refusal():
            return error_body(error.status, without_places(error.message), error.param, error.headers, error.code)
        case ClientDisconnect():  # nobody reads it; without a handler the log would get a traceback
            return error_body(408, "the request did not arrive whole")
        case HTTPException():
            return error_body(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][1:])
            status = 400 if request.url.path.startswith(_BAD_REQUESTS) else 422
            told = str(first["msg"]).removeprefix("Value error, ")
            if first["type"] == "json_invalid":
                return error_body(status, f"the body is not valid JSON: {first['ctx']['error']}")
            full = first["type"] == "string_too_long" and where.startswith("prompt")
            code = ContextFull.code if full else ""
            return error_body(status, f"{where}: {told}" if where else told, where or None, code=code)
        case DatabaseDataError():
            return error_body(422, f"the database cannot keep this: {error.orig}")
        case DatabaseReplaced():
            return error_body(503, str(error.orig))
        case _ if isinstance(error, AWAY):
            _log.error("the database does not answer: %s", getattr(error, "orig", error))
            return error_body(503, "the database does not answer; try again in a moment", headers=_SOON)
        case LimitError():
            after = {} if error.seconds is None else {"Retry-After": str(error.seconds)}
            return error_body(error.status, without_places(str(error)), headers=after)
        case TooMuchError():
            return error_body(413, f"this request takes too much: {error}; send less at a time")
        case ChatRefusal():
            field, colon, _ = str(error).partition(": ")
            return error_body(400, without_places(str(error)), field if colon and field.isidentifier() else None)
        case ConfigError() | DataError() | RewardError():
            return error_body(400, without_places(str(error)), code=error.code)
        case StoreError():
            return error_body(400 if request.url.path.startswith(TINKER) else 409, without_places(str(error)))
        case EngineError():
            return error_body(503, without_places(str(error)), headers=_SOON)
        case _ if is_full(error):
            _log.error("the disk is full: %s", error)
            return error_body(507, "the disk of the service is full; try again once its operator has made room")
    return error_body(400 if request.url.path.startswith(TINKER) else 500, without_places(str(error)))


def error_body(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None, code: str = ""
) -> JSONResponse:
    """The response of an error."""
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}…"
    detail: dict[str, Any] = {
        "message": message,
        "type": TYPES.get(status, "server_error"),
        "param": param,
        "code": code or None,
    }
    challenge = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return AnyJSON({"error": detail}, status, {**challenge, **(headers or {})})
