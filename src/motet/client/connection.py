"""Connection to a service: address, requests and retries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from motet.client.kept_keys import kept_key
from motet.config.urls import parse_url
from motet.core.errors import ConfigError, ServiceError
from motet.service.schemas import Error, JobEvent

M = TypeVar("M", bound=BaseModel)

DEFAULT_URL = "http://127.0.0.1:8420"
"""Where `motet serve` listens by default."""
PATIENCE_SECONDS = 600.0
"""How long following a job waits for an unreachable service."""
PAGE = 200
"""Jobs per request."""
AWAY = (0, 502, 503, 504)
"""Statuses of a service that restarts, its proxy included."""
_MOST_RETRIES = 8
_LONGEST_WAIT = 30.0
_TIMEOUT = httpx2.Timeout(120.0, connect=5.0)
_QUIET = httpx2.Timeout(45.0, connect=5.0)  # a stream sends a keep-alive every fifteen seconds


def path_of(kind: str, name: str) -> str:
    """The path of one of the service's `jobs`, `adapters`, … Only bases and other tenants' adapters have slashes.

    Raises:
        ServiceError: the name would be the path of something else.
    """
    if "/" in name and kind not in ("adapters", "models"):
        raise ServiceError(f"there is no {kind.removesuffix('s')} {name!r}: its name has no `/`", 404)
    return f"/v1/{kind}/{quote(name, safe='')}"


def worker_name() -> str:
    """A name for a worker on this machine, different each time."""
    host = "".join(letter for letter in socket.gethostname()[:40] if letter.isalnum() or letter in "-_.")
    return f"{host or 'worker'}-{secrets.token_hex(4)}"


class Connection:
    """A client's service, and requests to it."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """Connects to nothing yet.

        Args:
            url: of the service; default: `$MOTET_URL`, or http://127.0.0.1:8420.
            key: an API key; default: `$MOTET_API_KEY`, or the key of `motet login`. A service with --no-keys needs none.

        Raises:
            ConfigError: an invalid address or key.
        """
        given = url or os.environ.get("MOTET_URL") or DEFAULT_URL
        self.url = given.rstrip("/")
        key = (key or os.environ.get("MOTET_API_KEY") or kept_key(self.url)).strip()
        try:
            host = parse_url(given).hostname
        except ValueError as error:
            raise ConfigError(
                f"a service cannot be asked: {error} (where no address is given, it is {DEFAULT_URL})"
            ) from error
        if not key.isascii() or not key.isprintable():
            raise ConfigError("this is not an API key; one looks like mk-… and has plain letters only")
        self._heard = 0.0
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT,
            trust_env=host not in ("127.0.0.1", "localhost", "::1"),  # no proxy to oneself
        )

    def _request(self, method: str, path: str, **parts: Any) -> httpx2.Request:
        """Build a request. Raises ConfigError if a value cannot be written as JSON."""
        try:
            return self._http.build_request(method, path, **parts)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"this cannot be sent to the service: {error}; send JSON: text, finite numbers, lists"
            ) from error

    async def _send(self, method: str, path: str, *, also: int = 200, **request: Any) -> httpx2.Response:
        """Send a request, and return a successful response or one with status `also`; retries after a rate limit.

        Raises:
            ServiceError: the service refuses; the message says why.
            ConfigError: a value cannot be sent.
        """
        if "params" in request:
            request["params"] = {name: value for name, value in request["params"].items() if value is not None}
        for attempt in itertools.count():
            with _transport_errors(self.url):
                response = await self._http.send(self._request(method, path, **request))
            self._heard = time.monotonic()
            if (seconds := _seconds_to_wait(response, attempt)) is None:
                break
            await asyncio.sleep(seconds)
        if not response.is_success and response.status_code != also:
            raise _refusal(response)
        return response

    async def _ask(self, model: type[M], method: str, path: str, **request: Any) -> M:
        """Read the answer in this shape."""
        response = await self._send(method, path, **request)
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise ServiceError(
                f"{response.url} does not answer as `motet serve` does; look at the address", response.status_code
            ) from error

    async def _patiently(self, model: type[M], method: str, path: str, **request: Any) -> M:
        """Send a request, and retry while the service is unreachable."""
        deadline, wait = time.monotonic() + PATIENCE_SECONDS, 0.25
        while True:
            try:
                return await self._ask(model, method, path, **request)
            except ServiceError as error:
                if error.status not in AWAY or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, 5.0)

    async def _lines(self, method: str, path: str, **request: Any) -> AsyncGenerator[str, None]:
        """Yield lines of an answer as they arrive."""
        with _transport_errors(self.url):
            response = await self._http.send(self._request(method, path, **request), stream=True)
            async with contextlib.aclosing(response):
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                async for line in response.aiter_lines():
                    yield line

    async def _all_pages(self, model: type[Any], path: str, **params: Any) -> AsyncGenerator[Any, None]:
        after: str | None = None
        while True:
            page = await self._ask(model, "GET", path, params={**params, "after": after, "limit": PAGE})
            for item in page.data:
                yield item
            if (after := page.next) is None:
                return


@contextlib.contextmanager
def _transport_errors(url: str) -> Iterator[None]:
    """Failures of the transport as errors for people."""
    try:
        yield
    except httpx2.ConnectError as error:
        raise ServiceError(
            f"nothing answers at {url} ({error}); start a service with `motet serve --base small --no-keys`, or set "
            "MOTET_URL (or --url) to its address. For a local run, use `motet report runs/NAME`"
        ) from error
    except (httpx2.TransportError, httpx2.StreamError) as error:
        raise ServiceError(
            f"the connection to {url} broke off ({str(error) or type(error).__name__}); try again"
        ) from error


def _seconds_to_wait(response: httpx2.Response, attempt: int) -> float | None:
    """Seconds until a rate-limited request should be retried, from the response; None for other responses."""
    after = response.headers.get("retry-after", "")
    if response.status_code != 429 or attempt >= _MOST_RETRIES or not after.isdecimal():
        return None
    return float(after) if float(after) <= _LONGEST_WAIT else None


def _refusal(response: httpx2.Response) -> ServiceError:
    """The service's reason for a refusal."""
    try:
        message = Error.model_validate_json(response.content).error.message
    except ValidationError:
        message = f"{response.url} answered {response.status_code}: {response.text[:200]}".rstrip(": ")
    if response.status_code == 401 and "authorization" not in response.request.headers:
        message = (
            "this service needs an API key: `motet login`, or set MOTET_API_KEY, or give --key (from Python: key=…)"
        )
    return ServiceError(message, response.status_code)


