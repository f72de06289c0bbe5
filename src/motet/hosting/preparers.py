"""The threads in which a host prepares jobs: in slices, within their tenants' room, and charged to them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from motet.cluster.messages import AddJob
from motet.runtime.rundir import RunDirectory
from motet.runtime.start_turns import MOST_PREPARING, PreparingTurn
from motet.runtime.storage_room import StorageRoom
from motet.tasks.pace import Pace

Result = TypeVar("Result")


class Preparers:
    """Use it in one event loop."""

    def __init__(
        self, directory: RunDirectory, room: StorageRoom, charge: Callable[[str, float], None], *, own_jobs: bool
    ) -> None:
        """`charge` is called with the CPU seconds of a job's preparation; `own_jobs` have no limits."""
        self._directory, self._room, self._charge, self._own_jobs = directory, room, charge, own_jobs
        self._threads = ThreadPoolExecutor(MOST_PREPARING, "motet-preparing")

    def close(self) -> None:
        """Begin no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, message: AddJob, turn: PreparingTurn, held: int, work: Callable[[], Result]) -> Result:
        """Do the work of a preparation in its turn; the rows of its tenant's other jobs take `held` bytes."""
        pace = self._pace(message, turn, held)

        def paced() -> Result:
            with pace.kept():
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, paced)
        finally:
            self._charge(str(message.job["name"]), pace.used)

    def _pace(self, message: AddJob, turn: PreparingTurn, held: int) -> Pace:
        """A job that has done a step keeps what it began with, whatever it takes."""
        loop = asyncio.get_running_loop()

        def give_way() -> None:
            asyncio.run_coroutine_threadsafe(turn.give_way(), loop).result()

        if self._own_jobs or self._directory.job(str(message.job["name"])).newest() is not None:
            return Pace(give_way, seconds=math.inf)
        return Pace(give_way, self._room.of(message.tenant) - held)
