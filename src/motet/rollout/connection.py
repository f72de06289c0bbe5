"""HTTP client for one server: requests with time limits, event streams, and a reason for each failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import httpx2

from motet.config.dialects import HttpRequest, Json
from motet.core.errors import ServerFault, ServerGone, ServerRefused

Result = TypeVar("Result")

IDLE_SECONDS = 2.0
"""How long a connection is kept without a request: shorter than servers keep one, which is 5 s for uvicorn and vLLM."""
_GONE = (httpx2.RequestError, httpx2.StreamError, OSError)


@dataclass(frozen=True)
class Clocks:
    """Time limits and intervals, in seconds."""

    connect: float = 5.0
    health: float = 5.0
    """Interval between health checks of a busy server, and limit for each."""
    load: float = 60.0
    """Limit for loading or unloading a version."""
    request: float = 1800.0
    """Limit for one completion; a generous backstop."""
    retry: float = 0.5
    """Wait before the first retry; doubles each time."""
    look: float = 0.5
    """Interval of checks on a server that is away, and on its process."""
    hangs: float = 120.0
    """A started server that has answered before and is silent for this long is started again."""
    loads: float = 1800.0
    """Limit for the first answer after a start."""


@dataclass
class ServerConnection:
    """The connections to one server."""

    url: str
    clocks: Clocks
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: Any = True
    """TLS verification: False, True, or an `ssl.SSLContext`."""
    note: str = ""
    """Why the server is gone."""

    def __post_init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None
        self._waiting: set[anyio.CancelScope] = set()

    async def healthy(self, seconds: float) -> None:
        """Check the server's health.

        Raises:
            ServerGone: no answer, or not in time.
        """
        try:
            with anyio.fail_after(seconds):
                answer = await self._open().get("/health")
        except (*_GONE, TimeoutError) as error:
            raise ServerGone(f"{self.url} does not answer: {_reason(error)}") from error
        if answer.status_code != 200:
            raise ServerGone(f"{self.url} is not healthy: {answer.status_code}")

    def leave(self, note: str) -> None:
        """Mark the server as gone; running requests fail with `note`."""
        self.note = note
        for limit in self._waiting:
            limit.cancel()

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def request(self, request: HttpRequest, seconds: float) -> Any:
        """Send a request and return the JSON of its answer, or None if the answer is not JSON.

        Raises:
            ServerGone: no answer in time.
            ServerRefused: an error status, with the server's message.
        """
        begun = asyncio.get_running_loop().time()
        asking = self._open().request(request.method, request.path, json=request.body)
        try:
            answer = await self._in_time(asking, request, begun, seconds)
        except _GONE as error:
            raise ServerGone(f"{self.url}{request.path} does not answer: {_reason(error)}") from error
        self._check(request, answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError:
            return None

    async def events(self, request: HttpRequest) -> AsyncGenerator[Json, None]:
        """Send a request and yield its events.

        Raises:
            ServerGone: no answer in time, or the connection broke; earlier events are valid.
            ServerRefused: an error status, with the server's message.
            ServerFault: an event is not JSON.
        """
        seconds, begun = self.clocks.request, asyncio.get_running_loop().time()
        client = self._open()
        asking = client.send(client.build_request("POST", request.path, json=request.body), stream=True)
        try:
            answer = await self._in_time(asking, request, begun, seconds)
            try:
                if answer.status_code != 200:
                    text = await self._in_time(answer.aread(), request, begun, seconds)
                    self._check(request, answer.status_code, text.decode(errors="replace"))
                lines = _lines(answer)
                while (line := await self._in_time(anext(lines, None), request, begun, seconds)) is not None:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield _parsed(self.url, data.decode(errors="replace"))
            finally:
                await answer.aclose()
        except _GONE as error:
            raise ServerGone(f"{self.url}{request.path} broke off: {_reason(error)}") from error

    async def _in_time(self, answer: Awaitable[Result], request: HttpRequest, begun: float, seconds: float) -> Result:
        """Wait for an answer until the limit, or until the server is gone.

        Uses an anyio cancel scope, because httpx shields its cleanup from that. An asyncio timeout could interrupt the
        cleanup of closed connections and leave other connections open.
        """
        with anyio.CancelScope(deadline=begun + seconds) as limit:
            self._waiting.add(limit)
            try:
                return await answer
            finally:
                self._waiting.discard(limit)
        if asyncio.get_running_loop().time() < begun + seconds:
            raise ServerGone(f"{self.url} is gone: {self.note}")
        raise ServerGone(f"{self.url}{request.path} has not answered within {seconds:g} s")

    def _open(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS)
            self._client = httpx2.AsyncClient(
                base_url=self.url,
                headers=dict(self.headers),
                verify=self.verify,
                limits=limits,
                timeout=httpx2.Timeout(None, connect=self.clocks.connect),
                trust_env=False,
            )
        return self._client

    def _check(self, request: HttpRequest, status: int, text: str) -> None:
        if status == 200:
            return
        detail = detail_of(text)
        hint = ""
        if status in (401, 403):
            hint = "; is rollout.api_key_env set to the variable that holds its key?"
        elif status == 404 and request.path.endswith("lora_adapter"):
            hint = (
                "; does it load adapters at run time (vLLM: --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)?"
            )
        raise ServerRefused(f"{self.url}{request.path} answers {status}: {detail}{hint}", status, detail)


async def _lines(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Split a stream into lines at newlines only; texts may contain other characters that Python treats as line ends."""
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _parsed(url: str, data: str) -> Json:
    try:
        event: Json = json.loads(data)
    except ValueError as error:
        raise ServerFault(f"{url} sent an event that is not JSON: {data[:80]!r}") from error
    return event


def detail_of(text: str) -> str:
    """The message of an error answer, in one line."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        answer = json.loads(text)
        error = answer.get("error", answer)
        inner = error.get("message", error) if isinstance(error, dict) else error
        text = str(answer.get("error_message") or inner)
    return " ".join(text.split())[:400]


def _reason(error: BaseException) -> str:
    return f"{error}" or type(error).__name__
