"""Workers on their owners' machines: tracks those attached to each job, and jobs without workers.

The service never connects to workers. Work without a worker waits indefinitely, and the job's message says so; a job
that is paused meanwhile stops at once at its last commit.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from motet.core.types import JobState
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.events import EventBus
from motet.service.schemas.workers import LeaseRequest

_log = logging.getLogger(__name__)

Gone = Callable[[], Awaitable[bool]]
"""Returns whether the client has disconnected."""
MOST_LEASED = 2**24
"""Most characters of work leased at once, unless a single unit has more; this room is taken before."""
Room = Callable[[], Callable[[], None]]
"""Takes room for an answer with work, and returns what gives it back."""
_LOOK_SECONDS = 1.0
_LEASES_END_SECONDS = 5.0  # longest delay until an expired lease is noticed
TAKES_PER_SECOND = 100.0
"""Of all requests that wait for work of a job: each costs transactions, and hundreds would take all threads."""


class AttachedWorkers:
    """Workers of one kind. Use in one event loop."""

    kind = ""
    """Part of the topics on the bus."""
    phase = ""
    """Phase of a job without workers."""

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long a silent worker keeps its work."""
        self.lease_seconds = lease_seconds
        self._store, self._bus = store, bus
        self._waiting: Mapping[str, Collection[object]]
        """Waiting work, by job."""
        self._seen: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._polling = Counter[str]()
        """Requests that wait for work, by job."""
        self._resting: set[str] = set()
        self._closing = False
        self._checking: asyncio.Task[None] | None = None

    # --- methods of subclasses ----------------------------------------------------------------------------------------

    def send_away(self, job_id: str) -> None:
        """Release a waiting job."""
        raise NotImplementedError

    def ended(self, job_id: str) -> None:
        """Forget an ended job, and wake its waiting workers. Thread-safe."""
        raise NotImplementedError

    def check(self) -> None:
        """Check waiting work; called every second."""

    async def take(self, job: StoredJob, asked: LeaseRequest, owner: str) -> list[dict[str, Any]]:
        """Lease waiting work of a job to a worker, as it is shown. `owner` is the id of its API key."""
        raise NotImplementedError

    async def leave(self, job_id: str, worker: str) -> None:
        """Free a leaving worker's work at once."""
        raise NotImplementedError

    def held(self, job_id: str, worker: str) -> list[str]:
        """Names of the episodes that a worker has."""
        return []

    # --- shared methods -----------------------------------------------------------------------------------------------

    def asked(self, job_id: str) -> bool:
        """Whether a job waits for workers' results."""
        return bool(self._waiting.get(job_id))

    def rest(self, job_id: str, wanted: bool) -> None:
        """Set whether a job is released as soon as no worker is attached."""
        if wanted and self.asked(job_id):
            self._resting.add(job_id)
        else:
            self._resting.discard(job_id)

    def waits(self, job_id: str) -> bool:
        """Whether a job waits for workers and none is attached."""
        return self.asked(job_id) and not self.attached(job_id)

    def attached(self, job_id: str) -> int:
        """Number of workers that recently asked for work of a job."""
        seen = self._seen.get(job_id, {})
        for worker, when in list(seen.items()):  # other threads delete entries too
            if time.monotonic() - when > self.lease_seconds:
                seen.pop(worker, None)
        return len(seen)

    async def state(self, job_id: str) -> JobState:
        """The state of a job; a deleted one counts as cancelled."""
        job = await asyncio.to_thread(self._store.job_by_id, job_id)
        return JobState.CANCELLED if job is None else JobState(job.state)

    async def lease(
        self, job: StoredJob, asked: LeaseRequest, owner: str, gone: Gone, room: Room
    ) -> list[dict[str, Any]]:
        """Wait for work that a worker can take, and renew what it has. Raises what `room` raises, before work is leased."""
        job_id, worker = job.id, asked.worker
        deadline = time.monotonic() + (asked.wait_seconds if asked.most else 0.0)
        self._polling[job_id] += 1
        try:
            while True:
                self._seen[job_id][worker] = time.monotonic()
                more = self._bus.next(self._topic(job_id))
                if await gone():  # work leased to a disconnected client would stay until its lease ends
                    self._seen[job_id].pop(worker, None)
                    return []
                give_back = room()
                taken, left = await self.take(job, asked, owner), deadline - time.monotonic()
                if not taken:
                    give_back()
                if taken or left <= 0 or self._bus.closed or (await self.state(job_id)).final:
                    return taken
                await self._bus.wait(more, min(left, _LEASES_END_SECONDS, self.lease_seconds / 2))
                spread = random.uniform(0.0, 2 * self._polling[job_id] / TAKES_PER_SECOND)
                await self._bus.pause(min(spread, max(0.0, deadline - time.monotonic())))
        finally:
            self._polling -= Counter((job_id,))

    def _publish(self, job_id: str) -> None:
        """Wake workers that wait for work of a job. Thread-safe."""
        self._bus.publish(self._topic(job_id))

    def _topic(self, job_id: str) -> str:
        return f"{self.kind} {job_id}"

    def _start_checking(self) -> None:
        if self._checking is None:
            self._checking = asyncio.create_task(self._keep_checking())

    async def _keep_checking(self) -> None:
        """Release jobs that must pause and have no worker."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                self.check()
                for job_id in [job_id for job_id in list(self._resting) if self.waits(job_id)]:
                    self.send_away(job_id)
            except Exception:  # the next check may succeed; without this, no lease would end
                _log.exception("what waits for workers (%s) could not be looked after", self.kind)

    def close(self) -> None:
        """Release every waiting job; the next start asks again."""
        self._closing = True
        if self._checking is not None:
            self._checking.cancel()
        for job_id in list(self._waiting):
            self.send_away(job_id)
