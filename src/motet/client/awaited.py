"""The client whose methods are awaited."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx2

from motet.client import calls
from motet.client.adapter_calls import AdapterCalls, audit_page, download
from motet.client.calls import Call, Calls
from motet.client.connection import Connection, Following, to_wait, told
from motet.client.methods import as_method, ended
from motet.client.talking import chat_request, piece
from motet.client.usage_calls import UsageCalls
from motet.errors import ServiceError
from motet.service.schemas import AuditEntry, Job, JobEvent

if TYPE_CHECKING:
    from motet.client.reward_files import RewardGiven

P = ParamSpec("P")
T = TypeVar("T")


def _later(call: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method that asks and is awaited."""

    @functools.wraps(call)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._ask(call(*args, **kwargs))

    method.__signature__ = as_method(call)  # type: ignore[attr-defined]
    return method


class AsyncClient(Connection):
    """A service, asked many things at a time. The methods are those of `Client`."""

    submit = _later(Calls.submit)
    job = _later(Calls.job)
    pause = _later(Calls.pause)
    resume = _later(Calls.resume)
    cancel = _later(Calls.cancel)
    delete = _later(Calls.delete)
    rollouts = _later(Calls.rollouts)
    steps = _later(Calls.steps)
    check = _later(Calls.check)
    versions = _later(Calls.versions)
    upload = _later(Calls.upload)
    files = _later(Calls.files)
    delete_file = _later(Calls.delete_file)
    push = _later(AdapterCalls.push)
    adapters = _later(AdapterCalls.adapters)
    adapter = _later(AdapterCalls.adapter)
    delete_adapter = _later(AdapterCalls.delete_adapter)
    share = _later(AdapterCalls.share)
    shares = _later(AdapterCalls.shares)
    unshare = _later(AdapterCalls.unshare)
    models = _later(Calls.models)
    rewards = _later(Calls.rewards)
    create_key = _later(Calls.create_key)
    keys = _later(Calls.keys)
    revoke_key = _later(Calls.revoke_key)
    health = _later(Calls.health)
    change = _later(UsageCalls.change)
    usage = _later(UsageCalls.usage)
    usage_csv = _later(UsageCalls.usage_csv)
    limits = _later(UsageCalls.limits)
    tenants = _later(UsageCalls.tenants)
    set_limits = _later(UsageCalls.set_limits)

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

    async def audit(self, tenant: str | None = None) -> AsyncGenerator[AuditEntry, None]:
        """Who changed what, newest first: all, or what one tenant did; needs an admin's key."""
        after: str | None = None
        while True:
            page = await self._ask(audit_page(tenant, after, calls.PAGE))
            for entry in page.data:
                yield entry
            if (after := page.next) is None:
                return

    async def pull(self, job: str, version: str | int | None = None, directory: str | Path = ".") -> Path:
        """Take an adapter home as a PEFT directory below `directory`.

        Args:
            job: a job, an uploaded adapter, or what another tenant shares: `tenant/job`.
            version: of a job: a number, `best` or `latest`; the best unless given.
            directory: where the new directory is put: `<job>-v<version>`, or the name of an uploaded adapter.
        """
        return await self._ask(download(job, version, directory))

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

    async def score(self, *jobs: str, reward: RewardGiven | Sequence[RewardGiven], processes: int = 2) -> None:
        """Be the reward worker of jobs until they have ended: take their rollouts, score them here, hand the scores in.

        Args:
            jobs: ids or names of jobs with `reward: worker`.
            reward: the function, or the files with the functions that the jobs name: `rewards.py`, `rewards.py:reward`.
            processes: how many score at a time.

        Raises:
            RewardError: the reward does not load, or a job asks for one that is not there.
            ServiceError: the service refuses, or was away for ten minutes.
        """
        from motet.client.reward_files import RewardFiles
        from motet.client.scoring import RewardWorker

        await RewardWorker(self, RewardFiles(reward), processes).run(jobs)

    async def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], **sampling: float | str | list[str]
    ) -> AsyncGenerator[str, None]:
        """Pieces of an answer to a conversation, as they come; see `Client.chat`."""
        with told(self.url):
            async with self._http.stream(**chat_request(model, messages, sampling)) as response:
                if not response.is_success:
                    await response.aread()
                    raise calls.refusal(response)
                async for line in response.aiter_lines():
                    yield piece(line)

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
                            elif line.startswith(":") and ended(await self.job(job)):  # nothing more to tell
                                break
                if ended(await self.job(job)):
                    async for event in self.events(job, following.after):
                        yield event
                    return
            except ServiceError as error:
                lost = error
            await asyncio.sleep(following.wait(lost))

    async def _ask(self, call: Call[T]) -> T:
        for attempt in itertools.count():
            with told(self.url), call.request() as request:
                response = await self._http.request(**request)
            if (seconds := to_wait(response, attempt)) is None:
                break
            await asyncio.sleep(seconds)
        return await asyncio.to_thread(call.answer, response)  # a large adapter is unpacked there
