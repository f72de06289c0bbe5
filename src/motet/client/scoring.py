"""A reward worker: leases rollouts from a service, scores them on this machine, and sends the scores.

Repeated scores count once. A reward runs as in `motet run`: in separate processes, with limits on time and memory.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from motet.client.connection import Connection
from motet.client.leases import LeaseWorker
from motet.client.reward_files import RewardFiles
from motet.config import RewardConfig
from motet.rewards.reward_elsewhere import AnswerDetails, ScoreOrReason, WorkerArgs, to_wire
from motet.rewards.reward_pool import RewardPool
from motet.service.schemas import Job
from motet.service.schemas.workers import ScoringWork

_AT_ONCE = 16
_MOST_LOADED = 16


class RewardWorker(LeaseWorker[ScoringWork]):
    """Scores rollouts of some jobs until they have ended."""

    kind = "rewards"

    def __init__(
        self, client: Connection, files: RewardFiles, processes: int = 2, most_loaded: int = _MOST_LOADED
    ) -> None:
        """Connects to nothing yet. Each loaded reward has at least one process, even if `processes` are fewer.

        `most_loaded` rewards stay loaded; more only while all are in use.
        """
        super().__init__(client, _AT_ONCE)
        self._files, self._pool = files, RewardPool(processes)
        self._loading, self._most_loaded = asyncio.Lock(), most_loaded
        self._loaded: OrderedDict[str, int] = OrderedDict()  # current users of each, the last used at the end
        self.scored = 0
        """Completions that were scored and handed in."""

    async def _prepare(self, job: Job) -> None:
        for reward in job.spec["rewards"]:
            if reward["name"] == "worker":
                await self._load(reward)

    async def _close(self) -> None:
        await self._pool.close()

    async def _do(self, path: str, work: ScoringWork) -> None:
        scores = await self.score(work)
        if refused := await self._hand_in(path, {"id": work.id, "scores": to_wire(scores)}):
            reason = f"the service refuses what the reward returned: {refused}"
            await self._hand_in(path, {"id": work.id, "scores": [reason] * len(scores)})
        self.scored += len(scores)

    async def score(self, work: ScoringWork) -> list[ScoreOrReason]:
        """The scores of leased work, as `RewardPool.scores`."""
        name = await self._load(work.reward)
        self._loaded[name] += 1
        try:
            seen = AnswerDetails(work.transcripts, work.parts, work.trainer_state)
            return await self._pool.scores(name, work.problem, work.completions, seen)
        finally:
            self._loaded[name] -= 1

    async def _load(self, reward: Mapping[str, Any]) -> str:
        """Load a reward of a job; returns its name in the pool."""
        limits = {field: reward[field] for field in ("cpu_seconds", "wall_seconds", "memory_mb")}
        name = json.dumps([reward["args"], limits], sort_keys=True)
        async with self._loading:
            if name not in self._loaded:
                unused = [other for other, users in self._loaded.items() if users == 0]
                for other in unused[: max(0, len(self._loaded) + 1 - self._most_loaded)]:
                    del self._loaded[other]
                    await self._pool.unregister(other)
                config = RewardConfig(name="worker", **limits)
                asked = WorkerArgs.model_validate(reward["args"])
                await self._pool.register(name, [self._files.find(asked, config)])
                self._loaded[name] = 0
            self._loaded.move_to_end(name)
        return name
