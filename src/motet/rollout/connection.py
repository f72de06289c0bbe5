"""HTTP to one server: requests that end in time, answers, streams of events, and a reason for whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import httpx2

from motet.dialects import HttpRequest, Json
from motet.errors import ServerFault, ServerGone, ServerRefused

Result = TypeVar("Result")

_GONE = (httpx2.RequestError, httpx2.StreamError, OSError)


@dataclass(frozen=True)
class Clocks:
    """How long one waits for what, in seconds."""

    connect: float = 5.0
    health: float = 5.0
    """Between two looks at a busy server's health, and for its answer."""
    load: float = 60.0
    """For loading or unloading a version."""
    request: float = 1800.0
    """For one completion: a wide backstop."""
    retry: float = 0.5
    """Before the first repetition; it doubles each time."""
    look: float = 0.5
    """Between two looks at a server that is away, and at whether its process lives."""


@dataclass
class ServerConnection:
    """The connections to one server."""

    url: str
    clocks: Clocks
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: Any = True
    """TLS: False, True, or an `ssl.SSLContext`."""
    note: str = ""
    """Why it is away."""

    def __post_init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None
        self._waiting: set[anyio.CancelScope] = set()

    async def healthy(self, seconds: float) -> None:
        """Ask for its health.

        Raises:
            ServerGone: no answer, or not in time.
        """
        try:
            with anyio.fail_after(seconds):
                answer = await self._open().get("/health")
        except (*_GONE, TimeoutError) as error:
            raise ServerGone(f"{self.url} does not answer: {_reason(error)}") from error
        if answer.status_code != 200:
            raise ServerGone(f"{self.url} says that it is not well: {answer.status_code}")

    def leave(self, note: str) -> None:
        """It is gone: requests under way are told."""
        self.note = note
        for limit in self._waiting:
            limit.cancel()

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def request(self, request: HttpRequest, seconds: float) -> Any:
        """One request and its JSON answer (None where there is none).

        Raises:
            ServerGone: no answer in time.
            ServerRefused: an error, with what was said.
        """
        begun = asyncio.get_running_loop().time()
        asking = self._open().request(
            request.method, request.path, json=request.body, content=request.content, headers=request.headers
        )
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
        """A request that is answered with events, and those.

        Raises:
            ServerGone: no answer in time, or it broke off; events that came are good.
            ServerRefused: an error, with what was said.
            ServerFault: an event that is no JSON.
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
        """Wait for an answer, only so long, and no longer than the server is there.

        What ends the waiting is anyio's, which the client's own cleaning up is shielded from: a timeout of asyncio's met it
        while it closed connections that the server had left, and the others of these were forgotten and stayed open.
        """
        with anyio.CancelScope(deadline=begun + seconds) as limit:
            self._waiting.add(limit)
            try:
                return await answer
            finally:
                self._waiting.discard(limit)
        if asyncio.get_running_loop().time() < begun + seconds:
            raise ServerGone(f"{self.url} went away: {self.note}")
        raise ServerGone(f"{self.url}{request.path} has not answered within {seconds:g} s")

    def _open(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
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
    """Lines of a stream of events. Only a newline ends one: a text may hold what Python takes for the end of a line."""
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
        raise ServerFault(f"{url} sent an event that is no JSON: {data[:80]!r}") from error
    return event


def detail_of(text: str) -> str:
    """What an error answer says, in one line."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        answer = json.loads(text)
        error = answer.get("error", answer)
        inner = error.get("message", error) if isinstance(error, dict) else error
        text = str(answer.get("error_message") or inner)
    return " ".join(text.split())[:400]


def _reason(error: BaseException) -> str:
    return f"{error}" or type(error).__name__
