"""Writes down what becomes of jobs, and publishes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from motet.cluster.messages import JobChanged, JobStepped, Usage
from motet.runtime.journal import Journal
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import now
from motet.service.events import ANY_JOB, WAITING_JOBS, EventBus
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.stored import StoredBytes
from motet.service.workers.attached import AttachedWorkers
from motet.types import JobState

_RETRY_SECONDS = 0.5


class EventRecorder:
    """Keeps events of jobs, the columns of their rows, and usage."""

    def __init__(
        self,
        store: Store,
        storage: Storage,
        ledger: Ledger,
        stored: StoredBytes,
        bus: EventBus,
        workers: Sequence[AttachedWorkers],
    ) -> None:
        self._store, self._storage, self._ledger, self._stored = store, storage, ledger, stored
        self._bus, self._workers = bus, workers
        self._closing = False
        self.failure = ""
        """Why nothing can be written just now."""

    def record_step(self, job_id: str, line: Mapping[str, Any]) -> None:
        """Keep a line of a job's metrics."""
        row: dict[str, Any] = {"step": int(line["step"]) + ("loss" in line)}
        row |= {"reward": line.get("reward")} if "loss" in line else {}
        counts = self._ledger.step(job_id, line)
        self._write(lambda: self._store.add_event(job_id, "step", f"{line['step']}", line, counts, **row))
        self._stored.changed(job_id)
        self._bus.publish(job_id, ANY_JOB)

    def record_state(self, job_id: str, state: JobState, message: str, inexact: Sequence[str] | None = None) -> None:
        """Keep a new state of a job, with a message for its owner."""
        shown = {"state": state.value, "message": self._storage.without_places(_storable(message))}
        key = state.value if state is JobState.CANCELLED else f"{time.time_ns()}"  # a job is cancelled once
        row = {**shown, "ended": now() if state.final else None}
        event = shown if inexact is None else {**shown, "inexact": inexact}
        self._write(lambda: self._store.add_event(job_id, "state", key, event, None, **row))
        if state in (JobState.SUCCEEDED, JobState.CANCELLED):  # one that failed may be resumed, and obeys again
            with contextlib.suppress(OSError):  # what stays is counted, and goes when the job is deleted
                Journal(self._storage.job(job_id).path).end(outcomes=state is JobState.SUCCEEDED)
        self._stored.changed(job_id)
        self._bus.publish(job_id, ANY_JOB)
        if state.final:
            self._bus.publish(WAITING_JOBS)
            for workers in self._workers:
                self._write(lambda workers=workers: workers.ended(job_id))  # type: ignore[misc]

    def record_event(self, event: JobChanged | JobStepped) -> None:
        """Keep an event as the engine sends it; jobs that stop with the service go on with its next start.

        Runs in a worker thread, one event after another.
        """
        if isinstance(event, JobStepped):
            self.record_step(event.job, event.line)
        elif not (self._closing and event.state in (JobState.PAUSED, JobState.QUEUED)):
            self.record_state(event.job, event.state, event.message, event.inexact)

    def record_usage(self, usage: Usage) -> None:
        """Keep who used the device."""
        self._write(lambda: self._ledger.window(usage.engine, usage.window, usage.microseconds, usage.base))

    def close(self) -> None:
        """Wait no longer for a database that is away."""
        self._closing = True

    def _write(self, write: Callable[[], object]) -> None:
        """Write it down; while the database is away, or its disk is full, the engine waits with what it sends next."""
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


def _storable(text: str) -> str:
    """A text without what a database cannot keep: a reason may hold whatever a reward worker wrote."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()
