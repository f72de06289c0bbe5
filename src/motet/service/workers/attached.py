"""Workers on machines of their owners', who ask for work: who is attached to which job, and what becomes of jobs without any.

Nothing is ever sent to a worker. Work that nobody takes waits without an end, and the job says so; a job that is asked to
pause meanwhile rests at once, from its last commit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from motet.service.database.store import Store
from motet.service.events import EventBus, within
from motet.types import JobState

_log = logging.getLogger(__name__)

Work = TypeVar("Work")
Gone = Callable[[], Awaitable[bool]]
"""Whether whoever asks has hung up."""
_LOOK_SECONDS = 1.0
_LEASES_END_SECONDS = 5.0  # how soon it is noticed, at the latest, that somebody's lease has ended


class AttachedWorkers:
    """Those of one kind. Lives in one event loop."""

    kind = ""
    """Names the topics on the bus."""
    phase = ""
    """Of a job for which nobody works."""

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long a worker that says nothing more keeps what it was handed."""
        self.lease_seconds = lease_seconds
        self._store, self._bus = store, bus
        self._waiting: Mapping[str, Collection[object]]
        """What waits to be done, by job."""
        self._seen: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._resting: set[str] = set()
        self._closing = False
        self._looking: asyncio.Task[None] | None = None

    # --- what each kind says ----------------------------------------------------------------------------------------------

    def send_away(self, job_id: str) -> None:
        """Let a job rest that waits."""
        raise NotImplementedError

    def ended(self, job_id: str) -> None:
        """Forget a job that has ended; those that wait for work are woken. From any thread."""
        raise NotImplementedError

    def look(self) -> None:
        """Look after what waits; called every second."""

    # --- what they share --------------------------------------------------------------------------------------------------

    def asked(self, job_id: str) -> bool:
        """Whether a job waits for somebody's work."""
        return bool(self._waiting.get(job_id))

    def rest(self, job_id: str, wanted: bool) -> None:
        """Let a job rest as soon as nobody works for it, or no longer."""
        if wanted and self.asked(job_id):
            self._resting.add(job_id)
        else:
            self._resting.discard(job_id)

    def waits(self, job_id: str) -> bool:
        """Whether a job waits for workers and none is attached."""
        return self.asked(job_id) and not self.attached(job_id)

    def attached(self, job_id: str) -> int:
        """How many workers asked for work of a job a short while ago."""
        seen = self._seen.get(job_id, {})
        for worker, when in list(seen.items()):  # others delete too: routes ask in threads of their own
            if time.monotonic() - when > self.lease_seconds:
                seen.pop(worker, None)
        return len(seen)

    async def state(self, job_id: str) -> JobState:
        """Where a job stands; one that is gone was cancelled."""
        job = await asyncio.to_thread(self._store.job_by_id, job_id)
        return JobState.CANCELLED if job is None else JobState(job.state)

    async def _taken(
        self, job_id: str, worker: str, seconds: float, gone: Gone, take: Callable[[], Awaitable[list[Work]]]
    ) -> list[Work]:
        """What a worker can take, or nothing when nothing comes in some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self._seen[job_id][worker] = time.monotonic()
            more = self._bus.next(self._topic(job_id))
            if await gone():  # what is handed to nobody would lie until its lease ends
                self._seen[job_id].pop(worker, None)
                return []
            taken, left = await take(), deadline - time.monotonic()
            if taken or left <= 0 or self._bus.closed or (await self.state(job_id)).final:
                return taken
            await within(more, min(left, _LEASES_END_SECONDS, self.lease_seconds / 2))

    def _publish(self, job_id: str) -> None:
        """Wake those who wait for work of a job. From any thread."""
        self._bus.publish(self._topic(job_id))

    def _topic(self, job_id: str) -> str:
        return f"{self.kind} {job_id}"

    def _begin_to_look(self) -> None:
        if self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        """Let jobs rest that are to pause and for which nobody works."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                self.look()
                for job_id in [job_id for job_id in list(self._resting) if self.waits(job_id)]:
                    self.send_away(job_id)
            except Exception:  # whatever it is, the next look may succeed, and without any no lease would ever end
                _log.exception("what waits for workers (%s) could not be looked after", self.kind)

    def close(self) -> None:
        """Let every job that waits rest; the next start asks again."""
        self._closing = True
        if self._looking is not None:
            self._looking.cancel()
        for job_id in list(self._waiting):
            self.send_away(job_id)
