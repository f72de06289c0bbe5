"""A client of `motet serve`, blocking and asynchronous: submit jobs, watch them, take their adapters home.

    with motet.Client() as client:
        job = client.submit({"name": "sort", "data": "toy:sort_letters", "reward": "exact"})
        for event in client.events(job.id, follow=True):
            print(event.kind, event.data)
        print(client.pull(job.id))

What can be asked stands once, in `Calls`; the two clients differ in how they wait for the answer.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2

from motet.client import calls
from motet.client.calls import Call, Calls, Rollouts
from motet.client.connection import DEFAULT_URL, Connection, Following, told
from motet.errors import ServiceError
from motet.service.schemas import Job, JobEvent
from motet.types import JobState

__all__ = ["DEFAULT_URL", "AsyncClient", "Client", "Rollouts"]

P = ParamSpec("P")
T = TypeVar("T")


def _as_method(call: Callable[..., Any]) -> inspect.Signature:
    """What `help` shows of a method that asks this."""
    found = inspect.signature(call)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(found.return_annotation).removeprefix("Call[").removesuffix("]")
    return found.replace(parameters=[own, *found.parameters.values()], return_annotation=answer)


def _now(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method that asks and waits."""

    @functools.wraps(call)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._ask(call(*args, **kwargs))

    method.__signature__ = _as_method(call)  # type: ignore[attr-defined]
    return method


def _later(call: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method that asks and is awaited."""

    @functools.wraps(call)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._ask(call(*args, **kwargs))

    method.__signature__ = _as_method(call)  # type: ignore[attr-defined]
    return method


class Client(Connection):
    """A service, asked one thing after another."""

    submit = _now(Calls.submit)
    job = _now(Calls.job)
    pause = _now(Calls.pause)
    resume = _now(Calls.resume)
    cancel = _now(Calls.cancel)
    delete = _now(Calls.delete)
    rollouts = _now(Calls.rollouts)
    versions = _now(Calls.versions)
    upload = _now(Calls.upload)
    files = _now(Calls.files)
    delete_file = _now(Calls.delete_file)
    models = _now(Calls.models)
    create_key = _now(Calls.create_key)
    keys = _now(Calls.keys)
    revoke_key = _now(Calls.revoke_key)
    health = _now(Calls.health)

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        super().__init__(url, key)
        self._http = httpx2.Client(**self.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def jobs(self, state: str | None = None) -> Iterator[Job]:
        """Jobs, newest first: all, or those in a state."""
        after: str | None = None
        while True:
            page = self._ask(calls.page(state, after))
            yield from page.data
            if (after := page.next) is None:
                return

    def pull(self, job: str, version: str | int = "best", directory: str | Path = ".") -> Path:
        """Take a version (a number, `best` or `latest`) home: the PEFT directory `directory/<job>-v<version>`."""
        return self._ask(calls.download(job, version, directory))

    def events(self, job: str, after: int = 0, *, follow: bool = False) -> Iterator[JobEvent]:
        """What happened to a job after an event, in order.

        Args:
            job: its id or name.
            after: the id of the last event that is known.
            follow: go on with what happens from now on, until the job has ended; a lost connection is taken up again.
        """
        if follow:
            yield from self._follow(job, after)
            return
        while page := self._ask(calls.events(job, after)):
            yield from page
            after = page[-1].id

    def _follow(self, job: str, after: int) -> Iterator[JobEvent]:
        following = Following(job, after)
        while True:
            lost: ServiceError | None = None
            try:
                with told(self.url), self._http.stream(**following.request) as response:
                    if not response.is_success:
                        response.read()
                        raise calls.refusal(response)
                    for line in response.iter_lines():
                        if (event := following.read(line)) is not None:
                            yield event
                        elif line.startswith(":") and _ended(self.job(job)):  # the stream has nothing more to tell
                            break
                if _ended(self.job(job)):
                    yield from self.events(job, following.after)
                    return
            except ServiceError as error:
                lost = error
            time.sleep(following.wait(lost))

    def _ask(self, call: Call[T]) -> T:
        with told(self.url), call.request() as request:
            response = self._http.request(**request)
        return call.answer(response)


class AsyncClient(Connection):
    """A service, asked many things at a time. The methods are those of `Client`."""

    submit = _later(Calls.submit)
    job = _later(Calls.job)
    pause = _later(Calls.pause)
    resume = _later(Calls.resume)
    cancel = _later(Calls.cancel)
    delete = _later(Calls.delete)
    rollouts = _later(Calls.rollouts)
    versions = _later(Calls.versions)
    upload = _later(Calls.upload)
    files = _later(Calls.files)
    delete_file = _later(Calls.delete_file)
    models = _later(Calls.models)
    create_key = _later(Calls.create_key)
    keys = _later(Calls.keys)
    revoke_key = _later(Calls.revoke_key)
    health = _later(Calls.health)

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        super().__init__(url, key)
        self._http = httpx2.AsyncClient(**self.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def jobs(self, state: str | None = None) -> AsyncGenerator[Job, None]:
        """Jobs, newest first: all, or those in a state."""
        after: str | None = None
        while True:
            page = await self._ask(calls.page(state, after))
            for job in page.data:
                yield job
            if (after := page.next) is None:
                return

    async def pull(self, job: str, version: str | int = "best", directory: str | Path = ".") -> Path:
        """Take a version (a number, `best` or `latest`) home: the PEFT directory `directory/<job>-v<version>`."""
        return await self._ask(calls.download(job, version, directory))

    async def events(self, job: str, after: int = 0, *, follow: bool = False) -> AsyncGenerator[JobEvent, None]:
        """What happened to a job after an event, in order.

        Args:
            job: its id or name.
            after: the id of the last event that is known.
            follow: go on with what happens from now on, until the job has ended; a lost connection is taken up again.
        """
        if follow:
            async for event in self._follow(job, after):
                yield event
            return
        while page := await self._ask(calls.events(job, after)):
            for event in page:
                yield event
            after = page[-1].id

    async def _follow(self, job: str, after: int) -> AsyncGenerator[JobEvent, None]:
        following = Following(job, after)
        while True:
            lost: ServiceError | None = None
            try:
                with told(self.url):
                    async with self._http.stream(**following.request) as response:
                        if not response.is_success:
                            await response.aread()
                            raise calls.refusal(response)
                        async for line in response.aiter_lines():
                            if (event := following.read(line)) is not None:
                                yield event
                            elif line.startswith(":") and _ended(await self.job(job)):  # nothing more to tell
                                break
                if _ended(await self.job(job)):
                    async for event in self.events(job, following.after):
                        yield event
                    return
            except ServiceError as error:
                lost = error
            await asyncio.sleep(following.wait(lost))

    async def _ask(self, call: Call[T]) -> T:
        with told(self.url), call.request() as request:
            response = await self._http.request(**request)
        return await asyncio.to_thread(call.answer, response)  # a large adapter is unpacked there


def _ended(job: Job) -> bool:
    return JobState(job.state).final
