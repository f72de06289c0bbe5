"""Limits of tenants: the service's defaults, overrides by an admin, and checks against them.

Some limits change over time: the engine gets a tenant's rule again when limits are set, tokens are spent or a day
begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select

from motet.algorithms.client import ClientDriven
from motet.config import JobConfig
from motet.config.chain import rank_of
from motet.config.service import LimitsConfig
from motet.core.errors import LimitError, StoreError
from motet.core.types import JobState
from motet.hosts.hosts import Hosts
from motet.hosts.messages import SetRule
from motet.runtime.slots import Rule
from motet.service.database.store import OPEN, Store
from motet.service.database.tables import OF_CLIENTS, StoredJob, Tenant, TenantLimits, until_tomorrow
from motet.service.schemas.usage import TenantInfo
from motet.service.tenants.ledger import Ledger, UsedToday
from motet.service.tenants.stored import StoredBytes

_log = logging.getLogger(__name__)
_MB = 2**20
_GIVEN = select(TenantLimits.given).where(TenantLimits.tenant_id == bindparam("tenant_id"))
_SECONDS, _AGAIN_SECONDS = 1.0, 5.0
_KNOWN_SECONDS = 1.0
_ASK = "an admin raises it with motet tenants limit"
_DELETE = "delete files, adapters, checkpoints or jobs that have ended"
_NEAR = 2**31
"""Largest storage room that is sent to hosts, in bytes."""
_MODELS_SECONDS, _JOBS_SECONDS = 30, 60
"""Seconds after which a client asks again for a model or a job without room; Motet's client shows the error at once."""
_SMALL = _MB
"""Bytes beyond `storage_mb` for client commands that free space or keep command numbers in order."""


