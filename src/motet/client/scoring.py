"""A reward worker: takes rollouts of jobs from a service, scores them on this machine, and hands the scores in.

All connections are made from here. What a worker holds when it dies is handed to others after a minute; scores that are
handed in twice count once. A reward runs as in `motet run`: in processes of its own, with limits of time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from motet.client.connection import path_of, worker_name
from motet.client.reward_files import RewardFiles
from motet.config import RewardConfig
from motet.errors import ServiceError
from motet.service.schemas import Job
from motet.service.schemas.scoring import Counted, Lease, ScoringWork
from motet.tasks.reward_elsewhere import WorkerArgs, to_wire
from motet.tasks.reward_pool import RewardPool
from motet.types import JobState

if TYPE_CHECKING:
    from motet.client import AsyncClient

_AT_ONCE = 16
_WAIT_SECONDS = 20.0
_LEAVE_SECONDS = 3.0


class RewardWorker:
    """Scores rollouts of some jobs until they have ended."""

    def __init__(self, client: AsyncClient, files: RewardFiles, processes: int = 2) -> None:
        """Nothing is asked yet.

        Args:
            client: of the service.
            files: what may be called.
            processes: how many score at a time, in all.
        """
        self._client, self._files = client, files
        self._pool = RewardPool(processes)
        self.name = worker_name()
        self._loading = asyncio.Lock()
        self._loaded: set[str] = set()
        self.scored = 0
        """Completions that were scored and handed in."""

    async def run(self, jobs: Sequence[str]) -> None:
        """Score until all jobs have ended.

        Raises:
            RewardError: a reward does not load, or is not there.
            ServiceError: the service refuses, or was away for too long.
        """
        try:
            served = [await self._client._patiently(Job, "GET", path_of("jobs", job)) for job in jobs]
            for job in served:
                for reward in job.spec["rewards"]:
                    if reward["name"] == "worker":
                        await self._load(reward)
            async with asyncio.TaskGroup() as group:
                for job in served:
                    group.create_task(self._serve(job.id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            await self._pool.close()

    async def _serve(self, job: str) -> None:
        """Take work of one job, as much as can be in hand, until it has ended."""
        held: dict[str, asyncio.Task[None]] = {}
        wait = 0.0
        try:
            while True:
                free = _AT_ONCE - len(held)
                if not free:
                    await asyncio.wait(held.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                wanted = {"worker": self.name, "most": free, "wait_seconds": wait if free else 0.0}
                lease = await self._client._patiently(
                    Lease, "POST", f"{path_of('jobs', job)}/scoring/lease", json=wanted
                )
                wait = min(_WAIT_SECONDS, lease.seconds / 3)  # asking again renews what is held
                for unit in lease.units:
                    if unit.id not in held:
                        held[unit.id] = asyncio.create_task(self._score(job, unit))
                for key in [key for key, task in held.items() if task.done()]:
                    held.pop(key).result()
                if JobState(lease.state).final and not lease.units:
                    return
        finally:
            for task in held.values():
                task.cancel()
            await asyncio.gather(*held.values(), return_exceptions=True)
            with contextlib.suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._client._send("DELETE", f"{path_of('jobs', job)}/scoring/workers/{self.name}")

    async def _score(self, job: str, unit: ScoringWork) -> None:
        name = await self._load(unit.reward)
        scores = await self._pool.scores(name, unit.problem, unit.completions)
        results = [{"id": unit.id, "scores": to_wire(scores)}]
        await self._client._patiently(
            Counted, "POST", f"{path_of('jobs', job)}/scoring/results", json={"results": results}
        )
        self.scored += len(scores)

    async def _load(self, reward: Mapping[str, Any]) -> str:
        """Load a reward as its job asks for it; the name by which the pool knows it."""
        limits = {field: reward[field] for field in ("cpu_seconds", "wall_seconds", "memory_mb")}
        name = json.dumps([reward["args"], limits], sort_keys=True)
        async with self._loading:
            if name not in self._loaded:
                config = RewardConfig(name="worker", **limits)
                asked = WorkerArgs.model_validate(reward["args"])
                await self._pool.register(name, [self._files.find(asked, config)])
                self._loaded.add(name)
        return name
