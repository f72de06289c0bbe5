"""A reward worker: takes rollouts of jobs from a service, scores them on this machine, and hands the scores in.

Scores that are handed in twice count once. A reward runs as in `motet run`: in processes of its own, with limits of time
and memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from motet.client.connection import Connection
from motet.client.leases import Asked, LeaseWorker, Running
from motet.client.reward_files import RewardFiles
from motet.config import RewardConfig
from motet.service.schemas import Job
from motet.service.schemas.workers import Lease, ScoringWork
from motet.tasks.reward_elsewhere import WorkerArgs, to_wire
from motet.tasks.reward_pool import RewardPool

_AT_ONCE = 16


class RewardWorker(LeaseWorker[ScoringWork]):
    """Scores rollouts of some jobs until they have ended."""

    kind = "scoring"

    def __init__(self, client: Connection, files: RewardFiles, processes: int = 2) -> None:
        """Nothing is asked yet.

        Args:
            client: of the service.
            files: what may be called.
            processes: how many score at a time, in all.
        """
        super().__init__(client, _AT_ONCE)
        self._files, self._pool = files, RewardPool(processes)
        self._loading = asyncio.Lock()
        self._loaded: set[str] = set()
        self.scored = 0
        """Completions that were scored and handed in."""

    async def _prepare(self, job: Job) -> None:
        for reward in job.spec["rewards"]:
            if reward["name"] == "worker":
                await self._load(reward)

    async def _close(self) -> None:
        await self._pool.close()

    async def _lease(self, path: str, wanted: Asked, running: Running) -> tuple[Lease, Sequence[ScoringWork]]:
        """Ask for rollouts; what was handed to others meanwhile is scored all the same, and counts once."""
        lease = await self._client._patiently(Lease, "POST", f"{path}/lease", json=wanted)
        return lease, lease.units

    async def _do(self, path: str, work: ScoringWork) -> None:
        name = await self._load(work.reward)
        scores = await self._pool.scores(name, work.problem, work.completions, work.transcripts)
        if refused := await self._hand_in(path, {"id": work.id, "scores": to_wire(scores)}):
            reason = f"the service refuses what the reward returned: {refused}"
            await self._hand_in(path, {"id": work.id, "scores": [reason] * len(scores)})
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
