"""Records events and states of jobs, and publishes them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from motet.core.json_text import storable
from motet.core.types import JobState
from motet.hosts.messages import JobChanged, JobStepped, JobWorked, UsageWindow
from motet.observe.follow import Followers
from motet.observe.observing import ObservedJob
from motet.runtime.held_out import figure_of
from motet.runtime.journal import Journal
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import StoredJob, newer_evaluation, now
from motet.service.events import ANY_JOB, WAITING_JOBS, EventBus
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.stored import StoredBytes
from motet.service.workers.attached import AttachedWorkers

_RETRY_SECONDS = 0.5
_FOR_GOOD = (JobState.SUCCEEDED, JobState.CANCELLED)
_MOST_ENDED = 200
"""Ended jobs that observers receive at the start of the service."""


class EventRecorder:
    """Stores events of jobs, columns of their rows, and usage."""

    def __init__(
        self,
        store: Store,
        storage: Storage,
        ledger: Ledger,
        stored: StoredBytes,
        bus: EventBus,
        workers: Sequence[AttachedWorkers],
        followers: Followers,
    ) -> None:
        self._store, self._storage, self._ledger, self._stored = store, storage, ledger, stored
        self._bus, self._workers, self._followers = bus, workers, followers
        self._closing = False
        self.failure = ""
        """Why nothing can be written now; empty if it can."""
        self.metrics = CollectorRegistry()
        self._rollouts, self._unscored = (
            Counter(f"motet_{name}", text, ["tenant"], registry=self.metrics)
            for name, text in (
                ("rollouts", "Rollouts of finished steps."), ("reward_failures", "Rollouts whose reward failed."),
            )
        )  # fmt: skip

    def record_step(self, job_id: str, line: Mapping[str, Any], *, best: bool = False, best_by: str = "") -> None:
        """Store a line of a job's metrics; `best` and `best_by` as in `newer_evaluation`."""
        row: dict[str, Any] = {"step": int(line["step"]) + ("loss" in line)}
        row |= {"reward": line.get("reward")} if "loss" in line else {}
        if errors := line.get("errors"):  # an error from a reward may contain its file's path
            line = {**line, "errors": {self._storage.without_places(storable(why)): n for why, n in errors.items()}}
        counts, evaluation = self._ledger.step(job_id, line), line.get("eval")
        held_out = figure_of(evaluation) if evaluation else ("", math.nan)

        def also(session: Session) -> None:
            counts(session)
            if math.isfinite(held_out[1]):
                _keep_evaluation(session, job_id, int(line["step"]), held_out, best, best_by)

        def keep() -> None:
            if self._store.add_event(job_id, "step", f"{line['step']}", line, also, **row) is not None:
                self._count_rollouts(job_id, line)

        self._write(keep)
        self._stored.changed(job_id)
        self._bus.publish(job_id, ANY_JOB)

    def _count_rollouts(self, job_id: str, line: Mapping[str, Any]) -> None:
        if "rollouts" in line and (job := self._store.job_by_id(job_id)) is not None:
            tenant = self._store.tenants.name_of(job.tenant_id)
            self._rollouts.labels(tenant).inc(line["rollouts"])
            self._unscored.labels(tenant).inc(line.get("failed") or 0)

    def record_state(
        self,
        job_id: str,
        state: JobState,
        message: str,
        inexact: Sequence[str] | None = None,
        key: str = "",
        **fields: str,
    ) -> bool:
        """Store a job's new state with a message for its owner, unless it has succeeded or was cancelled.

        Repeats with the same `key` are ignored; gives whether it was none. `fields` are other columns of its row.
        """
        told = self._storage.without_places(storable(self._by_name(job_id, message)))
        shown: dict[str, Any] = {"state": state.value, "message": told}
        if state is JobState.CANCELLED:  # recorded once, by whichever process reports it
            key = state.value
        key, row = key or f"{time.time_ns()}", {**shown, "ended": now() if state.final else None, **fields}
        why = [self._storage.without_places(storable(reason)) for reason in inexact or ()]
        event = shown if inexact is None else {**shown, "inexact": why}
        stored = False

        def keep() -> None:
            nonlocal stored
            stored = self._store.add_event(job_id, "state", key, event, unless=_FOR_GOOD, **row) is not None

        self._write(keep)
        if not stored and ((job := self._store.job_by_id(job_id)) is None or job.state != state.value):
            return False
        if state in _FOR_GOOD:  # a failed job may be resumed and then executes its commands again
            with contextlib.suppress(OSError):  # remaining files are counted, and deleted with the job
                Journal(self._storage.job(job_id).path).end(outcomes=state is JobState.SUCCEEDED)
        self._stored.changed(job_id)
        self._bus.publish(job_id, ANY_JOB)
        self._observe(job_id, state)
        if state.final:
            self._bus.publish(WAITING_JOBS)
            for workers in self._workers:
                self._write(lambda workers=workers: workers.ended(job_id))  # type: ignore[misc]
        return stored

    def _by_name(self, job_id: str, message: str) -> str:
        """Name a job as its owner does; an engine knows its id only."""
        job: StoredJob | None = None

        def find() -> None:
            nonlocal job
            job = self._store.job_by_id(job_id)

        if job_id in message:
            self._write(find)
        return message if job is None else message.replace(job_id, job.name)

    def record_event(self, event: JobChanged | JobStepped | JobWorked) -> None:
        """Store an event from the engine; jobs that stop with the service continue at its next start.

        Runs in a worker thread, one event at a time.
        """
        if isinstance(event, JobStepped):
            self.record_step(event.job, event.line, best=event.best, best_by=event.best_by)
            self._observe(event.job, JobState.RUNNING)
        elif isinstance(event, JobWorked):
            self._write(lambda: self._ledger.worked(event.job, event.step, event.tokens, event.sampled))
        elif not (self._closing and event.state in (JobState.PAUSED, JobState.QUEUED)):
            self.record_state(event.job, event.state, event.message, event.inexact, event.key)

    def _observe(self, job_id: str, state: JobState) -> None:
        """Inform the operator's observers, which read the job's files."""
        if not self._followers:
            return

        def tell() -> None:
            if (job := self._store.job_by_id(job_id)) is not None:
                self._followers.move(self._observed(job), state)

        self._write(tell)

    def _observed(self, job: StoredJob) -> ObservedJob:
        tenant, path = self._store.tenants.name_of(job.tenant_id), self._storage.job(job.id).path
        return ObservedJob(job.id, job.name, "", tenant, path, self._followers.home)

    def delete_observed(self, job: StoredJob) -> None:
        """Delete what observers wrote about an ended job."""
        self._followers.delete(self._observed(job))

    def observe_ended(self) -> None:
        """Give observers what they missed about the last ended jobs."""
        if self._followers:
            ended = select(StoredJob).where(StoredJob.ended.is_not(None)).order_by(StoredJob.ended.desc())
            for job in self._store.scalars(ended.limit(_MOST_ENDED)):
                self._followers.move(self._observed(job), JobState(job.state))

    def record_usage(self, usage: UsageWindow) -> None:
        """Store device usage."""
        counts = usage.microseconds, usage.cpu, usage.read
        self._write(lambda: self._ledger.window(usage.engine, usage.window, *counts, base=usage.base))

    def close(self) -> None:
        """Stop waiting for an unreachable database."""
        self._closing = True

    def _write(self, write: Callable[[], object]) -> None:
        """Write to the database; while it is unreachable or full, the engine's next events wait."""
        while True:
            try:
                write()
                self.failure = ""
                return
            except AWAY as error:
                self.failure = f"the database cannot be written: {getattr(error, 'orig', error)}"
                if self._closing:
                    raise
            time.sleep(_RETRY_SECONDS)


def _keep_evaluation(
    session: Session, job_id: str, version: int, figure: tuple[str, float], best: bool, best_by: str
) -> None:
    before = session.scalar(select(StoredJob.held_out).where(StoredJob.id == job_id))
    held_out = newer_evaluation(before, version, figure, best=best, best_by=best_by)
    session.execute(update(StoredJob).where(StoredJob.id == job_id).values(held_out=held_out))
