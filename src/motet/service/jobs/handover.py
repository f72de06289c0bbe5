"""Passes jobs from the database to the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Select, case, func, select
from sqlalchemy.exc import DataError, DBAPIError

from motet.config import JobConfig
from motet.core.errors import ConfigError, MotetError
from motet.core.types import JobState, Wanted
from motet.hosts.hosts import Hosts
from motet.hosts.messages import AddJob, ChangeJob, Held, Nudge, ReleaseJob, SetRule, SteerJob, ToHost
from motet.rewards.sent_rewards import REFUSED, names_code
from motet.runtime.directory_checks import RULES, Stored
from motet.runtime.slots import Claim, Rule
from motet.service.bases import Bases
from motet.service.database.store import OPEN, Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.events import EventLog
from motet.service.jobs.initial_adapter import InitialAdapters, stored_config
from motet.service.jobs.recorder import EventRecorder
from motet.service.secrets import Secrets
from motet.service.storage import Storage
from motet.service.tenants.quotas import QuotaEnforcer

UNFIT = (MotetError, OSError, ValueError)
"""Raised if a job cannot start as it is: it fails with the reason; others are not affected."""
_PRIORITY = func.coalesce(StoredJob.spec["priority"].as_integer(), 0)
_DAMAGED = "malformed JSON"
"""How SQLite tells it; PostgreSQL has a class of errors, among them a NUL character in JSON."""
_UNREADABLE = "the configuration that is stored for this job cannot be read; submit it again"


class Handover:
    """Gives jobs to the engine, with paths for the files and adapters that they name; a job with a missing one fails."""

    def __init__(
        self,
        store: Store,
        storage: Storage,
        log: EventLog,
        recorder: EventRecorder,
        initial: InitialAdapters,
        enforcer: QuotaEnforcer,
        hosts: Hosts,
        bases: Bases,
        secrets: Secrets,
        sent: bool = False,
    ) -> None:
        """`sent`: whether tenants may send rewards."""
        self._sent = sent
        self._store, self._storage, self._log, self._recorder = store, storage, log, recorder
        self._initial, self._enforcer, self._hosts, self._bases = initial, enforcer, hosts, bases
        self._secrets = secrets

    def hand_over(self, job: StoredJob) -> None:
        """Let the engine have a job when its turn comes."""
        if (missing := self._missing(job)) is not None:
            self._wait(job, missing)
            return
        try:
            self._initial.keep(job)
            config = stored_config(job)
            # reports a missing file before the job's turn
            self.tree(Principal.member_of(job.tenant_id), config, job.id)
            self._hosts.look(Claim("", job.tenant_id, config.priority, config.slots, self._bases.of(job.base)))
        except UNFIT as error:
            self._recorder.record_state(job.id, JobState.FAILED, str(error))

    def settle(self, job: StoredJob) -> bool:
        """Record the requested state of a job that no host has, if it has not just ended; False if a host must be told."""
        if not self._hosts.take_back(job.id):
            return False
        current = self._store.job_by_id(job.id)
        if current is None or JobState(current.state).final:
            return True
        job, state = current, JobState(current.state)
        if job.wanted == Wanted.CANCEL:
            self._recorder.record_state(job.id, JobState.CANCELLED, _cut_off(job))
        elif job.wanted == Wanted.PAUSE and state is not JobState.PAUSED:
            self._recorder.record_state(job.id, JobState.PAUSED, "")
        elif job.wanted == Wanted.RUN and state is JobState.PAUSED:
            self._recorder.record_state(job.id, JobState.QUEUED, "")
        self._hosts.look()
        return True

    def open_jobs(self) -> list[AddJob]:
        """Messages for jobs that hosts may take now, with tenants taking turns, and one further job of each tenant.

        Excludes jobs that wait for others, and jobs that a host has and reports itself.
        """
        messages, given, rules = list[AddJob](), Counter[tuple[str, str]](), dict[str, Rule]()
        hosts, rooms = self._hosts.jobs, dict[tuple[str, str], int | None]()
        turn = in_turn(hosts.all(), hosts.most)
        try:
            jobs = self._store.scalars(turn)
        except DBAPIError:
            if not self._fail_unreadable():
                raise
            jobs = self._store.scalars(turn)
        first_steps = self._log.first_missing_steps([job.id for job in jobs])
        for job in jobs:
            try:
                if job.wanted != Wanted.RUN:  # requested while no host had the job, and not recorded
                    paused = job.wanted == Wanted.PAUSE
                    state, why = (JobState.PAUSED, "") if paused else (JobState.CANCELLED, _cut_off(job))
                    self._recorder.record_state(job.id, state, why)
                elif (missing := self._missing(job)) is not None:
                    self._wait(job, missing)
                else:
                    whose = job.tenant_id, self._bases.of(job.base)
                    if whose not in rooms:
                        rooms[whose] = hosts.room(*whose)
                    if ((room := rooms[whose]) is None or given[whose] <= room) and not self._asks_owner(job):
                        if (rule := rules.get(job.tenant_id)) is None:
                            rule = rules[job.tenant_id] = self._enforcer.rule_with_job(job)
                        messages.append(self.message(job, rule, first_steps.get(job.id, 0)))
                        given[whose] += 1
            except UNFIT as error:
                self._recorder.record_state(job.id, JobState.FAILED, str(error))
        for tenant in rules:
            self._enforcer.send_again(tenant)
        return messages

    def _fail_unreadable(self) -> int:
        """Fail open jobs whose rows the database cannot search, as after damage; returns how many."""
        still_open = select(StoredJob.number).where(StoredJob.state.in_(OPEN)).order_by(StoredJob.number)
        found = self._unreadable(self._store.scalars(still_open))
        for job_id in self._store.scalars(select(StoredJob.id).where(StoredJob.number.in_(found))):
            self._recorder.record_state(job_id, JobState.FAILED, _UNREADABLE)
        return len(found)

    def _unreadable(self, numbers: Sequence[int]) -> list[int]:
        """Those of these open jobs that the database cannot search; it is asked about all of them, then about halves."""
        if not numbers:
            return []
        these = StoredJob.number.between(numbers[0], numbers[-1]) & StoredJob.state.in_(OPEN)
        try:
            self._store.scalar(select(func.sum(_PRIORITY)).where(these))
        except DBAPIError as error:
            if not isinstance(error, DataError) and _DAMAGED not in str(error.orig):
                raise
            half = len(numbers) // 2
            return self._unreadable(numbers[:half]) + self._unreadable(numbers[half:]) if half else list(numbers)
        return []

    def reconcile(self, held: Sequence[Held]) -> dict[str, list[ToHost]]:
        """Messages for jobs that hosts already had under an earlier service, by job: their wanted state may have changed."""
        return {one.job: self._told_again(one) for one in held}

    def _told_again(self, held: Held) -> list[ToHost]:
        job = self._store.job_by_id(held.job)
        if job is None or JobState(job.state).final:
            return [ReleaseJob(held.job)]  # not known here, or not any more
        rule, spec = self._enforcer.rule_with_job(job), job.spec
        messages: list[ToHost] = [
            SetRule(job.tenant_id, rule),
            ChangeJob(job.id, spec.get("budget"), spec.get("priority", 0)),
        ]
        if job.wanted != held.wanted or (job.wanted == Wanted.RUN and held.state is JobState.PAUSED):
            messages.append(SteerJob(job.id, Wanted(job.wanted)))
        return [*messages, Nudge(job.id)]

    def _asks_owner(self, job: StoredJob) -> bool:
        """Pause a job that has done steps by other rules, once. If its owner resumes it, it goes on by today's, as inexact."""
        if not (why := Stored(self._storage.job(job.id)).other_rules()):
            return False
        cure = "resume it to continue by the rules of this one, as inexact, or cancel it"
        told = f"paused: it {why}: only that Motet finishes it as it began; {cure}"
        return self._recorder.record_state(job.id, JobState.PAUSED, told, key=f"rules {RULES}", wanted=Wanted.PAUSE)

    def _missing(self, job: StoredJob) -> str | None:
        """What a job needs that the service has not, as it is started now."""
        if not self._sent and names_code(job.spec):
            return f"waits: {REFUSED}"
        return self._bases.missing(job.base)

    def _wait(self, job: StoredJob, why: str) -> None:
        """Leave a job as it is until the service starts with what it needs."""
        if job.message != why:
            paused = job.state == JobState.PAUSED.value
            self._recorder.record_state(job.id, JobState.PAUSED if paused else JobState.QUEUED, why)

    def message(self, job: StoredJob, rule: Rule | None = None, first_step: int | None = None) -> AddJob:
        """The engine's message for a job, with the `rule` of its tenant and its first missing step if those are known.

        Raises:
            MotetError, OSError, ValueError: the job cannot start as it is (`UNFIT`).
        """
        base = self._bases.of(job.base)
        self._initial.keep(job)
        config = stored_config(job)
        for reward in config.rewards:
            self._secrets.opened(reward)  # fail now if a secret is missing
        tree = self.tree(Principal.member_of(job.tenant_id), config, job.id)
        first_step = self._log.first_missing_step(job.id) if first_step is None else first_step
        rule = rule or self._enforcer.rule_with_job(job)
        resumes = job.state == JobState.RUNNING.value
        return AddJob(tree, Wanted(job.wanted), first_step, job.tenant_id, rule, config.slots, base, resumes)

    def tree(self, who: Principal, config: JobConfig, job_id: str) -> dict[str, Any]:
        """The job under its engine-side name, with paths for what it names. Raises `ConfigError` for a missing file."""
        tree = config.model_dump(mode="json")
        tree["seed"] = config.effective_seed  # derived from the owner's name for the job
        tree["name"] = job_id
        for field in ("source", "eval_source"):
            name = tree["data"][field]
            if name is not None and name.startswith("file-"):
                if (file := self._store.file(who, name)) is None:
                    raise ConfigError(f"data.{field}: there is no file {name}")
                tree["data"][field] = str(self._storage.upload(file.id, file.filename))
        if tree["adapter"]["init"] is not None:
            tree["adapter"]["init"] = str(self._initial.path(job_id))
        return tree


