"""All hosts of a service or run, and the assignment of jobs to them.

A job is on one host at a time. It leaves a host that dies, or that is told to release it after a step and a commit. In
both cases another host continues from the last commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from motet.core.errors import EngineError, HostGone
from motet.core.types import Wanted
from motet.hosts import messages as m
from motet.hosts.assignments import Assignments
from motet.hosts.charged import Charged
from motet.hosts.host_link import HostHandlers, HostLink, Launch, OfHost
from motet.hosts.placement import HostLoad
from motet.runtime.slots import Claim

_log = logging.getLogger(__name__)
GATHER_SECONDS = 60.0
"""Seconds to wait for the last host after the first is ready, or after its last message."""
_RETRY_SECONDS = 2.0
LOOK_SECONDS = 60.0
"""Between two readings of the open jobs while nothing changes: the database may have been away at the last."""


class Hosts:
    """Starts hosts, sends them jobs and questions, and receives their events."""

    def __init__(
        self, starts: Sequence[m.StartHost], directory: Path, launch: Launch | None = None, look: float = LOOK_SECONDS
    ) -> None:
        """`starts` has each host's first message; `launch` starts their processes, by default on this machine."""
        # a separate pool: blocking calls of others must not delay the engine
        self._handling = ThreadPoolExecutor(1, "motet-events")
        logs = [directory / (f"engine-{number}.log" if number else "engine.log") for number in range(len(starts))]
        self.hosts = [
            HostLink(number, start, log, self._handling, launch)
            for number, (start, log) in enumerate(zip(starts, logs, strict=True))
        ]
        self._handlers: HostHandlers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.jobs = Assignments(self.hosts)
        self._asked: set[str] = set()
        """Jobs with new requests or an end since the last reading, whose result may be outdated."""
        self._unplaced = True
        """Whether there may be unassigned jobs that have not been checked since a change."""
        self._look, self._look_seconds, self.gather_seconds = asyncio.Event(), look, GATHER_SECONDS
        self.there = {host.base: asyncio.Event() for host in self.hosts}
        """Whether a host of a base takes questions and jobs, by the base's name."""

    @property
    def ready(self) -> bool:
        """Whether a host of any base takes questions and jobs."""
        return any(there.is_set() for there in self.there.values())

    @property
    def failure(self) -> str:
        """Why there is no engine, for a person."""
        return "" if self.ready else next(filter(None, map(self.failure_of, self.there)), "")

    def failure_of(self, base: str) -> str:
        """Why there is no host of a base, for a person; empty where there is one, or where one starts."""
        failures = (host.failure or host.away for host in self.hosts if host.base == base)
        return "" if self.there[base].is_set() else next(filter(None, failures), "")

    @property
    def progress(self) -> dict[str, m.JobStanding]:
        """Progress of running jobs by id; with several hosts, also the host."""
        if len(self.hosts) == 1:
            return self.hosts[0].progress
        return {job: replace(now, host=host.number) for host in self.hosts for job, now in host.progress.items()}

    def has(self, job: str) -> bool:
        """Whether a host has a job. From any thread; where it lets the job go meanwhile, open jobs are read again."""
        return self.jobs.get(job) is not None

    def look(self, claim: Claim | None = None) -> None:
        """Read the open jobs again: there are others, or, as soon as a host takes it, one with a claim. From any thread."""
        if self._loop is not None:  # else all are read at the start
            self._loop.call_soon_threadsafe(self._note, claim)

    def _note(self, claim: Claim | None) -> None:
        self._unplaced = self._unplaced or claim is None
        self.jobs.refused.update([] if claim is None else [(claim, True)])
        self._look.set()

    def take_back(self, job: str) -> bool:
        """Whether no host has a job, also none of the service before; then none is given it before open jobs are read again."""
        if self._loop is None:
            return not self.has(job)
        return asyncio.run_coroutine_threadsafe(self._taken_back(job), self._loop).result()

    async def _taken_back(self, job: str) -> bool:
        self._asked.add(job)
        return all(host.ready or host.failure or host.starts > 1 for host in self.hosts) and not self.has(job)

    def start(self, handlers: HostHandlers) -> None:
        """Start the hosts and keep them running."""
        self._handlers, self._loop = handlers, asyncio.get_running_loop()
        for host in self.hosts:
            host.start(handlers, self._hear)
        self._tasks = [asyncio.create_task(self._keep_placed(handlers))]

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(host.stop() for host in self.hosts))
        self._handling.shutdown(wait=False)

    async def kill(self) -> None:
        """Kill the processes that `stop` has not ended; commits stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(host.kill() for host in self.hosts))

    def refuse(self, reason: str) -> None:
        """Give up the questions that are open."""
        for host in self.hosts:
            host.refuse(reason)

    async def ask(
        self, question: m.Complete | m.ExamineAdapter, charged: Charged | None = None
    ) -> AsyncIterator[m.Answer]:
        """Yield the answers of any host of the base: stored versions are files. Raises as `HostLink.ask`."""
        base = question.base
        answering = self._answering(base)
        if not self.there[base].is_set() or not answering:
            raise HostGone(self.failure_of(base))
        host = min(answering, key=lambda host: (host.asked, host.number))
        async with contextlib.aclosing(host.ask(question, charged)) as answers:
            async for answer in answers:
                yield answer

    def _answering(self, base: str) -> list[HostLink]:
        return [host for host in self.hosts if host.ready and not host.away and host.base == base]

    def prepared(self) -> Counter[str]:
        """Bytes of the rows that all hosts have prepared, by tenant."""
        return sum((Counter(host.prepared) for host in self.hosts), Counter[str]())

    def send(self, *messages: m.ToHost) -> None:
        """Send messages to their hosts, from any thread; jobs without a host get theirs with `open_jobs`."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._route, *messages)

    # --- in the event loop ----------------------------------------------------------------------------------------------

    def _route(self, *messages: m.ToHost) -> None:
        for message in messages:
            match message:
                case m.SetRule():
                    self._unplaced = self.jobs.set_rule(message) or self._unplaced
                    self._to_all(message)
                case m.ForgetJob():
                    self.jobs.forget(message.job)
                    self._to_all(message)
                case m.Nudge() | m.ReleaseJob():  # the journal keeps the commands for the next host of the job
                    if (job := self.jobs.get(message.job)) is not None:
                        job.host.send(message)
                case m.SteerJob() | m.ChangeJob():
                    self._pass_on(message)
                case _:
                    raise EngineError(f"{type(message).__name__} is for no job")

    def _to_all(self, message: m.ToHost) -> None:
        for host in self.hosts:
            host.send(message)
        self._look.set()

    def _pass_on(self, message: m.SteerJob | m.ChangeJob) -> None:
        """To the host that has the job; one that no host has, or that moves, is looked up again before it goes out."""
        job = self.jobs.get(message.job)
        # also if a host has it, which may release it before the result of a reading is applied
        self._asked.add(message.job)
        if job is None:
            self._note(None)
        elif isinstance(message, m.SteerJob) and message.wanted is Wanted.RUN and self.jobs.has_to_wait(job):
            self._route(m.ForgetJob(message.job))
            self._unplaced = True
        elif not (job.to is not None and isinstance(message, m.SteerJob) and message.wanted is not Wanted.CANCEL):
            job.host.send(message)

    def _hear(self, host: HostLink, message: OfHost | None) -> None:
        if not self._answering(host.base):
            self.there[host.base].clear()
        match message:
            case None:
                self.jobs.forget_all_on(host)
                self._unplaced = True
            case m.HostReady():
                self.jobs.adopt(host, message.jobs)
                self._unplaced = True
            case m.JobChanged():
                self.jobs.moved_on(host, message)
                if message.state.final:
                    self._asked.add(message.job)
            case m.Released():
                self._unplaced = self.jobs.released(host, message.job) or self._unplaced
            case m.HostFailed(device=True) if self._handlers is not None:
                for failed in self.jobs.lost_device(host, message.reason):
                    self._handling.submit(self._handlers.keep, failed)
            case m.HostFailed(job=job) if job and self._handlers is not None:
                for failed in self.jobs.ended_engine(job, message.reason):
                    self._handling.submit(self._handlers.keep, failed)
            case m.JobStepped():
                return
        self._look.set()

    # --- which host has which job -----------------------------------------------------------------------------------------

    async def _keep_placed(self, handlers: HostHandlers) -> None:
        """Give jobs that no host has to hosts, and even them out, whenever something has changed, and now and then."""
        if len(self.hosts) > 1:
            await _gathered(self.hosts, self._look, self.gather_seconds)
        self._look.set()
        while True:
            try:
                async with asyncio.timeout(self._look_seconds):
                    await self._look.wait()
            except TimeoutError:
                self._unplaced = True
            self._look.clear()
            try:
                await self._place_open(handlers)
            except Exception:  # the database is away
                _log.exception("the jobs that wait for a host could not be read")
                await asyncio.sleep(_RETRY_SECONDS)
                self._note(None)

    async def _place_open(self, handlers: HostHandlers) -> None:
        if not any(host.ready for host in self.hosts):
            return
        for base, there in self.there.items():
            if self._answering(base):  # also while the database is away: questions can be answered
                there.set()
        if self.jobs.held:
            await self._reconcile(handlers)
        if self._unplaced or self.jobs.can_place_more():
            self._asked.clear()
            self._unplaced = False
            self.jobs.refused.clear()
            messages = await asyncio.get_running_loop().run_in_executor(self._handling, handlers.open_jobs)
            loads = self.jobs.loads()  # hosts came and went meanwhile
            placed = [self._place(one, loads) for one in messages if str(one.job["name"]) not in self._asked]
            if placed and all(placed):  # there may be more than were read
                self._note(None)
        for host, job in self.jobs.moves():
            host.send(m.ReleaseJob(job))

    async def _reconcile(self, handlers: HostHandlers) -> None:
        """Send requests made while a job's host was unknown; repeat them if they may be outdated."""
        self._asked.clear()
        held, loop = list(self.jobs.held.values()), asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._handling, handlers.reconcile, held)
        answered = {one.job for one in held} - self._asked
        self.jobs.held = {job: one for job, one in self.jobs.held.items() if job not in answered and self.has(job)}
        self._route(*(message for job in set(asked) - self._asked for message in asked[job]))
        self._look.set()

    def _place(self, message: m.AddJob, loads: dict[int, HostLoad]) -> bool:
        """Give a job to a host of its base, unless one has it or none can take it; gives whether one has it now."""
        if (host := self.jobs.place(message, loads)) is not None:
            host.send(message)
        return host is not None


