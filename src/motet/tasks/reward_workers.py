"""The processes that score one job's rewards: who is free, who waits for one, and a new one where one was lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks.reward_link import RewardLink
from motet.tasks.worker_link import ProcessDiedError
from motet.tasks.worker_messages import LoadRewards, RewardsLoaded


class Worker:
    """A place for one process, which is started by the first call that needs it."""

    link: RewardLink | None = None


@dataclass(eq=False)
class WorkerGroup:
    """Processes of one job, all behind a wall or none of them."""

    request: LoadRewards
    log: Path | None
    rewards: Mapping[int, RewardConfig]
    """By their places in the job, in the order in which the process has them."""
    may_start_another: Callable[[], bool]
    """Whether another process may be started."""
    loaded: RewardsLoaded = field(default_factory=lambda: RewardsLoaded((), ()))
    workers: list[Worker] = field(default_factory=list)
    closed: bool = False
    _idle: list[Worker] = field(default_factory=list)
    _waiting: deque[asyncio.Future[Worker]] = field(default_factory=deque)

    async def open(self) -> None:
        """Load the rewards in a first process."""
        self.workers.append(Worker())
        link = self.workers[0].link = await RewardLink.start(self.request, self.log)
        self.loaded, self._idle = link.loaded, list(self.workers)

    async def close(self) -> None:
        """End the processes; calls in flight come back as failed."""
        self.closed = True
        for worker in self.workers:
            if worker.link is not None:
                await worker.link.kill()

    def index(self, reward: int) -> int:
        """Where in the process a reward is."""
        return list(self.rewards).index(reward)

    async def start(self) -> RewardLink:
        """A new process for a group that is still there.

        Raises:
            ProcessDiedError: the job was unregistered, or the rewards no longer load.
            ClockLimitError: loading took too long.
        """
        try:
            link = await RewardLink.start(self.request, self.log)
        except RewardError as error:
            raise ProcessDiedError(f"could not be loaded again: {error}") from error
        if self.closed:  # while the process started
            await link.kill()
            raise ProcessDiedError("was not called: its job has ended")
        return link

    async def take(self) -> Worker:
        """A free worker; a new one where another may be started, else whichever comes free."""
        if self._idle:
            return self._idle.pop()
        if not self.workers or self.may_start_another():
            self.workers.append(Worker())
            return self.workers[-1]
        free_worker: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(free_worker)
        try:
            return await free_worker
        except asyncio.CancelledError:
            if free_worker.done() and not free_worker.cancelled():
                self.give_back(free_worker.result())
            raise

    def give_back(self, worker: Worker) -> None:
        """Hand a worker to whoever has waited longest."""
        while self._waiting:
            free_worker = self._waiting.popleft()
            if not free_worker.done():
                free_worker.set_result(worker)
                return
        self._idle.append(worker)
