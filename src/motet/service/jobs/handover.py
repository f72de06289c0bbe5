"""How jobs get from the database to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motet.cluster.client import EngineClient
from motet.cluster.messages import Action, AddJob, ChangeJob, Held, Nudge, ReleaseJob, SetRule, SteerJob, ToEngine
from motet.config import JobConfig
from motet.errors import ConfigError, MotetError
from motet.service.bases import Bases
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.events import EventLog
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.recorder import EventRecorder
from motet.service.secrets import Secrets
from motet.service.storage import Storage
from motet.service.tenants.quotas import QuotaEnforcer
from motet.types import JobState

UNFIT = (MotetError, OSError, ValueError)
"""What is raised where a job cannot be taken up as it stands: it fails with the reason, and no other does."""

_ACTIONS: dict[str, Action] = {"run": "resume", "pause": "pause", "cancel": "cancel"}


class Handover:
    """Gives jobs to the engine, with paths for what they name; one whose file or start is gone has failed."""

    def __init__(
        self,
        store: Store,
        storage: Storage,
        log: EventLog,
        recorder: EventRecorder,
        initial: InitialAdapters,
        enforcer: QuotaEnforcer,
        engine: EngineClient,
        bases: Bases,
        secrets: Secrets,
    ) -> None:
        self._store, self._storage, self._log, self._recorder = store, storage, log, recorder
        self._initial, self._enforcer, self._engine, self._bases = initial, enforcer, engine, bases
        self._secrets = secrets

    def hand_over(self, job: StoredJob) -> None:
        """Give a job to the engine."""
        if (missing := self._bases.missing(job.base)) is not None:
            self._wait(job, missing)
            return
        try:
            self._engine.send(self.message(job))
        except UNFIT as error:
            self._recorder.record_state(job.id, JobState.FAILED, str(error))

    def open_jobs(self) -> list[AddJob]:
        """The messages of all jobs that a host has to take up.

        Left out are those that wait for others, and those that a host has: it says itself what becomes of them.
        """
        messages = []
        for job in self._store.open_jobs():
            if job.waits or self._engine.has(job.id):
                continue
            try:
                if job.wanted == "cancel":
                    self._recorder.record_state(job.id, JobState.CANCELLED, f"cancelled after step {job.step}")
                elif (missing := self._bases.missing(job.base)) is not None:
                    self._wait(job, missing)
                else:
                    messages.append(self.message(job))
            except UNFIT as error:
                self._recorder.record_state(job.id, JobState.FAILED, str(error))
        return messages

    def reconcile(self, held: Sequence[Held]) -> dict[str, list[ToEngine]]:
        """What hosts are told of jobs that they have of the service before, by job: it may have been asked meanwhile."""
        return {one.job: self._told_again(one) for one in held}

    def _told_again(self, held: Held) -> list[ToEngine]:
        job = self._store.job_by_id(held.job)
        if job is None or JobState(job.state).final:
            return [ReleaseJob(held.job)]  # it is not known here, or not any more
        rule, spec = self._enforcer.rule_with_job(job), job.spec
        messages: list[ToEngine] = [SetRule(job.tenant_id, rule), ChangeJob(job.id, spec["budget"], spec["priority"])]
        if job.wanted != held.wanted:
            messages.append(SteerJob(job.id, _ACTIONS[job.wanted]))
        return [*messages, Nudge(job.id)]

    def _wait(self, job: StoredJob, why: str) -> None:
        """Leave a job as it is until the service is started with what it needs."""
        if job.message != why:
            paused = job.state == JobState.PAUSED.value
            self._recorder.record_state(job.id, JobState.PAUSED if paused else JobState.QUEUED, why)

    def message(self, job: StoredJob) -> AddJob:
        """What the engine has to know of a job.

        Raises:
            MotetError, OSError, ValueError: it cannot be taken up as it stands (`UNFIT`).
        """
        base = self._bases.of(job.base)
        self._initial.keep(job)
        config = JobConfig.model_validate(job.spec)
        for reward in config.rewards:
            self._secrets.opened(reward)  # it has to be there when the engine asks
        tree = self.tree(Principal.member_of(job.tenant_id), config, job.id)
        first_step = self._log.first_missing_step(job.id)
        rule = self._enforcer.rule_with_job(job)
        return AddJob(tree, job.wanted, first_step, job.tenant_id, rule, config.slots, base)

    def tree(self, who: Principal, config: JobConfig, job_id: str) -> dict[str, Any]:
        """The job under its engine-side name, with paths for what it names.

        Raises:
            ConfigError: a file is not there.
        """
        tree = config.model_dump(mode="json")
        tree["seed"] = config.effective_seed  # of the name that its owner gave it
        tree["name"] = job_id
        for field in ("source", "eval_source"):
            name = tree["data"][field]
            if name is not None and name.startswith("file-"):
                tree["data"][field] = str(self._file(who, name, field))
        if tree["adapter"]["init"] is not None:
            tree["adapter"]["init"] = str(self._initial.path(job_id))
        return tree

    def _file(self, who: Principal, name: str, field: str) -> Path:
        file = self._store.file(who, name)
        if file is None:
            raise ConfigError(f"data.{field}: there is no file {name}")
        return self._storage.upload(file.id, file.filename)
