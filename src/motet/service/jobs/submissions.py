"""Actions of a tenant on jobs: submit, steer, change and delete."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from motet.algorithms.client import ClientDriven
from motet.config import JobConfig
from motet.config.step_tokens import check_step
from motet.core.errors import ConfigError, MotetError, RewardError, StoreError
from motet.core.types import JobState, Wanted
from motet.hosts.hosts import Hosts, longest_sequence, usual_step
from motet.hosts.messages import ChangeJob, ForgetJob, SteerJob
from motet.rewards.sent_rewards import faults_of
from motet.runtime.journal import Journal
from motet.runtime.progress import STOPPED_EARLY
from motet.service.adapters.adapters import Adapters
from motet.service.bases import Bases
from motet.service.database.store import Store, find_job
from motet.service.database.tables import OF_CLIENTS, StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import let_go
from motet.service.events import ANY_JOB, EventBus
from motet.service.jobs.handover import Handover
from motet.service.jobs.queue import JobQueue, Planned
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.validation import Allowed, check_room, validated
from motet.service.secrets import Secrets
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import QuotaEnforcer, Quotas

MOST_TOLD = 50
"""Most jobs of a request whose errors are reported together."""


@dataclass(frozen=True)
class GivenJob:
    """A job as submitted."""

    tree: Mapping[str, Any]
    """As in a job file, with its base."""
    after: Sequence[str] = ()
    """Names or ids of jobs that must succeed before it starts."""
    at: float | None = None
    """Earliest start, in Unix seconds."""
    driven: bool = False
    """Whether a client drives it."""


class Submissions:
    """Accepts jobs, and forwards their owners' requests."""

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
        hosts: Hosts,
        secrets: Secrets,
        recorder: EventRecorder,
        ledger: Ledger,
    ) -> None:
        """`allowed`: resources that jobs may use."""
        self._allowed, self._bases = allowed, bases
        self._store, self._storage, self._bus, self._adapters = store, storage, bus, adapters
        self._quotas, self._enforcer, self._queue = quotas, enforcer, queue
        self._handover, self._hosts, self._secrets = handover, hosts, secrets
        self._recorder, self._ledger = recorder, ledger
        self._changing = threading.Lock()

    def check(self, who: Principal, jobs: Sequence[GivenJob], idempotency: str | None = None) -> list[Planned]:
        """Check jobs that are submitted together; a job may start from the adapter of an earlier one.

        Raises:
            MotetError: a job is not accepted; the message says why, for each of several jobs.
        """
        planned: list[Planned] = []
        wrong: list[tuple[str, MotetError]] = []
        names = set[str]()
        for number, job in enumerate(jobs):
            try:
                config, base = self._config(who, job)
                if config.name in names:
                    raise ConfigError("name: another job of this request has it; give each its own")
                names.add(config.name)
                if (config.adapter.init or "").partition("@")[0] in (name for name, _ in wrong):
                    continue  # the error of the job that it starts from is reported instead
                key = f"{idempotency}#{number}" if idempotency and len(jobs) > 1 else idempotency
                planned.append(replace(self._plan(who, config, base, job, planned), idempotency=key))
            except MotetError as error:
                wrong.append((str(job.tree.get("name")), error))
                let_go(error)  # its frames hold this list
        wrong += self._wrong_code(who, planned)
        if len(jobs) == 1 and wrong:
            raise wrong[0][1]
        if wrong:
            kinds = {type(error) for _, error in wrong}
            kind = StoreError if kinds == {StoreError} else ConfigError
            raise kind("\n".join(f"job {name:.100}: {error}" for name, error in wrong[:MOST_TOLD])) from wrong[0][1]
        return planned

    def _wrong_code(self, who: Principal, planned: Sequence[Planned]) -> list[tuple[str, MotetError]]:
        """The jobs whose rewards' files are wrong; a file that many have is compiled once."""
        sent = [
            (job.config.name, (reward.name, reward.code))
            for job in planned
            for reward in job.config.rewards
            if reward.code is not None
        ]
        each = sorted({code for _, code in sent})
        faults = dict(zip(each, faults_of(each, partial(self._ledger.count_cpu, who.tenant_id)), strict=True))
        return [(name, RewardError(faults[code])) for name, code in sent if faults[code]]

    def _plan(
        self, who: Principal, config: JobConfig, base: str, given: GivenJob, above: Sequence[Planned] = ()
    ) -> Planned:
        planned = self._queue.plan(who, config, base, given.after, given.at, above)
        self._quotas.check_size(who.tenant_id, planned.config)  # it has its adapter's shape now
        check_room(planned.config, self._allowed, base)
        return planned

    def _config(self, who: Principal, job: GivenJob) -> tuple[JobConfig, str]:
        tree = job.tree
        base = self._bases.named(tree.get("base"))
        config = validated({name: value for name, value in tree.items() if name != "base"}, self._allowed, base)
        if isinstance(config.algorithm, ClientDriven) and not job.driven:
            raise ConfigError(
                "algorithm.type client: only a client makes such a job; the page about the Tinker protocol has how"
            )
        if self._bases.hides(config.name):
            raise ConfigError(f"name: {config.name!r} is a base of this service; give the job another")
        self._quotas.check_size(who.tenant_id, config)
        most = self._quotas.of(who.tenant_id).step_tokens
        if most := usual_step(self._hosts, base) if most == "auto" else most:
            check_step(config, most, context=longest_sequence(self._hosts, base))
        self._handover.tree(who, config, "job")  # files that it names must exist now
        return config, base

    def submit(self, who: Principal, jobs: Sequence[GivenJob], idempotency: str | None) -> list[StoredJob]:
        """Check jobs, store all or none, and hand each to the engine as soon as it may start.

        Raises:
            MotetError: a job is not accepted; the message says why.
        """
        if (idempotency or "").startswith(OF_CLIENTS) and not all(one.driven for one in jobs):
            raise ConfigError(
                f"Idempotency-Key: those that begin with {OF_CLIENTS!r} are for clients' models; use another"
            )
        if same := self._submitted(who, idempotency, len(jobs)):
            return same
        try:
            planned = self.check(who, jobs, idempotency)
            sealed = [replace(one, config=self._secrets.sealed(one.config)) for one in planned]
            configs = [one.config for one in planned]
            # drafts first: they take long, and one request of all tenants is admitted at a time
            with self._queue.drafts(who, planned) as drafts, self._quotas.admitting(who.tenant_id, configs):
                submitted = self._queue.submit(who, sealed, drafts)
                for job in submitted:
                    self._quotas.stored.changed(job.id)
                for job in submitted:
                    self._quotas.stored.add(who.tenant_id, job.id, 0)
        except StoreError:
            if same := self._submitted(who, idempotency, len(jobs)):  # by a concurrent request
                return same
            raise
        for job in submitted:
            if job.state == JobState.QUEUED.value and job.step == 0 and not job.waits:
                self._handover.hand_over(job)
            self._bus.publish(job.id, ANY_JOB)
        return submitted

    def _submitted(self, who: Principal, idempotency: str | None, n: int) -> list[StoredJob]:
        """Jobs submitted earlier with the same key."""
        keys = [f"{idempotency}#{number}" for number in range(n)] if idempotency and n > 1 else [idempotency]
        same = [self._store.submitted(who, key) for key in keys]
        return [] if any(job is None for job in same) else [job for job in same if job is not None]

    def steer(self, job: StoredJob, wanted: Wanted) -> None:
        """Pause, resume or cancel a job.

        Raises:
            StoreError: its state does not allow it.
            ConfigError: something that it names is missing.
            LimitError: a limit prevents it.
        """
        state = JobState(job.state)
        if state in (JobState.SUCCEEDED, JobState.CANCELLED) or (state is JobState.FAILED and wanted is not Wanted.RUN):
            why = f" ({job.message})" if job.message.startswith(STOPPED_EARLY) else ""
            raise StoreError(f"job {job.name!r} has {state.value}{why}; it cannot be asked to {wanted.word}")
        if wanted is Wanted.RUN and state in (JobState.PAUSED, JobState.FAILED):
            self._enforcer.check_resume(job)
            again = Journal(self._storage.job(job.id).path).work_again()
            self._quotas.check_work(job.tenant_id, again, 0, "resuming this job, which computes gradients again,")
        job.wanted = wanted.value
        # before any change, because something that it names may be missing
        again = state is JobState.FAILED and not job.waits and self._handover.message(job) is not None
        self._store.change_job(job.id, wanted=job.wanted)
        if self._queue.steer(job, wanted) or (not again and self._handover.settle(job)):
            self._check_steered(job, wanted)
        elif again:
            self._ledger.begin_again(job.id)
            self._store.change_job(job.id, state=JobState.QUEUED.value, message="", ended=None)
            self._hosts.send(ForgetJob(job.id))  # the host on which it failed may still know it
            self._handover.hand_over(job)
        else:
            self._hosts.send(SteerJob(job.id, wanted))

    def _check_steered(self, job: StoredJob, wanted: Wanted) -> None:
        current = self._store.job_by_id(job.id)
        state = None if current is None else JobState(current.state)
        if state is None or (state.final and (state, wanted) != (JobState.CANCELLED, Wanted.CANCEL)):
            raise StoreError(f"job {job.name!r} has just ended; it cannot be asked to {wanted.word}")

    def change(self, job: StoredJob, fields: Mapping[str, Any]) -> None:
        """Change the budget or priority of a job that has not ended.

        Raises:
            StoreError: it has ended.
            LimitError: its tenant may not use this priority.
        """
        if JobState(job.state) in (JobState.SUCCEEDED, JobState.CANCELLED):
            raise StoreError(f"job {job.name!r} has {job.state}; nothing of it can be changed")
        with self._changing:  # concurrent changes apply in sequence
            with self._store.transaction() as session:
                row = find_job(session, job.id)
                if row is None:
                    return
                config = JobConfig.model_validate({**row.spec, **fields})
                if config.priority > int(row.spec["priority"]):
                    self._quotas.check_priority(job.tenant_id, config.priority)
                row.spec = {**row.spec, "budget": config.budget, "priority": config.priority}
            self._hosts.send(ChangeJob(job.id, config.budget, config.priority))

    def delete(self, job: StoredJob) -> None:
        """Delete a job and its files. Raises `StoreError` if it has not ended."""
        if not JobState(job.state).final:
            raise StoreError(f"job {job.name!r} has not ended; cancel it first")
        self._hosts.send(ForgetJob(job.id))
        self._adapters.forget_shares(job.id)
        self._storage.job(job.id).delete()  # files first: after a crash, the job can be deleted again
        self._recorder.delete_observed(job)
        self._ledger.keep_owner(job)
        self._store.delete_job(job.id)
        self._quotas.stored.forget(job.id)