class Quotas:
    """The limits of tenants, and their checks: `LimitError` names the limit, its usage, and who can change it."""

    def __init__(self, store: Store, stored: StoredBytes, ledger: Ledger, defaults: LimitsConfig, slots: int) -> None:
        """`defaults` apply unless an admin set other limits; `slots` is the number of concurrent jobs of all tenants."""
        self._store, self.stored, self._ledger, self._defaults, self._slots = store, stored, ledger, defaults, slots
        self._admitting = threading.Lock()
        self._storing: dict[str, threading.RLock] = {}
        self._reserved = Counter[str]()
        """Bytes that each tenant is about to store."""
        self._known: dict[str, tuple[float, LimitsConfig]] = {}
        """When the limits of a tenant were read, and what they were."""
        self._changes = 0

    def of(self, tenant_id: str) -> LimitsConfig:
        """Effective limits of a tenant; a change by another process takes effect within a second."""
        read, limits = self._known.get(tenant_id, (-math.inf, None))
        if limits is None or time.monotonic() > read + _KNOWN_SECONDS:
            read, changes = time.monotonic(), self._changes
            with self._store.transaction() as session:
                given = session.scalar(_GIVEN, {"tenant_id": tenant_id})
            limits = self._with(given)
            if changes == self._changes:
                self._known[tenant_id] = read, limits
        return limits

    def all(self) -> dict[str, LimitsConfig]:
        """Effective limits of all tenants, by id."""
        query = select(Tenant.id, TenantLimits.given).outerjoin(TenantLimits, TenantLimits.tenant_id == Tenant.id)
        with self._store.transaction() as session:
            return {str(row[0]): self._with(row[1]) for row in session.execute(query)}

    def set(self, tenant_id: str, given: Mapping[str, Any]) -> LimitsConfig:
        """Set a tenant's own limits, all at once; defaults apply to the others."""
        with self._store.transaction() as session:
            session.merge(TenantLimits(tenant_id=tenant_id, given=dict(given)))
        self._changes += 1
        self._known.clear()
        return self._with(given)

    def _with(self, given: Mapping[str, Any] | None) -> LimitsConfig:
        if not given:
            return self._defaults
        known = {name: value for name, value in given.items() if name in LimitsConfig.model_fields}
        return LimitsConfig.model_validate({**self._defaults.model_dump(), **known})

    def used(self, name: str | None = None, *, after: str = "", limit: int = 1) -> list[TenantInfo]:
        """Limits and usage of a tenant, or of the first tenants by name after one."""
        query = select(Tenant, TenantLimits.given).outerjoin(TenantLimits, TenantLimits.tenant_id == Tenant.id)
        query = query.where(Tenant.name > after if name is None else Tenant.name == name)
        with self._store.transaction() as session:
            rows = [(row[0], row[1]) for row in session.execute(query.order_by(Tenant.name).limit(limit))]
        ids = [tenant.id for tenant, _ in rows]
        today, stored, jobs = self._ledger.used_today(*ids), self.stored.of_each(ids), self._open_jobs(ids)
        infos = [
            TenantInfo(
                id=tenant.id, name=tenant.name, limits=self._with(given), own=list(given or ()),
                running=jobs[tenant.id, JobState.RUNNING.value],
                waiting=jobs[tenant.id, JobState.QUEUED.value] + jobs[tenant.id, JobState.PAUSED.value],
                tokens_today=today.get(tenant.id, UsedToday()).tokens,
                device_seconds_today=today.get(tenant.id, UsedToday()).device_seconds,
                cpu_seconds_today=today.get(tenant.id, UsedToday()).cpu_seconds,
                stored_bytes=stored[tenant.id],
            )
            for tenant, given in rows
        ]  # fmt: skip
        return [info.with_left(self._slots) for info in infos]

    def _open_jobs(self, tenant_ids: Collection[str]) -> Counter[tuple[str, str]]:
        """The number of jobs that have not ended, by tenant and state."""
        query = select(StoredJob.tenant_id, StoredJob.state, func.count())
        query = query.where(StoredJob.tenant_id.in_(tenant_ids), StoredJob.state.in_(OPEN))
        with self._store.transaction() as session:
            rows = session.execute(query.group_by(StoredJob.tenant_id, StoredJob.state))
            return Counter({(str(row[0]), str(row[1])): int(row[2]) for row in rows})

    def _count(self, tenant_id: str, *which: ColumnElement[bool]) -> int:
        """The number of the tenant's jobs that have not ended and meet these conditions."""
        query = select(func.count()).where(StoredJob.tenant_id == tenant_id, StoredJob.state.in_(OPEN), *which)
        return int(self._store.scalar(query) or 0)

    @contextlib.contextmanager
    def admitting(self, tenant_id: str, configs: Sequence[JobConfig]) -> Iterator[None]:
        """Lock to hold while jobs are queued: one request at a time, so that two cannot take the last place."""
        for config in configs:
            self.check_size(tenant_id, config)
        self.check_storage(
            tenant_id, sum(len(config.model_dump_json()) for config in configs)
        )  # may look at many files
        with self._admitting:
            self.check_queue(tenant_id, len(configs))
            if any(isinstance(config.algorithm, ClientDriven) for config in configs):
                self.check_models(tenant_id)
            yield

    @contextlib.contextmanager
    def storing(self, tenant_id: str, size: int, part: str = "", *, small: bool = False) -> Iterator[None]:
        """Lock to hold while bytes of a tenant are written: one write per tenant at a time.

        They are counted under `part`, a job or `SAMPLES`; uploads have no part and are counted from the database.
        `small` writes, which let a client's model continue and free space, may exceed the limit slightly.
        """
        with self._storing.setdefault(tenant_id, threading.RLock()):
            self.check_storage(tenant_id, size, _SMALL if small else 0)
            yield
            if part:
                self.stored.add(tenant_id, part, size)

    @contextlib.contextmanager
    def storing_work(self, tenant_id: str, job_id: str, size: int) -> Iterator[None]:
        """Lock to hold while work for reward workers is written to the database; see `storing`."""
        with self.storing(tenant_id, size):
            yield
            self.stored.work_added(tenant_id, job_id, size)

    @contextlib.contextmanager
    def reserving(self, tenant_id: str, size: int, part: str) -> Iterator[None]:
        """Reserve bytes that take long to write. As `storing`, but other writes of the tenant do not wait meanwhile."""
        with self.storing(tenant_id, size):
            self._reserved[tenant_id] += size
        try:
            yield
            self.stored.add(tenant_id, part, size)
        finally:
            with self._storing[tenant_id]:
                self._reserved[tenant_id] -= size

    def check_size(self, tenant_id: str, config: JobConfig) -> None:
        """Check the size of a job, independent of the queue."""
        limits = self.of(tenant_id)
        sizes: list[tuple[str, float, float | None]] = [
            ("adapter.rank", rank_of(config), limits.rank),
            ("steps", config.steps, limits.steps),
        ]
        for reward in config.rewards:
            for field in ("cpu_seconds", "wall_seconds", "memory_mb"):
                sizes.append((f"reward {reward.name}.{field}", getattr(reward, field), getattr(limits, field)))
        if config.environment.elsewhere:
            sizes.append(("environment.wall_seconds", config.environment.wall_seconds, limits.wall_seconds))
        for name, wanted, most in sizes:
            if most is not None and wanted > most:
                option = name.rpartition(".")[2].replace("_", "-")
                raise LimitError(
                    f"{name}: {wanted:g} is more than {most:g}, this tenant's limit; {_ASK} --{option}", 403
                )
        self.check_priority(tenant_id, config.priority)

    def check_queue(self, tenant_id: str, more: int = 1) -> None:
        """Check whether `more` jobs may run or wait."""
        limits = self.of(tenant_id)
        if limits.queued_jobs is None:
            return
        at_once = min(limits.running_jobs or self._slots, self._slots)
        count = self._count(tenant_id)  # which jobs run already may change within milliseconds
        if count + more > limits.queued_jobs + at_once:
            several = f", and {more} more are too many" if more > 1 else ""
            raise LimitError(
                f"queued_jobs: {count} jobs of this tenant run or wait{several}; {at_once} may run and {limits.queued_jobs} "
                f"wait. Let one end, cancel one, or {_ASK} --queued-jobs",
                429,
                _JOBS_SECONDS,
            )

    def check_models(self, tenant_id: str) -> None:
        """Check whether a client may create another model."""
        most = self.of(tenant_id).client_models
        of_clients = StoredJob.idempotency_key.startswith(OF_CLIENTS)
        if most is not None and (count := self._count(tenant_id, of_clients)) >= most:
            raise LimitError(
                f"client_models: {count} models of this tenant's clients have not ended; end one, cancel one, or {_ASK} "
                "--client-models",
                429,
                _MODELS_SECONDS,
            )

    def check_samples(self, tenant_id: str, count: int, more: int = 1, tokens: int = 0) -> None:
        """Check whether a sample of `more` completions and so many `tokens` may be open besides `count`; one always may."""
        _check_tokens(self.of(tenant_id).tokens_per_day, tokens)
        most = self.of(tenant_id).open_samples
        if most is not None and count and count + more > most:
            raise LimitError(
                f"open_samples: {count} completions of samples are open, and {more} more are too many; fetch some first, or "
                f"{_ASK} --open-samples",
                429,
                1,
            )

    def check_priority(self, tenant_id: str, priority: int) -> None:
        """Check a job's priority."""
        limits = self.of(tenant_id)
        highest = limits.highest_priority
        if highest is not None and priority > highest:
            raise LimitError(
                f"priority: {priority} is above {limits.priority!r} ({highest}), the highest of this tenant; {_ASK} --priority",
                403,
            )

    def check_storage(self, tenant_id: str, size: int, beyond: int = 0) -> None:
        """Check whether `size` bytes may be stored, with `beyond` bytes above the limit."""
        most = self.of(tenant_id).storage_mb
        if most is None:
            return
        reserved, room = self._reserved[tenant_id], most * _MB + beyond
        stored = self.stored.of(tenant_id) + reserved
        if stored + size > room or stored >= room:  # jobs may have shrunk since they were measured
            self.stored.measure()
            stored = self.stored.of(tenant_id) + reserved
        if stored + size > room or stored >= room:
            raise LimitError(
                f"storage_mb: this tenant stores {stored / _MB:.1f} of {most:g} MB"
                + (f", and {size / _MB:.1f} more do not fit" if size else "")
                + f"; {_DELETE}, or {_ASK} --storage-mb",
                403,
            )

    def check_day(self, tenant_id: str, *, device: bool = True, cpu: bool = False) -> None:
        """Check the daily limits: those of tokens and of device time, with `cpu` that of CPU time."""
        if spent := _spent(self.of(tenant_id), self._ledger.used_lately(tenant_id), device=device, cpu=cpu):
            reason, option = spent
            raise LimitError(f"{reason}; new ones come at 00:00 UTC, or {_ASK} {option}", 429, until_tomorrow())

    def counted(self, job_id: str) -> int:
        """Tokens of a job in the ledger."""
        return self._ledger.tokens_of(job_id)

    def tokens_left(self, tenant_id: str) -> float:
        """Tokens that a tenant may still have charged today."""
        return (self.of(tenant_id).tokens_per_day or math.inf) - self._ledger.used_lately(tenant_id).tokens

    def check_work(self, tenant_id: str, work: int, waiting: int, what: str = "") -> None:
        """Check whether a request (or `what`) of `work` tokens may wait besides others.

        Without tokens left, all wait for the next day.
        """
        most, left = self.of(tenant_id).tokens_per_day, self.tokens_left(tenant_id)
        if most is None or waiting + work <= (left := left if left > 0 else most):
            return
        needs = f"tokens_per_day: {what or 'this request'} takes {work} tokens, with each target counted"
        less = "" if what else "send fewer data at a time, or "
        if work > most:
            raise LimitError(f"{needs}, and a day of this tenant has {most}; {less}{_ASK}", 403)
        raise LimitError(
            f"{needs}; {most - left:.0f} of {most} are used and {waiting} are promised to requests that wait; {less}wait until "
            f"00:00 UTC, or {_ASK} --tokens-per-day",
            429,
            until_tomorrow(),
        )