class Following:
    """The progress of following a job's events."""

    def __init__(self, job: str, after: int, heard: float = 0.0) -> None:
        """`heard`: monotonic time at which the service answered anything; 0 if it never did, so that nobody waits for it."""
        self.after = after
        self.path = f"{path_of('jobs', job)}/events/stream"
        self._heard = heard
        self._wait = 0.25
        self._refused = 0
        """How often in a row the service answered that requests are too frequent."""

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of the stream's request."""
        return {"headers": {"Last-Event-ID": str(self.after)}, "timeout": _QUIET}

    def read(self, line: str) -> JobEvent | None:
        """The event that a line of the stream holds."""
        self._heard, self._wait, self._refused = time.monotonic(), 0.25, 0
        if not line.startswith("data:"):
            return None
        if line.startswith('data: {"error":'):  # the key was revoked or has expired
            raise ServiceError(Error.model_validate_json(line.removeprefix("data:")).error.message, 401)
        event = JobEvent.model_validate_json(line.removeprefix("data:"))
        self.after = event.id
        return event

    def wait(self, error: ServiceError | None) -> float:
        """Seconds until the next attempt. Raises ServiceError if another attempt is of no use."""
        if error is not None and error.status == 429 and self._refused < _MOST_RETRIES:  # rate limit: wait longer
            self._refused += 1
            return 2.0
        lost = error is not None and error.status in AWAY
        if error is not None and (not lost or not self._heard or time.monotonic() - self._heard > PATIENCE_SECONDS):
            raise error
        self._wait = min(self._wait * 2, 5.0)
        return self._wait
