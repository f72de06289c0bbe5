"""Reward workers of tenants: their waiting work, and the delivery of scores to the engine.

A unit of work is one reward for one problem's completions, stored in the database. Its key is a digest of everything
that its score may depend on, so an engine that asks again after a crash gets existing scores. Scored units are kept,
without texts, until no restart of the job can ask for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Text, cast, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from motet.config import JobConfig, RewardConfig
from motet.core.errors import LimitError, ScorerAway
from motet.core.json_text import json_pieces, json_text
from motet.process.thread_turns import ThreadTurns
from motet.rewards.reward_elsewhere import NO_DETAILS, AnswerDetails, Chance, ScoreOrReason, from_wire
from motet.service.database.store import Store
from motet.service.database.tables import ScoringUnit, StoredJob, new_id, now
from motet.service.errors import Refusal
from motet.service.events import EventBus
from motet.service.schemas.workers import ByChance, Counted, Given, LeaseRequest, WithLogs
from motet.service.tenants.quotas import Quotas
from motet.service.workers.attached import MOST_LEASED, AttachedWorkers

_THREADS, _WAITING = 2, 10**6
"""Threads that keep work; each tenant uses one at a time."""


@dataclass(frozen=True)
class Leased:
    """A leased unit."""

    key: str
    work: Mapping[str, Any]
    """`reward`, `problem`, `completions`, `transcripts`, and `parts` and `trainer_state` where there are some."""
    handed_out: int
    """How often it was leased, including now."""


def key_of(work: Mapping[str, Any]) -> str:
    """The digest of a piece of work. This takes milliseconds if it is large, so it is done in a thread."""
    digest = hashlib.sha256()
    dumps = functools.partial(json.dumps, sort_keys=True, ensure_ascii=False)
    for piece in json_pieces(work, dumps, sort_keys=True):
        digest.update(piece.encode("utf-8", "replace"))
    return digest.hexdigest()


_SCORES = func.length(cast(ScoringUnit.scores, Text))


class ScoringUnits:
    """The units of all jobs. Every call is one short transaction, but for `lease`, which looks at the units' sizes first."""

    def __init__(self, store: Store, quotas: Quotas | None = None) -> None:
        """`quotas` counts the work as stored bytes of the job's tenant."""
        self._store, self._quotas = store, quotas

    def ask(self, job_id: str, key: str, step: int, work: Mapping[str, Any], tenant_id: str = "") -> list[Any] | None:
        """Existing scores of a piece of work; otherwise queue it for workers. `step`: steps that the job has done.

        Raises:
            LimitError: the tenant has no room for it.
        """
        with self._store.transaction() as session:
            row = session.execute(
                select(ScoringUnit.scores).where(ScoringUnit.job_id == job_id, ScoringUnit.key == key)
            ).first()
        if row is not None:
            return None if row.scores is None else list(row.scores)
        size = sum(map(len, json_pieces(work)))  # of the text that is stored
        unit = ScoringUnit(job_id=job_id, key=key, step=step, work=dict(work), completions=len(work["completions"]))
        room = contextlib.nullcontext() if self._quotas is None else self._quotas.storing_work(tenant_id, job_id, size)
        with contextlib.suppress(IntegrityError), room, self._store.transaction() as session:
            session.add(unit)  # unless it was requested concurrently, or the job was deleted
        return None

    def lease(
        self, job_id: str, worker: str, most: int, seconds: float, holds: Collection[str] | None = None
    ) -> list[Leased]:
        """Renew a worker's units of a job, and lease more, oldest first, within the size of one response.

        Frees the worker's units that are not in `holds` (None for all): it never got them if an answer was lost.
        """
        lease, until = new_id("lease"), now() + seconds
        waiting = (ScoringUnit.job_id == job_id, ScoringUnit.scores.is_(None))
        free = or_(ScoringUnit.leased_until.is_(None), ScoringUnit.leased_until < now())
        size = func.length(cast(ScoringUnit.work, Text))
        oldest = select(ScoringUnit.id).where(*waiting, free).order_by(ScoringUnit.id).limit(most)
        own = (*waiting, ScoringUnit.worker == worker)
        with self._store.transaction() as session:
            if holds is not None:
                lost = update(ScoringUnit).where(*own, ScoringUnit.key.not_in(holds))
                session.execute(lost.values(worker=None, leased_until=None))
            session.execute(update(ScoringUnit).where(*own).values(leased_until=until))
        chosen, left = list[int](), MOST_LEASED
        for unit_id in self._store.scalars(oldest) if most > 0 else ():  # one by one: a size reads the whole row
            left -= self._store.scalar(select(size).where(ScoringUnit.id == unit_id)) or 0
            if chosen and left < 0:
                break
            chosen.append(unit_id)
        if not chosen:
            return []
        with self._store.transaction() as session:
            # Check `free` again, so that concurrent requests do not lease the same units.
            session.execute(
                update(ScoringUnit)
                .where(ScoringUnit.id.in_(chosen), *waiting, free)
                .values(worker=worker, lease=lease, leased_until=until, handed_out=ScoringUnit.handed_out + 1)
                .execution_options(synchronize_session=False)
            )
            units = session.scalars(select(ScoringUnit).where(ScoringUnit.lease == lease).order_by(ScoringUnit.id))
            return [Leased(unit.key, unit.work or {}, unit.handed_out) for unit in units]

    def give_back(self, job_id: str, worker: str) -> None:
        """End a worker's leases, so that others can have the work at once."""
        with self._store.transaction() as session:
            session.execute(
                update(ScoringUnit)
                .where(ScoringUnit.job_id == job_id, ScoringUnit.worker == worker, ScoringUnit.scores.is_(None))
                .values(worker=None, leased_until=None)
            )

    def completions(self, job_id: str, keys: Sequence[str]) -> dict[str, int]:
        """Number of completions of each existing unit."""
        with self._store.transaction() as session:
            rows = session.execute(
                select(ScoringUnit.key, ScoringUnit.completions).where(
                    ScoringUnit.job_id == job_id, ScoringUnit.key.in_(keys)
                )
            )
            return {str(row[0]): int(row[1]) for row in rows}

    def settle(self, job_id: str, key: str, scores: Sequence[Any]) -> bool:
        """Store the scores of a unit; False if it has scores or does not exist."""
        waiting = ScoringUnit.job_id == job_id, ScoringUnit.key == key, ScoringUnit.scores.is_(None)
        with self._store.transaction() as session:
            size = session.scalar(select(func.length(cast(ScoringUnit.work, Text))).where(*waiting))
            done = session.execute(
                update(ScoringUnit).where(*waiting).values(scores=list(scores), work=None, leased_until=None)
            )
        settled = bool(done.rowcount)  # type: ignore[attr-defined]
        if settled and self._quotas is not None:
            self._quotas.stored.work_done(job_id, (size or 0) - len(json_text(list(scores))))  # which take its place
        return settled

    def forget(self, job_id: str, before_step: int | None = None) -> None:
        """Delete a job's units: all, or scored ones from before a step."""
        old = delete(ScoringUnit).where(ScoringUnit.job_id == job_id)
        if before_step is not None:
            old = old.where(ScoringUnit.step < before_step, ScoringUnit.scores.is_not(None))
        with self._store.transaction() as session:
            freed = sum(size or 0 for size in session.scalars(old.returning(_SCORES)))
        if self._quotas is not None:
            self._quotas.stored.work_done(job_id, None if before_step is None else freed)


