"""The client that waits for each answer."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

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


def _now(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method that asks and waits."""

    @functools.wraps(call)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._ask(call(*args, **kwargs))

    method.__signature__ = as_method(call)  # type: ignore[attr-defined]
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
    steps = _now(Calls.steps)
    check = _now(Calls.check)
    versions = _now(Calls.versions)
    upload = _now(Calls.upload)
    files = _now(Calls.files)
    delete_file = _now(Calls.delete_file)
    push = _now(AdapterCalls.push)
    adapters = _now(AdapterCalls.adapters)
    adapter = _now(AdapterCalls.adapter)
    delete_adapter = _now(AdapterCalls.delete_adapter)
    share = _now(AdapterCalls.share)
    shares = _now(AdapterCalls.shares)
    unshare = _now(AdapterCalls.unshare)
    models = _now(Calls.models)
    rewards = _now(Calls.rewards)
    create_key = _now(Calls.create_key)
    keys = _now(Calls.keys)
    revoke_key = _now(Calls.revoke_key)
    health = _now(Calls.health)
    change = _now(UsageCalls.change)
    usage = _now(UsageCalls.usage)
    usage_csv = _now(UsageCalls.usage_csv)
    limits = _now(UsageCalls.limits)
    tenants = _now(UsageCalls.tenants)
    set_limits = _now(UsageCalls.set_limits)

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

    def audit(self, tenant: str | None = None) -> Iterator[AuditEntry]:
        """Who changed what, newest first: all, or what one tenant did; needs an admin's key."""
        after: str | None = None
        while True:
            page = self._ask(audit_page(tenant, after, calls.PAGE))
            yield from page.data
            if (after := page.next) is None:
                return

    def pull(self, job: str, version: str | int | None = None, directory: str | Path = ".") -> Path:
        """Take an adapter home as a PEFT directory below `directory`.

        Args:
            job: a job, an uploaded adapter, or what another tenant shares: `tenant/job`.
            version: of a job: a number, `best` or `latest`; the best unless given.
            directory: where the new directory is put: `<job>-v<version>`, or the name of an uploaded adapter.
        """
        return self._ask(download(job, version, directory))

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

    def score(self, *jobs: str, reward: RewardGiven | Sequence[RewardGiven], processes: int = 2) -> None:
        """Be the reward worker of jobs until they have ended; see `AsyncClient.score`."""
        key = self.options["headers"].get("Authorization", "").removeprefix("Bearer ")

        async def work() -> None:
            from motet.client.awaited import AsyncClient

            async with AsyncClient(self.url, key) as client:
                await client.score(*jobs, reward=reward, processes=processes)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(work())
            return
        with ThreadPoolExecutor(1) as thread:  # a notebook, whose thread has a loop of its own already
            thread.submit(asyncio.run, work()).result()

    def chat(
        self, model: str, messages: Sequence[Mapping[str, str]], **sampling: float | str | list[str]
    ) -> Iterator[str]:
        """Pieces of an answer to a conversation, as they come.

        Args:
            model: `job@version`, an adapter's name, or the base's.
            messages: turns with `role` and `content`.
            sampling: fields of the route for chat completions: temperature, max_tokens, top_p, seed, stop.
        """
        with told(self.url), self._http.stream(**chat_request(model, messages, sampling)) as response:
            if not response.is_success:
                response.read()
                raise calls.refusal(response)
            for line in response.iter_lines():
                yield piece(line)

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
                        elif line.startswith(":") and ended(self.job(job)):  # the stream has nothing more to tell
                            break
                if ended(self.job(job)):
                    yield from self.events(job, following.after)
                    return
            except ServiceError as error:
                lost = error
            time.sleep(following.wait(lost))

    def _ask(self, call: Call[T]) -> T:
        for attempt in itertools.count():
            with told(self.url), call.request() as request:
                response = self._http.request(**request)
            if (seconds := to_wait(response, attempt)) is None:
                break
            time.sleep(seconds)
        return call.answer(response)