def begun_jobs(store: Store) -> list[tuple[str, str, str | None]]:
    """Jobs that may resume and may have steps: id, tenant, and stored name of the base."""
    may_go_on = (*OPEN, JobState.FAILED.value)
    begun = (StoredJob.step > 0) | (StoredJob.state == JobState.RUNNING.value)
    with store.transaction() as session:
        chosen = select(StoredJob.id, StoredJob.tenant_id, StoredJob.base).where(StoredJob.state.in_(may_go_on), begun)
        return [(job_id, tenant, base) for job_id, tenant, base in session.execute(chosen)]


def in_turn(assigned: Collection[str], most: int | None) -> Select[StoredJob]:
    """Open jobs that no host has and that may start, with tenants taking turns; jobs that had begun come first.

    Args:
        assigned: ids of the jobs that hosts have.
        most: number per tenant and base; None for all.
    """
    begun = case((StoredJob.state == JobState.RUNNING.value, 0), else_=1)
    of_each = func.row_number().over(
        partition_by=(StoredJob.tenant_id, StoredJob.base), order_by=(begun, _PRIORITY.desc(), StoredJob.number)
    )
    asleep = (StoredJob.state == JobState.PAUSED.value) & (StoredJob.wanted == Wanted.PAUSE.value)
    waiting = StoredJob.state.in_(OPEN) & ~StoredJob.waits & ~asleep & StoredJob.id.not_in(assigned)
    turns = select(StoredJob.number, of_each.label("turn")).where(waiting).subquery()
    chosen = select(StoredJob).join(turns, turns.c.number == StoredJob.number)
    chosen = chosen if most is None else chosen.where(turns.c.turn <= most)
    return chosen.order_by(turns.c.turn, StoredJob.number)


def _cut_off(job: StoredJob) -> str:
    return f"cancelled after step {job.step}" if job.step else "cancelled before it began"
