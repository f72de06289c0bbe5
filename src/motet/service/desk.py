"""What the routes share: the store, the engine's process, and the directories, with what a tenant may do to a job."""

from __future__ import annotations

import asyncio
import functools
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from motet.config import EngineConfig, JobConfig, RolloutConfig
from motet.config.service import LimitsConfig, RateConfig
from motet.errors import ConfigError, MotetError, StoreError
from motet.runtime.checkpoint import JobDirectory
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Principal, Store
from motet.service.database.tables import StoredJob, now
from motet.service.engine.host_link import HostLink
from motet.service.events.news import News
from motet.service.http.rate import RateLimit
from motet.service.jobs import specs
from motet.service.jobs.starts import NOW, Plan, Starts, When
from motet.service.rewards import scoring
from motet.service.rewards.grading import Grading
from motet.service.rewards.workers import WAITS, RewardWorkers
from motet.service.tenants.steward import Steward
from motet.tasks.reward_http import Addresses, HttpRewards
from motet.tasks.reward_installed import Installed
from motet.types import JobState


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
    rewards: Mapping[str, Installed] = field(default_factory=dict)
    """Functions that jobs may use by name, besides the built-in rewards."""
    reward_hosts: tuple[str, ...] | None = None
    """Hosts that a reward may be asked of; without them all but private ones."""
    lease_seconds: float = 60.0
    """How long a reward worker that says nothing more keeps what it took."""
    metrics_token: str = ""
    """What Prometheus brings to read /metrics; an admin's key does too."""
    max_upload_mb: float = 64.0
    """The largest file of rows."""
    max_adapter_mb: float = 512.0
    """The largest adapter, packed or unpacked."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """What a tenant may use unless an admin sets something else for it."""
    rate: RateConfig | None = None
    """How often a key may ask."""


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
            "rewards": {name: asdict(one) for name, one in settings.rewards.items()},
        }
        log, score = settings.directory / "engine.log", functools.partial(scoring.answer, self)
        self.workers = RewardWorkers(store, settings.lease_seconds)
        self.link = HostLink(hello, self._hear, self._open_jobs, log, score, self.workers.rest)
        self.addresses = HttpRewards(Addresses(settings.reward_hosts))
        self.unwritten = ""
        """Why what the engine tells cannot be kept just now."""
        self.news = News(lambda: self._loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Future[Any] | None = None
        self.adapters = Adapters(store, settings.directory / "adapters", self.version)
        self.grading = Grading(self.link, settings.base, self.adapters)
        self.steward = Steward(store, settings.limits, settings.engine.slots, self._stored_by, self._send)
        self.link.counted = self.steward.count
        self.rate = RateLimit(settings.rate)
        self.starts = Starts(store, self.adapters, settings.directory / "run", self._hear, self._hand_over)

    async def open(self) -> None:
        """Start the engine."""
        self._loop = asyncio.get_running_loop()
        self.link.start()
        self._watching = asyncio.gather(self.starts.watch(), self.steward.watch())

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        if self._watching is not None:
            self._watching.cancel()
        stopping = asyncio.create_task(self.link.stop())
        await asyncio.sleep(0)  # jobs are told to stop before those that wait for a worker are sent to rest
        self.workers.close()
        await stopping
        await self.grading.close()
        await asyncio.to_thread(self.steward.flush)
        self.news.close()

    # --- jobs -------------------------------------------------------------------------------------------------------------

    def checked(self, who: Principal, tree: Mapping[str, Any], when: When = NOW) -> tuple[JobConfig, Plan]:
        """A job as it would be taken in, and its start.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        config = specs.validated(
            tree, hub=self.settings.hub, rewards=self.settings.rewards, addresses=Addresses(self.settings.reward_hosts)
        )
        self.steward.limits.fits(who.tenant_id, config)
        self._for_engine(who, config, "job")  # what it names has to be there now
        return config, self.starts.plan(who, config, when)

    def submit(self, who: Principal, tree: Mapping[str, Any], idempotency: str | None, when: When = NOW) -> StoredJob:
        """Check a job, keep it, and hand it to the engine as soon as it may start.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        if (same := self.store.submitted(who, idempotency)) is not None:
            return same
        config, plan = self.checked(who, tree, when)
        with self.steward.admitting(who.tenant_id, config):
            job = self.starts.submit(who, config, idempotency, plan)
        if job.state == JobState.QUEUED.value and job.step == 0 and not job.waits:
            self._hand_over(job)
        self.news.announce(job.id)
        return job

    def steer(self, job: StoredJob, word: str) -> None:
        """Pause, resume or cancel a job.

        Raises:
            StoreError: its state does not allow it.
        """
        state = JobState(job.state)
        if state in (JobState.SUCCEEDED, JobState.CANCELLED) or (state is JobState.FAILED and word != "resume"):
            raise StoreError(f"job {job.name!r} has {state.value}; it cannot be asked to {word}")
        if word == "resume" and state in (JobState.PAUSED, JobState.FAILED):
            self.steward.may_resume(job)
        self.store.change_job(job.id, wanted={"pause": "pause", "resume": "run", "cancel": "cancel"}[word])
        if self.starts.steer(job, word):
            return
        if state is JobState.FAILED:  # the engine may have started since, and not know it
            self.store.change_job(job.id, state=JobState.QUEUED.value, message="", ended=None)
            job.state = JobState.QUEUED.value
            self._send(do="forget", job=job.id)
            self._send(do="add", **self._message_of(job))
        else:
            self._send(do=word, job=job.id)

    def change(self, job: StoredJob, fields: Mapping[str, Any]) -> None:
        """Give a job that has not ended another budget or priority.

        Raises:
            StoreError: it has ended.
            LimitError: its tenant may not have such a priority.
        """
        if JobState(job.state) in (JobState.SUCCEEDED, JobState.CANCELLED):
            raise StoreError(f"job {job.name!r} has {job.state}; nothing of it can be changed")
        config = JobConfig.model_validate({**job.spec, **fields})
        if config.priority > int(job.spec["priority"]):
            self.steward.limits.priority(job.tenant_id, config.priority)
        found = {"budget": config.budget, "priority": config.priority}
        self.store.change_job(job.id, spec={**job.spec, **found})
        self._send(do="change", job=job.id, fields=found)

    def delete(self, job: StoredJob) -> None:
        """Forget a job that has ended, and its files.

        Raises:
            StoreError: it has not ended.
        """
        if not JobState(job.state).final:
            raise StoreError(f"job {job.name!r} has not ended; cancel it first")
        self._send(do="forget", job=job.id)
        self.adapters.forget_shares(job.id)
        self.store.delete_job(job.id)
        shutil.rmtree(self.directory(job.id).path, ignore_errors=True)

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """What a running job does now; what it waits for."""
        found = self.link.progress.get(job_id)
        return {**found, "phase": WAITS} if found is not None and self.workers.waits(job_id) else found

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

    def _stored_by(self, jobs: list[str]) -> int:
        """Bytes of the saved versions of some jobs."""
        folders = (self.directory(job).path / "versions" for job in jobs)
        return sum(path.stat().st_size for folder in folders for path in folder.glob("v*/*"))

    # --- events -----------------------------------------------------------------------------------------------------------

    def _hear(self, job_id: str, event: str, data: Mapping[str, Any]) -> None:
        """Keep what the engine tells of a job; runs in a worker thread, one event after another."""
        if event == "usage":
            self._keep(lambda: self.steward.hear(data))
            return
        also = self.steward.ledger.step(job_id, data) if event == "step" else None
        key, told, fields = _as_kept(event, data, self.settings.directory)
        self._keep(lambda: self.store.tell(job_id, event, key, told, also, **fields))
        self.news.announce(job_id)
        if fields.get("ended"):
            self.starts.wake()
            self._keep(lambda: self.workers.ended(job_id))

    def _keep(self, write: Callable[[], object]) -> None:
        """Write it down; while the database is away, or its disk is full, the engine waits with what it tells next."""
        while True:
            try:
                write()
                self.unwritten = ""
                return
            except OperationalError as error:
                self.unwritten = f"the database cannot be written: {error.orig}"
                if self.link.closing:
                    raise
            time.sleep(0.5)

    # --- the engine -------------------------------------------------------------------------------------------------------

    def _send(self, **message: Any) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self.link.send(**message))

    def _open_jobs(self) -> list[dict[str, Any]]:
        """What an engine that starts has to take up."""
        found = []
        for job in self.store.open_jobs():
            if job.waits:
                continue  # `starts` hands it over
            try:
                if job.wanted == "cancel":
                    told = {"state": JobState.CANCELLED.value, "message": f"cancelled after step {job.step}"}
                    self._hear(job.id, "state", told)
                else:
                    found.append(self._message_of(job))
            except MotetError as error:
                self._hear(job.id, "state", {"state": JobState.FAILED.value, "message": str(error)})
        return found

    def _hand_over(self, job: StoredJob) -> None:
        self._send(do="add", **self._message_of(job))

    def _message_of(self, job: StoredJob) -> dict[str, Any]:
        self.starts.keep(job)
        who = Principal(job.tenant_id, "", "", "member")
        found = self._for_engine(who, JobConfig.model_validate(job.spec), job.id)
        return {"job": found, "wanted": job.wanted, **self.steward.of_job(job)}

    def _for_engine(self, who: Principal, config: JobConfig, job_id: str) -> dict[str, Any]:
        def file(name: str) -> Path | None:
            found = self.store.file(who, name)
            return None if found is None else self.file_path(found.id, found.filename)

        return specs.for_engine(config, job_id, file, self.starts.path(job_id))

    def file_path(self, file_id: str, filename: str) -> Path:
        """Where an uploaded file lies; its ending says what it is."""
        ending = Path(filename).suffix.lower()
        if ending not in (".jsonl", ".parquet"):
            raise ConfigError(f"{filename!r} must end in .jsonl or .parquet")
        return self.settings.directory / "files" / f"{file_id}{ending}"


def _as_kept(event: str, data: Mapping[str, Any], directory: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """Of a step or a state: the event's key, what is told of it, and what the job's row gets."""
    if event == "step":
        fields: dict[str, Any] = {"step": int(data["step"]) + ("loss" in data)}
        if "loss" in data:
            fields["reward"] = data.get("reward")
        return f"{data['step']}", data, fields
    state, message = JobState(data["state"]), str(data.get("message", ""))
    for place in ("files", "run", ""):  # where things lie on this machine is nobody's business
        message = message.replace(f"{directory / place}/", "")
    fields = {"state": state.value, "message": message, "ended": now() if state.final else None}
    return f"{time.time_ns()}", {**data, "message": message}, fields
