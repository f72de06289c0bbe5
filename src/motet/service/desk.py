"""What the routes share: the store, the engine's process, and the directories, with what a tenant may do to a job."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from motet.config import JobConfig
from motet.config.service import ServiceConfig
from motet.errors import ConfigError, StoreError
from motet.runtime.checkpoint import JobDirectory
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import AWAY, Store, find_job
from motet.service.database.tables import StoredJob, now
from motet.service.database.tenants import Principal
from motet.service.engine.host_link import HostLink
from motet.service.events import watching
from motet.service.events.news import News
from motet.service.http.rate import RateLimit
from motet.service.http.turns import Turns
from motet.service.jobs import specs
from motet.service.jobs.starts import NOW, UNFIT, Plan, Starts, When
from motet.service.rewards import scoring
from motet.service.rewards.grading import Grading
from motet.service.rewards.workers import WAITS, RewardWorkers
from motet.service.tenants.steward import Steward
from motet.tasks.reward_http import Addresses, HttpRewards
from motet.tasks.reward_installed import Installed
from motet.tasks.reward_walls import Walls
from motet.types import JobState


@dataclass(frozen=True)
class Settings:
    """How a service is run."""

    base: str
    directory: Path
    """Jobs, uploaded files, logs, and the database unless it has a URL."""
    database: str = ""
    """A SQLAlchemy URL; SQLite in the directory without one."""
    config: ServiceConfig = field(default_factory=ServiceConfig)
    """What its configuration file says."""
    open_to_all: bool = False
    """No key is needed: only for a service that this machine alone can reach."""
    hub: bool = False
    """Whether jobs may read data from the hub."""
    rewards: Mapping[str, Installed] = field(default_factory=dict)
    """The functions of `config.rewards`, looked at: those that jobs may use by name, besides the built-in rewards."""

    @property
    def allowed(self) -> specs.Allowed:
        """What jobs may use; rewards may be asked of all but private hosts where none are named."""
        hosts = None if self.config.reward_hosts is None else tuple(self.config.reward_hosts)
        walls = Walls(required=True, exempt=frozenset(self.config.unwalled))
        return specs.Allowed(self.hub, self.rewards, Addresses(hosts), walls, self.config.largest)

    @property
    def hello(self) -> dict[str, Any]:
        """The first message to the engine's process."""
        return {
            "base": self.base,
            "run": str(self.directory / "run"),
            "engine": self.config.engine.model_dump(mode="json"),
            "rollout": self.config.rollout.model_dump(mode="json"),
            "rewards": {name: asdict(one) for name, one in self.rewards.items()},
            "unwalled": self.config.unwalled,
            "patience_seconds": self.config.patience_seconds,
            "largest": asdict(self.config.largest),
        }


