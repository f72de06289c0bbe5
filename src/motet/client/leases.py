"""Common part of both kinds of workers: lease work from a service, and do it on this machine until the jobs have ended.

Workers open all connections. If a worker dies, others get its work after a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from motet.client.connection import Connection, path_of, worker_name
from motet.core.errors import ServiceError
from motet.core.json_text import storable
from motet.core.types import JobState
from motet.service.schemas import Job
from motet.service.schemas.workers import Counted, EpisodeWork, Lease, ScoringWork

Work = TypeVar("Work", EpisodeWork, ScoringWork)
Asked = dict[str, Any]
Running = dict[str, asyncio.Task[None]]
"""Running work by id."""
_WAIT_SECONDS = 20.0
_LEAVE_SECONDS = 3.0


class LeaseWorker(ABC, Generic[Work]):
    """Does one kind of work for some jobs. Subclasses load, lease and execute the work."""

    kind: str
    """`rewards` or `episodes`."""

    def __init__(self, client: Connection, at_once: int) -> None:
        """Connects to nothing yet; runs `at_once` pieces of work per job."""
        self._client, self._at_once, self.name = client, at_once, worker_name()

    @abstractmethod
    async def _prepare(self, job: Job) -> None: ...
    @abstractmethod
    async def _do(self, path: str, work: Work) -> None: ...
    @abstractmethod
    async def _close(self) -> None: ...

    def _stop_lost(self, held: Sequence[str], running: Running) -> None:
        """Stop work that others have now; by default it is done all the same, and counts once."""

    async def run(self, jobs: Sequence[str]) -> None:
        """Work until all jobs have ended.

        Raises:
            RewardError, EnvironmentFault: the code does not load, or a job needs none.
            ServiceError: the service refuses, or was unreachable for too long.
        """
        try:
            served = [await self._client._patiently(Job, "GET", path_of("jobs", job)) for job in jobs]
            for job in served:
                await self._prepare(job)
            async with asyncio.TaskGroup() as group:
                for job in served:
                    group.create_task(self._serve(job))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            await self._close()

    async def _hand_in(self, path: str, result: Asked) -> str:
        """Send a result; returns why the service rejects its content, or an empty text.

        Raises:
            ServiceError: the service rejects the worker, or was unreachable for too long.
        """
        try:
            await self._client._patiently(Counted, "POST", f"{path}/results", json=storable({"results": [result]}))
        except ServiceError as error:
            if error.status not in (413, 422):
                raise
            return str(error)[:2000]
        return ""

    async def _serve(self, job: Job) -> None:
        """Take work of one job, up to `at_once` pieces, until the job has ended."""
        path, running, wait = f"{path_of('jobs', job.id)}/work/{self.kind}", Running(), 0.0
        try:
            while True:
                free = self._at_once - len(running)
                if not free:
                    await asyncio.wait(running.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                wanted = {
                    "worker": self.name,
                    "most": free,
                    "wait_seconds": wait if free else 0.0,
                    "holds": list(running),
                }
                lease = await self._client._patiently(Lease, "POST", f"{path}/lease", json=wanted)
                self._stop_lost(lease.held, running)
                wait = min(_WAIT_SECONDS, lease.seconds / 3)  # another request renews the leases
                for work in lease.units:
                    if work.id not in running:
                        running[work.id] = asyncio.create_task(self._do(path, cast("Work", work)))
                for key in [key for key, task in running.items() if task.done()]:
                    running.pop(key).result()
                if JobState(lease.state).final and not lease.units:
                    return
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
            with contextlib.suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._client._send("DELETE", f"{path}/workers/{self.name}")
