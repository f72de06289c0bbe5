"""Reward workers of tenants: who is attached, what waits for them, and how their scores reach the engine.

A worker runs on its owner's machine and asks for work; nothing is ever sent to it. Work that nobody takes waits without
an end, and the job says so; a job that is asked to pause meanwhile rests at once, from its last commit.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from motet.config import JobConfig, RewardConfig
from motet.errors import ScorerAway
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.events import EventBus, within
from motet.service.rewards.units import Leased, ScoringUnits, key_of
from motet.tasks.reward_elsewhere import ScoreOrReason, from_wire
from motet.types import JobState

WAITS = "waits for a reward worker"
"""The phase of a job for which nobody scores."""
_LOOK_SECONDS = 1.0
_LEASES_END_SECONDS = 5.0  # how soon it is noticed, at the latest, that somebody's lease has ended


class RewardWorkers:
    """What waits for workers, of all jobs. Lives in one event loop."""

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float) -> None:
        """`lease_seconds`: how long a worker that says nothing more keeps what it was handed."""
        self.lease_seconds = lease_seconds
        self._store, self._bus, self.units = store, bus, ScoringUnits(store)
        self._waiting: defaultdict[str, dict[str, list[asyncio.Future[list[Any]]]]] = defaultdict(dict)
        self._seen: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._pruned: dict[str, int] = {}
        self._resting: set[str] = set()
        self._closing = False
        self._looking: asyncio.Task[None] | None = None

    async def ask(
        self, job: StoredJob, reward: RewardConfig, problem: dict[str, Any], completions: list[str]
    ) -> list[ScoreOrReason]:
        """Scores of completions, once a worker has given them.

        Raises:
            ScorerAway: nobody is attached, and the job is to rest.
        """
        if self._closing:
            raise ScorerAway("the service is stopping")
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        given = reward.model_dump(mode="json", exclude={"name", "weight"})
        work = {"reward": given, "problem": problem, "completions": completions}
        key, answer = key_of(work), asyncio.get_running_loop().create_future()
        self._waiting[job.id].setdefault(key, []).append(answer)  # before looking, so that no answer is missed
        try:
            await self._prune(job)
            known = await asyncio.to_thread(self.units.ask, job.id, key, job.step, work)
            if known is None:
                self._bus.publish(_topic(job.id))
                known = await answer
            return from_wire(known, len(completions))
        finally:
            self._waiting[job.id][key].remove(answer)
            if not self._waiting[job.id][key]:
                del self._waiting[job.id][key]
            if not self._waiting[job.id]:
                del self._waiting[job.id]
                self._resting.discard(job.id)

    def rest(self, job_id: str, wanted: bool) -> None:
        """Let a job rest as soon as nobody scores for it, or no longer."""
        if wanted and job_id in self._waiting:
            self._resting.add(job_id)
        else:
            self._resting.discard(job_id)

    async def _prune(self, job: StoredJob) -> None:
        """Forget what was scored for steps that no restart goes back to."""
        if self._pruned.get(job.id) == job.step:
            return
        self._pruned[job.id] = job.step
        config = JobConfig.model_validate(job.spec)
        kept = config.checkpoint.every + config.algorithm.lag + 1
        await asyncio.to_thread(self.units.forget, job.id, job.step - kept)

    def waits(self, job_id: str) -> bool:
        """Whether a job waits for workers and none is attached."""
        return bool(self._waiting.get(job_id)) and not self.attached(job_id)

    def attached(self, job_id: str) -> int:
        """How many workers asked for work of a job a short while ago."""
        seen = self._seen.get(job_id, {})
        for worker in [name for name, when in seen.items() if time.monotonic() - when > self.lease_seconds]:
            del seen[worker]
        return len(seen)

    def ended(self, job_id: str) -> None:
        """Forget what was asked for a job that has ended; those that wait for work are woken. From any thread."""
        self.units.forget(job_id)
        self._pruned.pop(job_id, None)
        self._bus.publish(_topic(job_id))

    async def lease(
        self, job_id: str, worker: str, most: int, seconds: float, gone: Callable[[], Awaitable[bool]]
    ) -> list[Leased]:
        """Work for a worker, or nothing when none comes in some seconds; what it holds is renewed. `gone`: it has hung up."""
        deadline = time.monotonic() + seconds
        while True:
            self._seen[job_id][worker] = time.monotonic()
            more = self._bus.next(_topic(job_id))
            if await gone():  # what is handed to nobody would lie until its lease ends
                self._seen[job_id].pop(worker, None)
                return []
            leased = await asyncio.to_thread(self.units.lease, job_id, worker, most, self.lease_seconds)
            left = deadline - time.monotonic()
            if leased or most < 1 or left <= 0 or self._bus.closed or (await self.state(job_id)).final:
                return leased
            await within(more, min(left, _LEASES_END_SECONDS, self.lease_seconds / 2))

    async def state(self, job_id: str) -> JobState:
        """Where a job stands; one that is gone was cancelled."""
        job = await asyncio.to_thread(self._store.job_by_id, job_id)
        return JobState.CANCELLED if job is None else JobState(job.state)

    async def expected(self, job_id: str, keys: Sequence[str]) -> dict[str, int]:
        """How many completions each of these units has; those that are not there are left out."""
        return await asyncio.to_thread(self.units.completions, job_id, keys)

    async def leave(self, job_id: str, worker: str) -> None:
        """A worker that goes: others can have what it held at once."""
        self._seen[job_id].pop(worker, None)
        await asyncio.to_thread(self.units.give_back, job_id, worker)
        self._bus.publish(_topic(job_id))

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

    async def _look(self) -> None:
        """Let jobs rest that are to pause and for which nobody scores."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for job_id in [job_id for job_id in self._resting if self.waits(job_id)]:
                self._send_away(job_id)

    def _send_away(self, job_id: str) -> None:
        for answers in self._waiting.get(job_id, {}).values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(ScorerAway("nobody scores, and the job is to rest"))

    def close(self) -> None:
        """Let every job that waits rest; the next start asks again."""
        self._closing = True
        if self._looking is not None:
            self._looking.cancel()
        for job_id in list(self._waiting):
            self._send_away(job_id)


def _topic(job_id: str) -> str:
    """Of work for the reward workers of a job."""
    return f"scoring {job_id}"