class RewardWorkers(AttachedWorkers):
    """Waiting work of all jobs. Use in one event loop."""

    kind, phase = "scoring", "waits for a reward worker"

    def __init__(self, store: Store, bus: EventBus, lease_seconds: float, quotas: Quotas | None = None) -> None:
        """`lease_seconds`: how long a silent worker keeps its work. `quotas` counts work as stored by its tenant."""
        super().__init__(store, bus, lease_seconds)
        self.units, self._turns = ScoringUnits(store, quotas), ThreadTurns(_THREADS, _WAITING, "motet-scoring")
        self._waiting: defaultdict[str, dict[str, list[asyncio.Future[list[Any]]]]] = defaultdict(dict)
        self._pruned: dict[str, int] = {}
        self._owners: dict[tuple[str, str], str] = {}
        """Id of the API key of each worker, by job and worker."""

    async def ask(
        self,
        job: StoredJob,
        reward: RewardConfig,
        problem: dict[str, Any],
        completions: list[str],
        seen: AnswerDetails = NO_DETAILS,
    ) -> list[ScoreOrReason]:
        """A worker's scores of completions. Raises `ScorerAway` if no worker is attached, and the job must stop."""
        if self._closing:
            raise ScorerAway("the service is stopping")
        self._start_checking()
        given = reward.model_dump(mode="json", exclude={"name", "weight"})
        work = {"reward": given, "problem": problem, "completions": completions, "transcripts": seen.transcripts}
        others: dict[str, Any] = {"parts": seen.parts, "trainer_state": seen.state}
        work |= {name: value for name, value in others.items() if value}
        key = await self._turns.run(job.tenant_id, lambda: key_of(work))
        answer = asyncio.get_running_loop().create_future()
        self._waiting[job.id].setdefault(key, []).append(answer)  # before the look-up, so that no answer is missed
        try:
            await self._prune(job)
            ask = functools.partial(self.units.ask, job.id, key, job.step, work, job.tenant_id)
            try:
                known = await self._turns.run(job.tenant_id, ask)
            except LimitError as error:
                return [Chance(f"cannot be kept for a reward worker: {error}")] * len(completions)
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
        """Delete scores of steps that no restart returns to."""
        if self._pruned.get(job.id) == job.step:
            return
        self._pruned[job.id] = job.step
        config = JobConfig.model_validate(job.spec)
        kept = config.checkpoint.every + config.algorithm.lag + 1
        await asyncio.to_thread(self.units.forget, job.id, job.step - kept)

    def ended(self, job_id: str) -> None:
        """Delete an ended job's units, and wake its waiting workers. Thread-safe."""
        self.units.forget(job_id)
        self._pruned.pop(job_id, None)
        self._publish(job_id)

    async def take(self, job: StoredJob, asked: LeaseRequest, owner: str) -> list[dict[str, Any]]:
        """Lease waiting work to a worker, and renew what it holds (None for all its work)."""
        self._owners[job.id, asked.worker] = owner
        lease = functools.partial(self.units.lease, job.id, asked.worker, asked.most, self.lease_seconds, asked.holds)
        leased = await asyncio.to_thread(lease)
        return [{"id": unit.key, **unit.work, "handed_out": unit.handed_out} for unit in leased]

    async def leave(self, job_id: str, worker: str) -> None:
        """Free a leaving worker's work at once."""
        self._seen[job_id].pop(worker, None)
        self._owners.pop((job_id, worker), None)
        await asyncio.to_thread(self.units.give_back, job_id, worker)
        self._publish(job_id)

    def keys(self) -> set[str]:
        """Ids of API keys with leased work."""
        for job_id in {job_id for job_id, _ in self._owners}:
            self.attached(job_id)  # forgets workers whose leases have ended
        self._owners = {one: key for one, key in self._owners.items() if one[1] in self._seen.get(one[0], {})}
        return set(self._owners.values())

    async def end(self, keys: Collection[str]) -> None:
        """Free the work leased under these keys."""
        for job_id, worker in [one for one, key in self._owners.items() if key in keys]:
            await self.leave(job_id, worker)

    async def score(self, job_id: str, given: Mapping[str, Sequence[Given]]) -> Counted:
        """Take scores by unit. Raises Refusal if a unit has too many or too few; nothing was counted."""
        expected = await asyncio.to_thread(self.units.completions, job_id, list(given))
        for key, n in expected.items():
            if len(given[key]) != n:
                raise Refusal(400, f"{key} has {n} completions, but got {len(given[key])} scores; nothing was counted")
        wire = {
            key: [score.model_dump() if isinstance(score, ByChance | WithLogs) else score for score in given[key]]
            for key in expected
        }
        counted = await self.settle(job_id, wire)
        known = [key for key in expected if key not in counted]
        return Counted(counted=counted, known=known, unknown=[key for key in given if key not in expected])

    async def settle(self, job_id: str, results: Mapping[str, Sequence[Any]]) -> list[str]:
        """Store scores by unit key, and deliver them; returns the keys that had no scores before."""
        counted = []
        for key, scores in results.items():
            if await asyncio.to_thread(self.units.settle, job_id, key, scores):
                counted.append(key)
                for answer in self._waiting.get(job_id, {}).get(key, ()):
                    if not answer.done():
                        answer.set_result(list(scores))
        return counted

    def send_away(self, job_id: str) -> None:
        """Release a job that waits for scores."""
        for answers in self._waiting.get(job_id, {}).values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(ScorerAway("no worker is attached, and the job must stop"))
