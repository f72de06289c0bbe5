"""What a tenant may do to a job: submit, steer, change and delete it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from motet.algorithms.client import ClientDriven
from motet.cluster.client import EngineClient
from motet.cluster.messages import Action, ChangeJob, ForgetJob, SteerJob
from motet.config import JobConfig
from motet.errors import ConfigError, StoreError
from motet.service.adapters.adapters import Adapters
from motet.service.bases import Bases
from motet.service.database.store import Store, find_job
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.events import ANY_JOB, EventBus
from motet.service.jobs.handover import Handover
from motet.service.jobs.queue import AT_ONCE, JobQueue, StartCondition, StartPlan
from motet.service.jobs.validation import Allowed, validated
from motet.service.storage import Storage
from motet.service.tenants.quotas import QuotaEnforcer, Quotas
from motet.types import JobState


class Submissions:
    """Takes jobs in, and passes on what their owners ask of them."""

    def __init__(
        self,
        allowed: Allowed,
        bases: Bases,
        store: Store,
        storage: Storage,
        bus: EventBus,
        adapters: Adapters,
        quotas: Quotas,
        enforcer: QuotaEnforcer,
        queue: JobQueue,
        handover: Handover,
        engine: EngineClient,
    ) -> None:
        """`allowed` is what jobs may use."""
        self._allowed, self._bases = allowed, bases
        self._store, self._storage, self._bus, self._adapters = store, storage, bus, adapters
        self._quotas, self._enforcer, self._queue = quotas, enforcer, queue
        self._handover, self._engine = handover, engine
        self._changing = threading.Lock()

    def check(
        self, who: Principal, tree: Mapping[str, Any], condition: StartCondition = AT_ONCE, *, driven: bool = False
    ) -> tuple[JobConfig, StartPlan]:
        """A job as it would be taken in, and its start with its base; `driven` is one that a client drives.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        base = self._bases.named(tree.get("base"))
        config = validated({name: value for name, value in tree.items() if name != "base"}, self._allowed, base)
        if isinstance(config.algorithm, ClientDriven) and not driven:
            raise ConfigError(
                "algorithm.type client: only a client makes such a job; the page about the Tinker protocol has how"
            )
        if self._bases.hides(config.name):
            raise ConfigError(f"name: {config.name!r} is a base of this service; give the job another")
        self._quotas.check_size(who.tenant_id, config)
        self._handover.tree(who, config, "job")  # what it names has to be there now
        return config, self._queue.plan(who, config, base, condition)

    def submit(
        self,
        who: Principal,
        tree: Mapping[str, Any],
        idempotency: str | None,
        condition: StartCondition = AT_ONCE,
        *,
        driven: bool = False,
    ) -> StoredJob:
        """Check a job, keep it, and hand it to the engine as soon as it may start.

        Raises:
            MotetError: it cannot be taken, and why.
        """
        if (same := self._store.submitted(who, idempotency)) is not None:
            return same
        config, plan = self.check(who, tree, condition, driven=driven)
        with self._quotas.admitting(who.tenant_id, config):
            job = self._queue.submit(who, config, idempotency, plan)
            self._quotas.stored.add(who.tenant_id, job.id, 0)
        if job.state == JobState.QUEUED.value and job.step == 0 and not job.waits:
            self._handover.hand_over(job)
        self._bus.publish(job.id, ANY_JOB)
        return job

    def steer(self, job: StoredJob, action: Action) -> None:
        """Pause, resume or cancel a job.

        Raises:
            StoreError: its state does not allow it.
            ConfigError: what it names is gone.
            LimitError: a limit keeps it where it is.
        """
        state = JobState(job.state)
        if state in (JobState.SUCCEEDED, JobState.CANCELLED) or (state is JobState.FAILED and action != "resume"):
            raise StoreError(f"job {job.name!r} has {state.value}; it cannot be asked to {action}")
        if action == "resume" and state in (JobState.PAUSED, JobState.FAILED):
            self._enforcer.check_resume(job)
        job.wanted = {"pause": "pause", "resume": "run", "cancel": "cancel"}[action]
        # before anything is changed: what it names may be gone
        again = state is JobState.FAILED and not job.waits and self._handover.message(job) is not None
        self._store.change_job(job.id, wanted=job.wanted)
        if self._queue.steer(job, action):
            return
        if again:
            self._store.change_job(job.id, state=JobState.QUEUED.value, message="", ended=None)
            self._engine.send(ForgetJob(job.id))  # where the host that it failed on still knows it
            self._handover.hand_over(job)
        elif not self._handover.settle(job):
            self._engine.send(SteerJob(job.id, action))

    def change(self, job: StoredJob, fields: Mapping[str, Any]) -> None:
        """Give a job that has not ended another budget or priority.

        Raises:
            StoreError: it has ended.
            LimitError: its tenant may not have such a priority.
        """
        if JobState(job.state) in (JobState.SUCCEEDED, JobState.CANCELLED):
            raise StoreError(f"job {job.name!r} has {job.state}; nothing of it can be changed")
        with self._changing:  # of two that come together, the second changes what the first has left
            with self._store.transaction() as session:
                row = find_job(session, job.id)
                if row is None:
                    return
                config = JobConfig.model_validate({**row.spec, **fields})
                if config.priority > int(row.spec["priority"]):
                    self._quotas.check_priority(job.tenant_id, config.priority)
                row.spec = {**row.spec, "budget": config.budget, "priority": config.priority}
            self._engine.send(ChangeJob(job.id, config.budget, config.priority))

    def delete(self, job: StoredJob) -> None:
        """Forget a job that has ended, and its files.

        Raises:
            StoreError: it has not ended.
        """
        if not JobState(job.state).final:
            raise StoreError(f"job {job.name!r} has not ended; cancel it first")
        self._engine.send(ForgetJob(job.id))
        self._adapters.forget_shares(job.id)
        self._store.delete_job(job.id)
        self._storage.job(job.id).delete()
        self._quotas.stored.forget(job.id)