class Desk:
    """Takes jobs in, passes them to the engine, and writes down what becomes of them."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings, self.store = settings, store
        config = settings.config
        log, score = settings.directory / "engine.log", functools.partial(scoring.answer, self)
        self.workers = RewardWorkers(store, config.lease_seconds)
        self.link = HostLink(settings.hello, self.hear, self._open_jobs, log, score, self.workers.rest)
        self._allowed = settings.allowed
        self.addresses = HttpRewards(self._allowed.addresses)
        self.leaving = False
        """Whether it stops: nobody is to wait for anything any more."""
        self.unwritten = ""
        """Why what the engine tells cannot be kept just now."""
        self.news = News(lambda: self._loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Future[Any] | None = None
        self._changing = threading.Lock()
        self.adapters = Adapters(store, settings.directory / "adapters", self.version)
        self.grading = Grading(self.link, settings.base, self.adapters)
        self.steward = Steward(store, config.limits, config.engine.slots, self._stored_by, self._send)
        self.limits, self.ledger = self.steward.limits, self.steward.ledger
        self.link.counted = self.steward.count
        self.rate = RateLimit(config.rate)
        self.checking, self.reading = Turns(), Turns()  # jobs; files of rows, which may take minutes
        self.starts = Starts(store, self.adapters, settings.directory / "run", self.hear, self._hand_over)

    async def open(self) -> None:
        """Start the engine."""
        self._loop = asyncio.get_running_loop()
        self.link.start()
        self._watching = asyncio.gather(self.starts.watch(), self.steward.watch())

    def leave(self, seconds: float) -> None:
        """Let everybody go who waits for news or for work; answers under way have so many seconds."""
        self.leaving = True
        self.news.close()
        self.workers.hush()
        told = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self.link.refuse, told)

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
        self.checking.close()
        self.reading.close()
        self.news.close()

    # --- jobs -------------------------------------------------------------------------------------------------------------

    def checked(self, who: Principal, tree: Mapping[str, Any], when: When = NOW) -> tuple[JobConfig, Plan]:
        """A job as it would be taken in, and its start.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        config = specs.validated(tree, self._allowed)
        self.limits.fits(who.tenant_id, config)
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
            ConfigError: what it names is gone.
            LimitError: a limit keeps it where it is.
        """
        state = JobState(job.state)
        if state in (JobState.SUCCEEDED, JobState.CANCELLED) or (state is JobState.FAILED and word != "resume"):
            raise StoreError(f"job {job.name!r} has {state.value}; it cannot be asked to {word}")
        if word == "resume" and state in (JobState.PAUSED, JobState.FAILED):
            self.steward.may_resume(job)
        job.wanted = {"pause": "pause", "resume": "run", "cancel": "cancel"}[word]
        # before anything is changed: what it names may be gone
        again = self._message_of(job) if state is JobState.FAILED and not job.waits else None
        self.store.change_job(job.id, wanted=job.wanted)
        if self.starts.steer(job, word):
            return
        if again is not None:  # the engine may have started since, and not know it
            self.store.change_job(job.id, state=JobState.QUEUED.value, message="", ended=None)
            job.state = JobState.QUEUED.value
            self._send(do="forget", job=job.id)
            self._send(do="add", **again)
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
        with self._changing:  # of two that come together, the second changes what the first has left
            with self.store.transaction() as session:
                row = find_job(session, job.id)
                if row is None:
                    return
                config = JobConfig.model_validate({**row.spec, **fields})
                if config.priority > int(row.spec["priority"]):
                    self.limits.priority(job.tenant_id, config.priority)
                found = {"budget": config.budget, "priority": config.priority}
                row.spec = {**row.spec, **found}
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

    def _stored_by(self, jobs: list[str]) -> int:
        return sum(map(_stored, map(self.directory, jobs)))

    def version(self, job: StoredJob, wanted: str) -> tuple[int, Path] | None:
        """A saved version of a job: a number, `latest` or `best`."""
        directory = self.directory(job.id)
        versions = directory.versions()
        committed = directory.newest() if versions else None
        if committed is None:
            return None
        number = {
            "latest": versions[-1],
            "best": versions[-1] if committed.best_version is None else committed.best_version,
        }
        chosen = number.get(wanted, next((one for one in versions if str(one) == wanted), None))
        return None if chosen not in versions else (chosen, directory.version(chosen))

    # --- events -----------------------------------------------------------------------------------------------------------

    def hear(self, job_id: str, event: str, data: Mapping[str, Any]) -> None:
        """Keep what the engine tells of a job; runs in a worker thread, one event after another."""
        if event == "usage":
            self._keep(lambda: self.steward.hear(data))
            return
        also = self.ledger.step(job_id, data) if event == "step" else None
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
            except AWAY as error:
                self.unwritten = f"the database cannot be written: {getattr(error, 'orig', error)}"
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
                    self.hear(job.id, "state", told)
                else:
                    found.append(self._message_of(job))
            except UNFIT as error:
                self.hear(job.id, "state", {"state": JobState.FAILED.value, "message": str(error)})
        return found

    def _hand_over(self, job: StoredJob) -> None:
        """Give a job to the engine; one whose file or start is gone has failed."""
        try:
            self._send(do="add", **self._message_of(job))
        except UNFIT as error:
            self.hear(job.id, "state", {"state": JobState.FAILED.value, "message": str(error)})

    def _message_of(self, job: StoredJob) -> dict[str, Any]:
        self.starts.keep(job)
        who = Principal.member_of(job.tenant_id)
        found = self._for_engine(who, JobConfig.model_validate(job.spec), job.id)
        told = watching.told(self.store, job.id)
        return {"job": found, "wanted": job.wanted, "told": told, **self.steward.of_job(job)}

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


def _stored(directory: JobDirectory) -> int:
    """Bytes of a job's saved versions."""
    size = 0
    for number in directory.versions():
        with contextlib.suppress(FileNotFoundError):  # the engine clears older versions away meanwhile
            size += sum(path.stat().st_size for path in directory.version(number).glob("*"))
    return size


def _kept_text(text: str) -> str:
    """A text without what a database cannot keep: a reason may hold whatever a reward worker wrote."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _as_kept(event: str, data: Mapping[str, Any], directory: Path) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """Of a step or a state: the event's key, what is told of it, and what the job's row gets."""
    if event == "step":
        fields: dict[str, Any] = {"step": int(data["step"]) + ("loss" in data)}
        if "loss" in data:
            fields["reward"] = data.get("reward")
        return f"{data['step']}", data, fields
    state, message = JobState(data["state"]), _kept_text(str(data.get("message", "")))
    for place in ("files", "run", ""):  # where things lie on this machine is nobody's business
        message = message.replace(f"{directory / place}/", "")
    fields = {"state": state.value, "message": message, "ended": now() if state.final else None}
    return f"{time.time_ns()}", {**data, "message": message}, fields
