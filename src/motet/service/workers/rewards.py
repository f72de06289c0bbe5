"""Reward workers of tenants: what waits for them, and how their scores reach the engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from motet.config import JobConfig, RewardConfig
from motet.errors import ScorerAway
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.events import EventBus
from motet.service.workers.attached import AttachedWorkers, Gone
from motet.service.workers.units import Leased, ScoringUnits, key_of
from motet.tasks.reward_elsewhere import ScoreOrReason, Transcripts, from_wire


class RewardWorkers(AttachedWorkers):
    """What waits for workers, of all jobs. Lives in one event loop."""

    kind, phase = "scoring", "waits for a reward worker"

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long a worker that says nothing more keeps what it was handed."""
        super().__init__(store, bus, lease_seconds)
        self.units = ScoringUnits(store)
        self._waiting: defaultdict[str, dict[str, list[asyncio.Future[list[Any]]]]] = defaultdict(dict)
        self._pruned: dict[str, int] = {}

    async def ask(
        self,
        job: StoredJob,
        reward: RewardConfig,
        problem: dict[str, Any],
        completions: list[str],
        transcripts: Transcripts,
    ) -> list[ScoreOrReason]:
        """Scores of completions, once a worker has given them.

        Raises:
            ScorerAway: nobody is attached, and the job is to rest.
        """
        if self._closing:
            raise ScorerAway("the service is stopping")
        self._begin_to_look()
        given = reward.model_dump(mode="json", exclude={"name", "weight"})
        work = {"reward": given, "problem": problem, "completions": completions, "transcripts": transcripts}
        key, answer = key_of(work), asyncio.get_running_loop().create_future()
        self._waiting[job.id].setdefault(key, []).append(answer)  # before looking, so that no answer is missed
        try:
            await self._prune(job)
            known = await asyncio.to_thread(self.units.ask, job.id, key, job.step, work)
            if known is None:
                self._publish(job.id)
                known = await answer
            return from_wire(known, len(completions))
        finally:
            self._waiting[job.id][key].remove(answer)
            if not self._waiting[job.id][key]:
                del self._waiting[job.id][key]
            if not self._waiting[job.id]:
                del self._waiting[job.id]
                self._resting.discard(job.id)

    async def _prune(self, job: StoredJob) -> None:
        """Forget what was scored for steps that no restart goes back to."""
        if self._pruned.get(job.id) == job.step:
            return
        self._pruned[job.id] = job.step
        config = JobConfig.model_validate(job.spec)
        kept = config.checkpoint.every + config.algorithm.lag + 1
        await asyncio.to_thread(self.units.forget, job.id, job.step - kept)

    def ended(self, job_id: str) -> None:
        """Forget what was asked for a job that has ended; those that wait for work are woken. From any thread."""
        self.units.forget(job_id)
        self._pruned.pop(job_id, None)
        self._publish(job_id)

    async def lease(self, job_id: str, worker: str, most: int, seconds: float, gone: Gone) -> list[Leased]:
        """Work for a worker, or nothing when none comes in some seconds; what it holds is renewed."""

        async def take() -> list[Leased]:
            return await asyncio.to_thread(self.units.lease, job_id, worker, most, self.lease_seconds)

        return await self._taken(job_id, worker, seconds if most else 0.0, gone, take)

    async def expected(self, job_id: str, keys: Sequence[str]) -> dict[str, int]:
        """How many completions each of these units has; those that are not there are left out."""
        return await asyncio.to_thread(self.units.completions, job_id, keys)

    async def leave(self, job_id: str, worker: str) -> None:
        """A worker that goes: others can have what it held at once."""
        self._seen[job_id].pop(worker, None)
        await asyncio.to_thread(self.units.give_back, job_id, worker)
        self._publish(job_id)

    async def settle(self, job_id: str, results: Mapping[str, Sequence[Any]]) -> list[str]:
        """Keep scores by the key of their unit, and pass them on; the keys of those that were the first for theirs."""
        counted = []
        for key, scores in results.items():
            if await asyncio.to_thread(self.units.settle, job_id, key, scores):
                counted.append(key)
                for answer in self._waiting.get(job_id, {}).get(key, ()):
                    if not answer.done():
                        answer.set_result(list(scores))
        return counted

    def send_away(self, job_id: str) -> None:
        """Let a job rest that waits for scores."""
        for answers in self._waiting.get(job_id, {}).values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(ScorerAway("nobody scores, and the job is to rest"))
