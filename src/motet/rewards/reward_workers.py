"""The processes that score one job's rewards: starts them, gives calls to free ones, and replaces lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.data.reasoning import ScorerSpec
from motet.rewards import reward_messages as m
from motet.workers.worker_link import LOAD_SECONDS, ProcessDiedError, WorkerLink, WorkerSlot, import_path

AT_ONCE = 16
"""Most calls at once of rewards that wait rather than compute; each has a process of its own."""


def load_request(
    rewards: Sequence[RewardConfig], scorer: ScorerSpec | None, walled: bool, columns: Sequence[str] | None = None
) -> m.LoadRewards:
    """The first message to a process, with this one's import path; RewardError if a function or its args cannot be sent."""
    try:
        json.dumps([reward.args for reward in rewards])
    except (TypeError, ValueError) as error:
        raise RewardError(f"args of a reward must be JSON values (text, numbers, lists, mappings): {error}") from error
    sources = [m.RewardSource(reward.name, reward.args, _pickled(reward), reward.code) for reward in rewards]
    memory, known = max(reward.memory_mb for reward in rewards), None if columns is None else list(columns)
    return m.LoadRewards(sources, scorer, memory, known, import_path=import_path(), walled=walled)


def _pickled(reward: RewardConfig) -> bytes | None:
    if reward.function is None:
        return None
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(reward.function)
    except Exception as error:  # pickling may raise any exception, depending on the values in the function
        raise RewardError(
            f"the function of reward {reward.name!r} cannot be sent to its process: {error}. Open files, locks "
            "and clients inside the function, or put it in a file and name it `file.py:function`"
        ) from error
    return pickled


@dataclass(eq=False)
class WorkerGroup:
    """Processes of one job, all behind a wall or none of them."""

    request: m.LoadRewards
    log: Path | None
    rewards: Mapping[int, RewardConfig]
    """Positions of the rewards in the job, in the order in which the process loads them."""
    may_start_another: Callable[[], bool] = lambda: False
    """Whether another process may be started."""
    most_waiting: Callable[[], int] = lambda: AT_ONCE
    """Most processes if the rewards wait rather than compute."""
    charge: Callable[[float], None] = lambda _: None
    """Called with the CPU seconds that the processes use."""
    loaded: m.RewardsLoaded = field(default_factory=lambda: m.RewardsLoaded((), ()))
    workers: list[WorkerSlot] = field(default_factory=list)
    closed: bool = False
    waits: bool = False
    seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Seconds of all calls so far: for one answer, and for all answers of a problem."""
    _idle: list[WorkerSlot] = field(default_factory=list)
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Counts the idle workers; the call that has waited longest gets the next."""

    async def open(self) -> None:
        """Load the rewards in a first process."""
        self.workers.append(WorkerSlot())
        link = self.workers[0].link = await self._start()
        assert isinstance(link.loaded, m.RewardsLoaded)
        self.loaded = link.loaded
        self.give_back(self.workers[0])
        if self.loaded.waits and not self.request.of_others:
            self.wait_together()

    @contextlib.contextmanager
    def timed(self, together: bool) -> Iterator[None]:
        """Count the seconds of a call, without those in which its process started."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[together] += time.monotonic() - started

    def wait_together(self) -> None:
        """Let more calls wait at once. Each process still has one, so that limits and random numbers stay its own."""
        if not self.waits and not self.closed:
            self.waits = True
            for _ in range(len(self.workers), self.most_waiting()):
                self.workers.append(WorkerSlot())
                self.give_back(self.workers[-1])

    async def close(self) -> None:
        """End the processes; calls in flight come back as failed."""
        self.closed = True
        for worker in self.workers:
            if worker.link is not None:
                await worker.link.kill()

    def source(self) -> m.RewardSource | None:
        """The reward, if it goes with each call; None if the processes have loaded it."""
        return None

    def pieces(self, request: m.ScoreCompletions) -> Iterable[m.ScoreCompletions]:
        """The calls for a request."""
        return [request]

    async def ask(self, worker: WorkerSlot, reward: RewardConfig, request: m.ScoreCompletions) -> m.Scores:
        """A reply equal to that of a fresh process. Raises as `WorkerSlot.ask`."""
        source, n = self.source(), len(request.completions)
        most = reward.cpu_seconds * n
        request = structs.replace(request, cpu_seconds=most if source is None else reward.cpu_seconds, source=source)
        seconds = reward.wall_seconds * (n if source is None else min(n, 1)) or LOAD_SECONDS

        async def call(link: WorkerLink) -> m.Scores:
            link.charge = self.charge
            with self.timed(source is None and self.loaded.together[request.reward]):
                scores: m.Scores = await link.call(request, seconds, most)
                return scores

        reply: m.Scores = await worker.ask(self.start, call, lambda link: not link.answered)
        return reply

    def index(self, reward: int) -> int:
        """The position of a reward in the process."""
        return list(self.rewards).index(reward)

    async def start(self) -> WorkerLink:
        """A new process. Raises ProcessDiedError if the job has ended or the rewards no longer load, and as `call`."""
        try:
            link = None if self.closed else await self._start()
        except RewardError as error:
            raise ProcessDiedError(f"could not be loaded again: {error}") from error
        if link is not None and not self.closed:
            return link
        if link is not None:  # the job ended while the process started
            await link.kill()
        raise ProcessDiedError("was not called: its job has ended")

    async def _start(self) -> WorkerLink:
        return await WorkerLink.start(m.REWARD_CALLS, self.request, self.log, charge=self.charge)

    async def take(self) -> WorkerSlot:
        """A free worker: a new one if another may be started, otherwise the next that becomes free."""
        if self._free.locked() and self.may_start_another():
            self.workers.append(WorkerSlot())
            return self.workers[-1]
        await self._free.acquire()
        return self._idle.pop()

    def give_back(self, worker: WorkerSlot) -> None:
        """Give a worker to the call that has waited longest; one that has a process is taken before others."""
        self._idle.insert(0 if worker.link is None else len(self._idle), worker)
        self._free.release()
