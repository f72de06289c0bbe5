"""What the routes share: the store, the engine's process, and the directories, with what a tenant may do to a job."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from motet.config import EngineConfig, JobConfig, RolloutConfig
from motet.errors import ConfigError, MotetError, StoreError
from motet.runtime.checkpoint import JobDirectory
from motet.service import specs
from motet.service.host_link import HostLink
from motet.service.store import Principal, Store
from motet.service.tables import StoredJob, now
from motet.types import JobState

_AWAY_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """How a service is run."""

    base: str
    directory: Path
    """Jobs, uploaded files, logs, and the database unless it has a URL."""
    database: str = ""
    """A SQLAlchemy URL; SQLite in the directory without one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    open_to_all: bool = False
    """No key is needed: only for a service that this machine alone can reach."""
    hub: bool = False
    """Whether jobs may read data from the hub."""
    max_upload_mb: float = 64.0


class Desk:
    """Takes jobs in, passes them to the engine, and writes down what becomes of them."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings, self.store = settings, store
        self.started = time.time()
        hello = {
            "base": settings.base,
            "run": str(settings.directory / "run"),
            "engine": settings.engine.model_dump(mode="json"),
            "rollout": settings.rollout.model_dump(mode="json"),
        }
        self.link = HostLink(hello, self._hear, self._open_jobs, settings.directory / "engine.log")
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Start the engine."""
        self._loop = asyncio.get_running_loop()
        self.link.start()

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        await self.link.stop()
        for event in list(self._news.values()):
            event.set()

    # --- jobs -------------------------------------------------------------------------------------------------------------

    def submit(self, who: Principal, tree: Mapping[str, Any], idempotency: str | None) -> StoredJob:
        """Check a job, keep it, and hand it to the engine.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        config = specs.validated(tree, hub=self.settings.hub)
        self._for_engine(who, config, "job")  # what it names has to be there now
        spec = config.model_dump(mode="json")
        job = self.store.submit(who, config.name, spec, config.steps, idempotency)
        if job.state == JobState.QUEUED.value and job.step == 0:
            self._send(do="add", **self._message(who, job))
        return job

    def steer(self, job: StoredJob, word: str) -> None:
        """Pause, resume or cancel a job.

        Raises:
            StoreError: its state does not allow it.
        """
        state = JobState(job.state)
        if state in (JobState.SUCCEEDED, JobState.CANCELLED) or (state is JobState.FAILED and word != "resume"):
            raise StoreError(f"job {job.name!r} has {state.value}; it cannot be asked to {word}")
        self.store.change_job(job.id, wanted={"pause": "pause", "resume": "run", "cancel": "cancel"}[word])
        if state is JobState.FAILED:  # the engine may have started since, and not know it
            self.store.change_job(job.id, state=JobState.QUEUED.value, message="", ended=None)
            job.state = JobState.QUEUED.value
            self._send(do="forget", job=job.id)
            self._send(do="add", **self._message_of(job))
        else:
            self._send(do=word, job=job.id)

    def delete(self, job: StoredJob) -> None:
        """Forget a job that has ended, and its files.

        Raises:
            StoreError: it has not ended.
        """
        if not JobState(job.state).final:
            raise StoreError(f"job {job.name!r} has not ended; cancel it first")
        self._send(do="forget", job=job.id)
        self.store.delete_job(job.id)
        shutil.rmtree(self.directory(job.id).path, ignore_errors=True)

    def directory(self, job_id: str) -> JobDirectory:
        """The files of a job."""
        return JobDirectory(self.settings.directory / "run" / job_id)

    def version(self, job: StoredJob, wanted: str) -> tuple[int, Path] | None:
        """A saved version of a job: a number, `latest` or `best`."""
        directory = self.directory(job.id)
        versions = self.versions(job.id)
        committed = directory.newest() if versions else None
        if committed is None:
            return None
        number = {
            "latest": versions[-1],
            "best": versions[-1] if committed.best_version is None else committed.best_version,
        }
        chosen = number.get(wanted, next((one for one in versions if str(one) == wanted), None))
        return None if chosen not in versions else (chosen, directory.path / "versions" / f"v{chosen}")

    def versions(self, job_id: str) -> list[int]:
        """Numbers of the versions that are kept."""
        found = (self.directory(job_id).path / "versions").glob("v*")
        return sorted(int(path.name[1:]) for path in found if path.name[1:].isdecimal())

    # --- events -----------------------------------------------------------------------------------------------------------

    async def news(self, job_id: str, seconds: float) -> None:
        """Wait until something happens to a job, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._news[job_id].wait()
        except TimeoutError:
            return

    def _hear(self, job_id: str, event: str, data: Mapping[str, Any]) -> None:
        """Keep what the engine tells of a job; runs in a worker thread, one event after another."""
        fields: dict[str, Any]
        if event == "step":
            key, fields = f"{data['step']}", {"step": int(data["step"]) + ("loss" in data)}
        else:
            state = JobState(data["state"])
            key, ended = f"{time.time_ns()}", now() if state.final else None
            message = str(data.get("message", ""))
            for place in ("files", "run", ""):  # where things lie on this machine is nobody's business
                message = message.replace(f"{self.settings.directory / place}/", "")
            data = {**data, "message": message}
            fields = {"state": state.value, "message": message, "ended": ended}
        self._keep(job_id, event, key, data, fields)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, job_id)

    def _keep(self, job_id: str, event: str, key: str, data: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Write it down; a database that is away for a while comes back."""
        deadline = time.monotonic() + _AWAY_SECONDS
        while True:
            try:
                self.store.tell(job_id, event, key, data, **fields)
                return
            except OperationalError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _wake(self, job_id: str) -> None:
        self._news.pop(job_id, asyncio.Event()).set()

    # --- the engine -------------------------------------------------------------------------------------------------------

    def _send(self, **message: Any) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self.link.send(**message))

    def _open_jobs(self) -> list[dict[str, Any]]:
        """What an engine that starts has to take up."""
        found = []
        for job in self.store.open_jobs():
            try:
                if job.wanted == "cancel":
                    self._hear(
                        job.id,
                        "state",
                        {"state": JobState.CANCELLED.value, "message": f"cancelled after step {job.step}"},
                    )
                else:
                    found.append(self._message_of(job))
            except MotetError as error:
                self._hear(job.id, "state", {"state": JobState.FAILED.value, "message": str(error)})
        return found

    def _message_of(self, job: StoredJob) -> dict[str, Any]:
        return self._message(Principal(job.tenant_id, "", "", "member"), job)

    def _message(self, who: Principal, job: StoredJob) -> dict[str, Any]:
        return {"job": self._for_engine(who, JobConfig.model_validate(job.spec), job.id), "wanted": job.wanted}

    def _for_engine(self, who: Principal, config: JobConfig, job_id: str) -> dict[str, Any]:
        def file(name: str) -> Path | None:
            found = self.store.file(who, name)
            return None if found is None else self.file_path(found.id, found.filename)

        def version(name: str) -> Path | None:
            job_name, _, number = name.partition("@")
            job = self.store.job(who, job_name)
            found = None if job is None else self.version(job, number or "best")
            return None if found is None else found[1]

        return specs.for_engine(config, job_id, file, version)

    def file_path(self, file_id: str, filename: str) -> Path:
        """Where an uploaded file lies; its ending says what it is."""
        ending = Path(filename).suffix.lower()
        if ending not in (".jsonl", ".parquet"):
            raise ConfigError(f"{filename!r} must end in .jsonl or .parquet")
        return self.settings.directory / "files" / f"{file_id}{ending}"
