"""Processes that run Motet's own rewards for all jobs: a reward comes with each call, so no job has a process for it.

A process takes one call at a time. A job has a few calls at once; where calls take long in all processes, another one is
started, so that nobody waits for another's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Problem
from motet.rewards import reward_messages as m
from motet.rewards.reward_walls import SANDBOXED
from motet.rewards.reward_workers import WorkerGroup
from motet.workers.worker_link import WorkerLink, WorkerSlot

_SLOW_SECONDS = 0.5
"""Time from which on a call takes long."""
_TOGETHER = 16
"""Most answers in one call."""
_LOADED = m.RewardsLoaded((True,), (False,), (False,), False, (False,), (False,))


@dataclass(eq=False, kw_only=True)
class SharedProcesses(WorkerGroup):
    """Processes that take calls of everybody."""

    kept: int
    """Number of processes that stay without work."""
    _began: dict[WorkerSlot, float] = field(default_factory=dict)
    _waiting: int = 0
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    async def take(self) -> WorkerSlot:
        """A free process. Adds another one if there are few, or if calls take long in all."""
        if self._free.locked() and len(self.workers) < self.kept:
            self._add()
        taking = asyncio.ensure_future(self._free.acquire())
        self._waiting += 1
        try:
            while not (await asyncio.wait([taking], timeout=_SLOW_SECONDS))[0]:
                before = time.monotonic() - _SLOW_SECONDS
                if all(worker.link and began < before for worker, began in self._began.items()):  # none still starts
                    self._add()
        except asyncio.CancelledError:
            if not taking.cancel():
                self._free.release()
            raise
        finally:
            self._waiting -= 1
        worker = self._idle.pop()
        self._began[worker] = time.monotonic()
        return worker

    def give_back(self, worker: WorkerSlot) -> None:
        """End a process too many."""
        self._began.pop(worker, None)
        if len(self._idle) < self.kept or self._waiting:
            super().give_back(worker)
        else:
            self.workers.remove(worker)
            self._ending.add(task := asyncio.create_task(worker.clear()))
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End the processes."""
        await super().close()
        await asyncio.gather(*self._ending)

    def _add(self) -> None:
        self.workers.append(WorkerSlot())
        super().give_back(self.workers[-1])


@dataclass(eq=False, kw_only=True)
class SharedGroup(WorkerGroup):
    """One reward of a job, which shared processes run."""

    reward: RewardConfig
    turn: asyncio.Semaphore
    """Of the job."""
    processes: SharedProcesses
    loaded: m.RewardsLoaded = _LOADED

    async def open(self) -> None:
        """Check the reward's arguments, in a process. Raises RewardError if they are wrong."""
        worker = await self.take()
        try:
            nothing = m.ScoreCompletions(0, Problem(0, (), ""), [], 0, self.reward.memory_mb)
            reply = await self.ask(worker, self.reward, nothing)
        finally:
            self.give_back(worker)
        if reply.refused:
            raise RewardError(reply.refused)

    async def close(self) -> None:
        """Do nothing: open calls end by themselves."""

    def source(self) -> m.RewardSource:
        """The reward, which goes with each call."""
        return m.RewardSource(self.reward.name, self.reward.args, None)

    def wait_together(self) -> None:
        """Do nothing: the processes are not the job's own."""

    def pieces(self, request: m.ScoreCompletions) -> list[m.ScoreCompletions]:
        """A few answers at once; those whose programs may run for long alone."""
        n = 1 if self.reward.name in SANDBOXED else _TOGETHER
        return [request.only(place, n) for place in range(0, len(request.completions), n)]

    async def start(self) -> WorkerLink:
        """As `WorkerGroup.start`; charged to nobody."""
        return await self.processes.start()

    async def take(self) -> WorkerSlot:
        """A free process, in the job's turn."""
        await self.turn.acquire()
        try:
            return await self.processes.take()
        except BaseException:
            self.turn.release()
            raise

    def give_back(self, worker: WorkerSlot) -> None:
        """Give a process back."""
        self.processes.give_back(worker)
        self.turn.release()
