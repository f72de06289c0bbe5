"""The engine as whoever has jobs for it sees it: one host or several, and which of them has which job.

One host has a job at a time. A job leaves its host when that dies, or when it is asked to let the job go: then it finishes the
step, commits and forgets the job. In both cases another host goes on from the last commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet.cluster import messages as m
from motet.cluster.host import Engine, EngineHandlers, Host, Launch
from motet.cluster.placement import HostLoad, moved, placed, speeds
from motet.cluster.shares import EVEN_SECONDS, ClusterShares
from motet.errors import EngineError, HostGone
from motet.runtime.slots import FREE, Claim, Rule
from motet.types import JobState

_log = logging.getLogger(__name__)
_GATHER_SECONDS = 60.0
"""Seconds that jobs wait for the last host to be ready when the first one is."""
_RETRY_SECONDS = 2.0
_OPEN = (JobState.QUEUED, JobState.RUNNING)


@dataclass
class _Placed:
    """A job that a host has."""

    claim: Claim
    host: Host
    state: JobState = JobState.QUEUED
    to: Host | None = None
    """For which host it was asked to let it go."""


class EngineClient:
    """Starts hosts, gives them jobs and questions, and receives what becomes of them."""

    def __init__(self, starts: Sequence[m.Start], directory: Path, launch: Launch | None = None) -> None:
        """`starts` has the first message of each host. Host N writes to `engine-N.log`, the first one to `engine.log`.

        `launch` starts their processes: on this machine unless it is given.
        """
        # of its own: what others wait for in threads, a slow disk or a slow name, does not keep the engine waiting
        self._handling = ThreadPoolExecutor(1, "motet-events")
        logs = [directory / (f"engine-{number}.log" if number else "engine.log") for number in range(len(starts))]
        self.hosts = [
            Host(number, start, log, self._handling, launch)
            for number, (start, log) in enumerate(zip(starts, logs, strict=True))
        ]
        self._handlers: EngineHandlers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._placed: dict[str, _Placed] = {}
        self._rules: dict[str, Rule] = {}
        self._asked: set[str] = set()
        """Jobs of which something was asked while no host had them."""
        self._unplaced = True
        """Whether there may be jobs that no host has."""
        self._look = asyncio.Event()
        self._settled = len(starts) == 1
        """Whether jobs are given out: not before all hosts are there, or too late."""
        self.ready = asyncio.Event()

    @property
    def failure(self) -> str:
        """Why there is no engine, for a person."""
        return "" if self.ready.is_set() else next((host.failure for host in self.hosts if host.failure), "")

    @property
    def progress(self) -> dict[str, dict[str, Any]]:
        """How running jobs stand, by id; where there are several hosts, also on which."""
        if len(self.hosts) == 1:
            return self.hosts[0].progress
        return {job: {**now, "host": host.number} for host in self.hosts for job, now in host.progress.items()}

    def jobs_on(self, host: Host) -> int:
        """How many jobs a host has."""
        return sum(job.host is host for job in list(self._placed.values()))

    def adopt(self, engine: Engine) -> None:
        """Have a process that was started already (`start_engine`) as the first host's; before `start`."""
        self.hosts[0].adopt(engine)

    def start(self, handlers: EngineHandlers) -> None:
        """Start the hosts and keep them running."""
        self._handlers, self._loop = handlers, asyncio.get_running_loop()
        for host in self.hosts:
            host.start(handlers, self._hear)
        self._tasks = [asyncio.create_task(self._keep_placed(handlers)), asyncio.create_task(self._share())]

    async def stop(self) -> None:
        """Let every job finish its step and save, then end the processes."""
        self._end_tasks()
        await asyncio.gather(*(host.stop() for host in self.hosts))
        self._handling.shutdown(wait=False)

    async def kill(self) -> None:
        """End the processes at once, where `stop` has not; what was committed stays."""
        self._end_tasks()
        await asyncio.gather(*(host.kill() for host in self.hosts))

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def refuse(self, reason: str) -> None:
        """Give up the questions that are open."""
        for host in self.hosts:
            host.refuse(reason)

    async def ask(self, question: m.Question) -> AsyncIterator[m.Answer]:
        """What answers a question, until it is done. Any host can: stored versions are files.

        Raises:
            HostGone: no host is there, or the one that answered went away meanwhile.
            EngineError: it cannot be answered now, and why.
            ConfigError: it can never be answered, and why.
        """
        ready = [host for host in self.hosts if host.ready]
        if not self.ready.is_set() or not ready:
            raise HostGone(self.failure)
        host = min(ready, key=lambda host: (host.asked, host.number))
        async with contextlib.aclosing(host.ask(question)) as answers:
            async for answer in answers:
                yield answer

    def send(self, *messages: m.ToEngine) -> None:
        """Send messages, from any thread, each to the host that it is for; what no host has yet goes out with `open_jobs`."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._route, *messages)

    # --- in the event loop ----------------------------------------------------------------------------------------------

    def _route(self, *messages: m.ToEngine) -> None:
        for message in messages:
            match message:
                case m.AddJob():
                    self._place(message, self._loads())
                case m.SetRule():
                    self._rules[message.tenant], self._unplaced = message.rule, True
                    self._to_all(message)
                case m.ForgetJob():
                    self._placed.pop(message.job, None)
                    self._to_all(message)
                case m.Nudge():  # the journal has it for whichever host takes the job up
                    if message.job in self._placed:
                        self._placed[message.job].host.send(message)
                case m.SteerJob() | m.ChangeJob():
                    self._pass_on(message)
                case _:
                    raise EngineError(f"{type(message).__name__} is for no job")

    def _to_all(self, message: m.ToEngine) -> None:
        for host in self.hosts:
            host.send(message)
        self._look.set()

    def _pass_on(self, message: m.SteerJob | m.ChangeJob) -> None:
        """To the host that has the job; one that no host has, or that moves, is looked up again before it goes out."""
        job = self._placed.get(message.job)
        if job is None:
            self._asked.add(message.job)
            self._unplaced = True
            self._look.set()
        elif isinstance(message, m.SteerJob) and message.action == "resume" and self._has_to_wait(job):
            self._route(m.ForgetJob(message.job))
            self._unplaced = True
        elif not (job.to is not None and isinstance(message, m.SteerJob) and message.action != "cancel"):
            job.host.send(message)

    def _has_to_wait(self, job: _Placed) -> bool:
        """Whether a paused job cannot go on, because its tenant has as many out as may run."""
        return job.state is JobState.PAUSED and placed(job.claim, list(self._loads().values()), self._rules) is None

    def _hear(self, host: Host, message: m.Ready | m.Failed | m.JobEvent | m.Released | None) -> None:
        match message:
            case None:
                for name in [name for name, job in self._placed.items() if job.host is host]:
                    del self._placed[name]
                if not any(one.ready for one in self.hosts):
                    self.ready.clear()
                self._unplaced = True
            case m.Ready():
                self._unplaced = True
            case m.JobEvent(kind="state"):
                self._moved_on(host, message)
            case m.Released():
                if (job := self._placed.get(message.job)) is not None and job.host is host:
                    del self._placed[message.job]
                    self._unplaced = True
            case m.JobEvent():
                return
        self._look.set()

    def _moved_on(self, host: Host, event: m.JobEvent) -> None:
        job, state = self._placed.get(event.job), JobState(event.data["state"])
        if job is not None and job.host is host:
            job.state = state
            if state.final:
                del self._placed[event.job]

    async def _share(self) -> None:
        """Let tenants have their shares over all hosts, not on each alone."""
        account, shared = ClusterShares(), False
        while len(self.hosts) > 1:
            await asyncio.sleep(EVEN_SECONDS)
            there = {job.claim.tenant for job in self._placed.values() if job.state in _OPEN}
            used = {host.number: host.used for host in self.hosts if host.ready}
            factors = account.look(used, there, {tenant: rule.share for tenant, rule in self._rules.items()})
            for host in self.hosts if len(factors) > 1 or shared else ():
                host.send(m.EvenOut(factors))
            shared = len(factors) > 1

    # --- which host has which job -----------------------------------------------------------------------------------------

    async def _keep_placed(self, handlers: EngineHandlers) -> None:
        """Give jobs that no host has to hosts, and even them out, whenever something has changed."""
        await self._all_there()
        while True:
            await self._look.wait()
            self._look.clear()
            try:
                await self._place_open(handlers)
            except Exception:  # the database is away
                _log.exception("the jobs that wait for a host could not be read")
                await asyncio.sleep(_RETRY_SECONDS)
                self._unplaced = True
                self._look.set()

    async def _all_there(self) -> None:
        """Wait for the hosts that start: jobs that are given to the first one alone would have to move."""
        deadline = None
        while not self._settled:
            await self._look.wait()
            self._look.clear()
            now = asyncio.get_running_loop().time()
            if deadline is None and any(host.ready for host in self.hosts):
                deadline = now + _GATHER_SECONDS
                asyncio.get_running_loop().call_at(deadline, self._look.set)
            starting = [host for host in self.hosts if not (host.ready or host.failure or host.starts > 1)]
            self._settled = deadline is not None and (not starting or now >= deadline)
        self._look.set()

    async def _place_open(self, handlers: EngineHandlers) -> None:
        if not any(host.ready for host in self.hosts):
            return
        if self._unplaced:
            self._asked.clear()
            self._unplaced = False
            messages = await asyncio.get_running_loop().run_in_executor(self._handling, handlers.open_jobs)
            loads = self._loads()  # hosts came and went meanwhile
            for message in messages:
                if str(message.job["name"]) not in self._asked:  # else what was read may be old: it is read again
                    self._place(message, loads)
        if any(host.ready for host in self.hosts):
            self.ready.set()
        self._even_out()

    def _place(self, message: m.AddJob, loads: dict[int, HostLoad]) -> None:
        """Give a job to a host, unless one has it or none can take it, and count it in the loads."""
        name, rules = str(message.job["name"]), self._rules
        rules[message.tenant] = message.rule
        if name in self._placed or not self._settled:
            return
        claim, runs = Claim(name, message.tenant, slots=message.slots), message.wanted == "run"
        number = placed(claim, list(loads.values()), rules if runs else {})
        if number is None:
            self._unplaced = True
            return
        host = self.hosts[number]
        if runs:
            loads[number] = replace(loads[number], waiting=(*loads[number].waiting, claim))
        self._placed[name] = _Placed(claim, host, JobState.QUEUED if runs else JobState.PAUSED)
        host.send(message)

    def _even_out(self) -> None:
        """Ask hosts to let jobs go until all are as even as they can be once those have moved."""
        while (move := moved(list(self._loads().values()))) is not None:
            self._placed[move.job].to = self.hosts[move.to]
            self._placed[move.job].host.send(m.ReleaseJob(move.job))

    def _loads(self) -> dict[int, HostLoad]:
        return _loads([host for host in self.hosts if host.ready], self._placed.values(), self._rules)


def _loads(hosts: Sequence[Host], jobs: Iterable[_Placed], rules: Mapping[str, Rule]) -> dict[int, HostLoad]:
    """Of the hosts that are there; jobs that are paused, and not by a rule that is lifted by itself, want no slot."""
    running, waiting, coming = ({host.number: list[Claim]() for host in hosts} for _ in range(3))
    for job in jobs:
        held = job.state is JobState.PAUSED and rules.get(job.claim.tenant, FREE).hold
        if job.to is not None:
            whose, there = coming, job.to if job.to.ready else job.host
        else:
            whose, there = running if job.state is JobState.RUNNING else waiting, job.host
        if there.ready and (job.to is not None or held or job.state in (JobState.RUNNING, JobState.QUEUED)):
            whose[there.number].append(job.claim)
    fast = speeds({host.number: host.speed for host in hosts})
    return {
        n: HostLoad(n, host.slots, tuple(running[n]), tuple(waiting[n]), tuple(coming[n]), fast[n])
        for n, host in ((host.number, host) for host in hosts)
    }