def _check_tokens(day: int | None, tokens: int) -> None:
    if day is not None and tokens > day:
        may = f"this sample may have {tokens} tokens, and a day of this tenant has {day}"
        raise LimitError(f"tokens_per_day: {may}; lower max_tokens or num_samples, or {_ASK} --tokens-per-day", 403)


class QuotaEnforcer:
    """Keeps running jobs within their tenants' limits."""

    def __init__(self, quotas: Quotas, ledger: Ledger, hosts: Hosts) -> None:
        self._quotas, self._ledger, self._hosts = quotas, ledger, hosts
        self._sent: dict[str, Rule] = {}
        """Last rule sent to all hosts."""
        self._again: dict[str, float] = {}
        """Until when a tenant's rule is sent every time, because a message with a job may bring an older one."""

    def rule(self, tenant_id: str) -> Rule:
        """Current rule for a tenant's jobs."""
        used = self._ledger.used_today(tenant_id).get(tenant_id, UsedToday())
        return _rule(self._quotas.of(tenant_id), used, self._quotas.stored.content_of_each((tenant_id,))[tenant_id])

    def rule_with_job(self, job: StoredJob) -> Rule:
        """Rule for a job, for the message that adds it to a host."""
        self.send_again(job.tenant_id)
        return self.rule(job.tenant_id)

    def send_again(self, tenant_id: str) -> None:
        """Send a tenant's rule again soon, when messages with jobs that are on their way have arrived."""
        self._again[tenant_id] = time.monotonic() + _AGAIN_SECONDS

    def check_resume(self, job: StoredJob) -> None:
        """Check that a job may resume. Raises LimitError for a limit, StoreError if its budget is spent."""
        if reason := self.rule(job.tenant_id).hold:
            seconds = None if reason.startswith("storage_mb") else until_tomorrow()
            raise LimitError(f"job {job.name!r} stays paused: {reason}", 429, seconds)
        budget = job.spec.get("budget")
        if budget is not None and (used := self._ledger.tokens_of(job.id)) >= budget:
            raise StoreError(
                f"job {job.name!r} has used {used} of its budget of {budget} tokens; give it a larger one: motet resume "
                f"{job.name} --budget {2 * budget}"
            )
        if job.state == JobState.FAILED:
            self._quotas.check_queue(job.tenant_id)

    async def watch(self) -> None:
        """Enforce until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                await asyncio.to_thread(self.enforce)
            except Exception:  # the next attempt may succeed; without this, no job would resume
                _log.exception("quotas could not be enforced")

    def enforce(self) -> None:
        """Store usage, give free space of the database back, and send the engine the rules that changed."""
        self._ledger.flush()
        self._quotas.stored.tidy()
        self._quotas.stored.measure(all_changed=False)
        self._quotas.stored.prepared = self._hosts.prepared()
        used, every = self._ledger.used_today(), self._quotas.all()
        stored = self._quotas.stored.content_of_each(every)
        for tenant_id, limits in every.items():
            rule = _rule(limits, used.get(tenant_id, UsedToday()), stored[tenant_id])
            again = time.monotonic() < self._again.get(tenant_id, 0)
            # sent to all at first: an earlier service may have sent another
            if again or rule != self._sent.get(tenant_id):
                self._sent[tenant_id] = rule
                self._hosts.send(SetRule(tenant_id, rule))


def _rule(limits: LimitsConfig, used: UsedToday, stored: int) -> Rule:
    hold, space = "", limits.storage_mb
    if spent := _spent(limits, used):
        reason, option = spent
        hold = f"{reason}; it continues at 00:00 UTC, or when {_ASK} {option}"
    elif space is not None and stored > space * _MB + _SMALL:
        hold = (
            f"storage_mb: this tenant stores more than its {space:g} MB; it continues once you {_DELETE}, or when {_ASK} "
            "--storage-mb. Nothing committed is lost"
        )
    room = None if space is None else max(0, round(space * _MB - stored))
    near = room if room is not None and room < _NEAR else None
    return Rule(limits.running_jobs, hold, limits.share, limits.highest_priority or 0, near, limits.step_tokens)


def _spent(limits: LimitsConfig, used: UsedToday, *, device: bool = True, cpu: bool = True) -> tuple[str, str] | None:
    """Why a tenant must wait for the next day, and the option that raises its limit."""
    most, seconds = (limits.tokens_per_day, limits.device_seconds_per_day) if device else (None, None)
    processor = limits.cpu_seconds_per_day if cpu else None
    if most is not None and used.tokens >= most:
        return f"tokens_per_day: the {most} tokens of this tenant for this day are spent", "--tokens-per-day"
    if seconds is not None and used.device_seconds >= seconds:
        reason = f"device_seconds_per_day: the {seconds:g} device seconds of this tenant for this day are spent"
        return reason, "--device-seconds-per-day"
    if processor is not None and used.cpu_seconds >= processor:
        reason = f"cpu_seconds_per_day: the {processor:g} CPU seconds of this tenant for this day are spent"
        return reason, "--cpu-seconds-per-day"
    return None