def longest_sequence(hosts: Hosts, *bases: str) -> int:
    """Tokens of the longest sequence of any of these bases; 0 before all of them were ready once."""
    known = [max(host.told.positions for host in hosts.hosts if host.base == base) for base in bases]
    return max(known) if all(known) else 0


def longest_prompt(hosts: Hosts, base: str) -> int:
    """Tokens of the longest prompt with its answer; 0 before the base was ready once."""
    return max((host.told.room or host.told.positions for host in hosts.hosts if host.base == base), default=0)


def usual_step(hosts: Hosts, base: str) -> int:
    """The most tokens of a step by default on any host of a base; 0 before one knows."""
    known = (host.step_tokens for host in hosts.hosts if host.base == base)
    return min(filter(None, known), default=0)


def form_of(hosts: Hosts, base: str) -> tuple[str, str]:
    """The form in which a base writes thoughts and calls, and a note where it is not known; empty before a host was ready."""
    told = ((host.told.tool_format, host.told.base_note) for host in hosts.hosts if host.base == base)
    return next(filter(any, told), ("", ""))


async def _gathered(hosts: Sequence[HostLink], look: asyncio.Event, seconds: float) -> None:
    """Wait for all starting hosts: jobs given to the first one only would have to move.

    One that runs since an earlier process may send much before it reports its jobs; given to another, they would run twice.
    """
    first, loop = None, asyncio.get_running_loop()
    while True:
        await look.wait()
        look.clear()
        if first is None and any(host.ready for host in hosts):
            first = loop.time()
        starting = [host for host in hosts if not (host.ready or host.failure or host.starts > 1)]
        if first is None:
            continue
        deadline = max([first, *(host.heard_at for host in starting)]) + seconds
        if not starting or loop.time() >= deadline:
            return
        loop.call_at(deadline, look.set)
