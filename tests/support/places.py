"""Where jobs that start others live, without a service."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.config import JobConfig
from motet.config.jobfile import normal_job
from motet.core.types import JobState
from motet.service.adapters.adapters import Adapters
from motet.service.bases import Bases
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob, now
from motet.service.database.tenants import Principal
from motet.service.events import EventBus
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.queue import JobQueue
from motet.service.storage import Storage
from tests.support.service_run import tiny


class _Storage(Storage):
    """Whose versions have no commits."""

    def version(self, job_id: str, wanted: str) -> tuple[int, Path] | None:
        """The versions that `save` made; the newest is the best."""
        kept = sorted(int(path.name[1:]) for path in (self.run / job_id / "versions").glob("v*"))
        number = (
            kept[-1] if kept and wanted in ("best", "latest") else next((n for n in kept if str(n) == wanted), None)
        )
        return None if number is None else (number, self.run / job_id / "versions" / f"v{number}")


@dataclass
class Place:
    """A queue with a store, and the jobs that were handed over."""

    store: Store
    run: Path
    handed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        storage = _Storage(self.run.parent)
        self.adapters = Adapters(self.store, storage, Bases({"small": "small"}))
        self.initial = InitialAdapters(storage, self.adapters)
        self.queue = JobQueue(
            self.store, EventBus(), self.adapters, self.initial, self.record_state,
            lambda job: self.handed.append(job.name),
        )  # fmt: skip

    def save(self, job: StoredJob, number: int, rank: int = 32) -> None:
        """A version of a job."""
        path = self.run / job.id / "versions" / f"v{number}"
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 32}))
        (path / "adapter_model.safetensors").write_text(f"{job.name} {number}")

    def record_state(self, job_id: str, state: JobState, message: str) -> None:
        """What the recorder does with a state."""
        row: dict[str, Any] = {"state": state.value, "message": message}
        self.store.add_event(
            job_id, "state", f"{time.time_ns()}", row, None, **row, ended=now() if state.final else None
        )  # fmt: skip

    def submit(
        self, who: Principal, name: str, *, after: Sequence[str] = (), at: float | None = None, **fields: Any
    ) -> StoredJob:
        """Hand a job in."""
        config = JobConfig.model_validate(normal_job({**tiny(name), **fields}))
        planned = [self.queue.plan(who, config, "small", after, at)]
        with self.queue.drafts(who, planned) as drafts:
            return self.queue.submit(who, planned, drafts)[0]

    def end(self, job: StoredJob, state: str = "succeeded", message: str = "") -> None:
        """A job has ended."""
        self.record_state(job.id, JobState(state), message)

    def start_of(self, job: StoredJob) -> str:
        """What a job's adapter starts from."""
        return (self.initial.path(job.id) / "adapter_model.safetensors").read_text()

    def now(self, job: StoredJob) -> StoredJob:
        """A job as it stands."""
        found = self.adapters.by_id(job.id)
        assert isinstance(found, StoredJob)
        return found
