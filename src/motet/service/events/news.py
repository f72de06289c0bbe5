"""Who waits for something to happen to a job, and is woken when it does."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

EVERYTHING = ""
"""In the place of a job's id: news of any job."""


class News:
    """News of jobs. Any thread may announce them; those who wait are in the loop."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop | None]) -> None:
        """Nothing has happened yet; `loop` is the one of those who wait, once there is one."""
        self._loop = loop
        self._events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.count = 0
        """Another one after every announcement."""

    async def wait(self, job_id: str, seconds: float) -> None:
        """Wait until something happens to a job, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._events[job_id].wait()
        except TimeoutError:
            return

    def announce(self, job_id: str) -> None:
        """Something happened to a job."""
        self.count += 1
        if (loop := self._loop()) is not None:
            loop.call_soon_threadsafe(self._wake, job_id)

    def close(self) -> None:
        """Let everybody go."""
        for event in list(self._events.values()):
            event.set()

    def _wake(self, job_id: str) -> None:
        for heard in (job_id, EVERYTHING):
            self._events.pop(heard, asyncio.Event()).set()
