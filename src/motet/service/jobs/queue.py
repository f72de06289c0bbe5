"""Jobs that wait for other jobs or for a time.

The engine does not know such a job until it may start; then it is handed over, in order of submission.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import select, update

from motet.config import JobConfig
from motet.config.adapters import SHAPE
from motet.config.chain import ChainStart, check_chains, shape_of, take_shape
from motet.core.errors import ConfigError, StoreError
from motet.core.types import JobState, Wanted
from motet.process.thread_turns import ThreadTurns
from motet.service.adapters.adapters import Adapters, Resolved
from motet.service.database.store import Store, name_taken
from motet.service.database.tables import StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.service.events import WAITING_JOBS, EventBus, within
from motet.service.jobs.handover import UNFIT
from motet.service.jobs.initial_adapter import InitialAdapters, check_shape, stored_config

_log = logging.getLogger(__name__)
FURTHEST = 366 * 24 * 3600.0
"""Latest allowed start, in seconds from now."""
_LOOK_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_READING, _WAITING = 4, 10**6
"""Threads that read what jobs start from, at most one for each tenant, and most jobs of a tenant that may wait for them."""


@dataclass(frozen=True)
class Planned:
    """A job whose start is resolved for its owner."""

    id: str
    config: JobConfig
    base: str
    after: Sequence[str]
    """Ids of jobs that must succeed before it starts."""
    at: float | None
    message: str
    """What it waits for; empty if it may start."""
    starts_from: str | None
    """Its initial adapter (`Resolved.reference`)."""
    source: Resolved | None
    """The initial adapter, if it exists already."""
    idempotency: str | None = None

    def row(self) -> StoredJob:
        """The row to store."""
        return StoredJob(
            id=self.id, name=self.config.name, spec=self.config.model_dump(mode="json"), steps=self.config.steps,
            base=self.base, after=list(self.after) or None, start_at=self.at, waits=bool(self.message),
            message=self.message, starts_from=self.starts_from, idempotency_key=self.idempotency,
        )  # fmt: skip


class JobQueue:
    """Accepts jobs, and holds back those that must wait."""

    def __init__(
        self,
        store: Store,
        bus: EventBus,
        adapters: Adapters,
        initial: InitialAdapters,
        record_state: Callable[[str, JobState, str], object],
        hand_over: Callable[[StoredJob], None],
    ) -> None:
        """`record_state` stores a job's new state; `hand_over` gives a job to the engine, or records its failure."""
        self._store, self._bus, self._adapters, self._initial = store, bus, adapters, initial
        self._record_state, self._hand_over = record_state, hand_over
        self._lock, self._turns = threading.Lock(), ThreadTurns(_READING, _WAITING)
        self._reading = set[str]()
        """Jobs whose start is being read, which may take minutes."""

    def close(self) -> None:
        """Begin to read nothing more."""
        self._turns.close()

    def plan(
        self,
        who: Principal,
        config: JobConfig,
        base: str,
        after: Sequence[str] = (),
        at: float | None = None,
        above: Sequence[Planned] = (),
    ) -> Planned:
        """Resolve what a job waits for and starts from; earlier jobs of the request are candidates.

        `after` has names or ids of jobs that must succeed, `at` is the earliest start in Unix seconds.

        Raises:
            ConfigError: something is not visible to the owner, or cannot happen.
            StoreError: its name is taken.
        """
        member = Principal.member_of(who.tenant_id)
        if self._adapters.uploaded(member, config.name) is not None:
            raise StoreError(f"there is an adapter {config.name!r} already; give the job another name")
        own = (StoredJob.tenant_id == who.tenant_id) & (StoredJob.name == config.name)
        if self._store.scalar(select(StoredJob.id).where(own)) is not None:
            raise StoreError(name_taken(config.name))
        before = [self._awaited(who, name) for name in dict.fromkeys(after)]
        if at is not None and at > time.time() + FURTHEST:
            raise ConfigError("at: a start may be at most a year ahead; give an earlier time")
        ids, coming = [job.id for job in before], dict[str, str]()
        if (start := ChainStart.of(config.adapter.init, [one.config for one in above])) is not None:
            made_by = next(one for one in above if one.config.name == start.job)
            config = take_shape(config, made_by.config.adapter.model_dump(include={*SHAPE}))
            _check_chain(config, base, made_by)
            ids.append(made_by.id)
            coming[made_by.id] = start.job
        reference, source = (
            self._initial.resolve(who, config, base, ids) if start is None else (f"{made_by.id}@{start.version}", None)
        )
        if source is None and reference is not None and start is None:  # of a job in `after`, which has yet to make it
            maker = next(job for job in before if job.id == reference.partition("@")[0])
            config = take_shape(config, stored_config(maker).adapter.model_dump(include={*SHAPE}))
        if source is not None:
            config = take_shape(config, shape_of(source.path))
            check_shape(config, source.path)
        message = self._held_back(ids, at, coming)
        return Planned(new_id("job"), config, base, ids, at, message, reference, source)

    def drafts(self, who: Principal, planned: Sequence[Planned]) -> contextlib.AbstractContextManager[list[Path]]:
        """`InitialAdapters.drafts` for `submit`; the adapters are read to be checked, which may take minutes."""
        return self._initial.drafts(who.tenant_id, [one.source for one in planned])

    def submit(self, who: Principal, planned: Sequence[Planned], drafts: Sequence[Path]) -> list[StoredJob]:
        """Store jobs, with initial adapters, all or none. Raises `StoreError` if a name is taken."""
        jobs = self._store.submit(who, [one.row() for one in planned])
        for draft, job in zip(drafts, jobs, strict=True):
            self._initial.take_draft(draft, job.id)
        if any(job.waits for job in jobs):
            self._bus.publish(WAITING_JOBS)
        return jobs

    def _awaited(self, who: Principal, name: str) -> StoredJob:
        job = self._store.job(who, name)
        if job is None:
            raise ConfigError(f"after: there is no job {name!r}")
        if JobState(job.state) in (JobState.FAILED, JobState.CANCELLED):
            raise ConfigError(f"after: job {name!r} has {job.state}; name one that can still succeed")
        return job

    def steer(self, job: StoredJob, wanted: Wanted) -> bool:
        """Pause, resume or cancel a waiting job; False if it does not wait, so that the engine must do it."""
        with self._lock:
            if not self._store.scalar(select(StoredJob.waits).where(StoredJob.id == job.id)):
                return False
            state, message = {
                Wanted.PAUSE: (JobState.PAUSED, "paused while it waits to start"),
                Wanted.RUN: (JobState.QUEUED, "waits to start"),
                Wanted.CANCEL: (JobState.CANCELLED, "cancelled before it began"),
            }[wanted]
            self._record_state(job.id, state, message)
        self._bus.publish(WAITING_JOBS)
        return True

    async def watch(self) -> None:
        """Hand jobs over as soon as they may start, until the service stops."""
        while not self._bus.closed:
            changed = self._bus.next(WAITING_JOBS)  # taken before the check, to miss nothing
            try:
                seconds = await asyncio.to_thread(self.release)
            except Exception:  # the next check may succeed; without this, no waiting job would ever start
                _log.exception("the jobs that wait could not be looked at")
                seconds = _RETRY_SECONDS
            await within(changed, seconds)

    def release(self) -> float:
        """Hand over jobs that may start now, those with an initial adapter later; returns the seconds until the next check."""
        at = [_LOOK_SECONDS]
        for job in self._waiting():
            if job.id in self._reading:
                continue
            try:
                starts_from = stored_config(job).adapter.init
                message = self._held_back(job.after or (), job.start_at)
            except UNFIT as error:
                self._end_wait(job, JobState.FAILED, str(error))
                continue
            if not message and starts_from is None:
                self._end_wait(job, JobState.QUEUED, "")
            elif not message:
                self._reading.add(job.id)
                self._turns.begin(job.tenant_id, functools.partial(self._read, job))
            elif message != job.message:
                self._store.change_job(job.id, message=message)
            if message and job.start_at is not None:
                at.append(max(0.01, job.start_at - time.time()))
        return min(at)

    def _read(self, job: StoredJob) -> None:
        """Link the initial adapter of a job, and hand the job over."""
        try:
            state, message = JobState.QUEUED, ""
            try:
                self._initial.keep(job)
            except UNFIT as error:
                state, message = JobState.FAILED, str(error)
            self._end_wait(job, state, message)
        except Exception:  # the next check may succeed
            _log.exception("job %s, which waits, could not be started", job.id)
        finally:
            self._reading.discard(job.id)

    def _end_wait(self, job: StoredJob, state: JobState, message: str) -> None:
        """End a job's wait: it may start, or it never can."""
        with self._lock:
            still = update(StoredJob).where(
                StoredJob.id == job.id, StoredJob.waits, StoredJob.state == JobState.QUEUED.value
            )
            with self._store.transaction() as session:
                # a failed job waits again when it is resumed
                gone = not session.execute(still.values(waits=state is JobState.FAILED)).rowcount  # type: ignore[attr-defined]
            if gone:  # it was paused, cancelled or removed meanwhile
                return
            self._record_state(job.id, state, message)
            if state is JobState.QUEUED:
                self._hand_over(job)

    def _held_back(self, after: Sequence[str], at: float | None, coming: Mapping[str, str] = {}) -> str:
        """Why a job cannot start yet, as a message; empty if it can. `coming` maps ids of unsaved jobs to names.

        Raises:
            StoreError: it never can; the message says why.
        """
        names = []
        for job_id in after:
            if job_id in coming:
                names.append(repr(coming[job_id]))
                continue
            job = self._adapters.by_id(job_id)
            if not isinstance(job, StoredJob):
                raise StoreError("a job that this one waits for is gone; submit it anew without it")
            if job.state in (JobState.FAILED.value, JobState.CANCELLED.value):
                reason = f": {job.message}" if job.message else ""
                raise StoreError(f"job {job.name!r}, which this one waits for, has {job.state}{reason}")
            if job.state != JobState.SUCCEEDED.value:
                names.append(repr(job.name))
        reasons = [f"for {', '.join(names)} to succeed"] if names else []
        if at is not None and at > time.time():
            reasons.append(f"until {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC")
        return f"waits {' and '.join(reasons)}" if reasons else ""

    def _waiting(self) -> list[StoredJob]:
        query = select(StoredJob).where(StoredJob.waits, StoredJob.state == JobState.QUEUED.value)
        return self._store.scalars(query.order_by(StoredJob.number))


def _check_chain(config: JobConfig, base: str, made_by: Planned) -> None:
    """Raise `ConfigError` if a job does not fit the earlier one whose adapter it continues."""
    if made_by.base != base:
        name = config.adapter.init
        raise ConfigError(
            f"adapter.init: {name!r} is an adapter on the base {made_by.base!r}, and the job is for {base!r}"
        )
    try:
        check_chains([made_by.config, config])
    except ValueError as error:
        raise ConfigError(str(error).removeprefix(f"job {config.name}: ")) from error
