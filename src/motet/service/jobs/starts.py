"""When jobs start, and from what: after other jobs, not before a time, and with which adapter.

A job that has to wait is queued here and unknown to the engine until what it waits for has come; then it is handed over, in
the order in which jobs came. What its adapter starts from is linked into its own directory when it is handed over (when it is
submitted, where it need not wait for it), so nobody can take it away from it afterwards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from motet.checksums import check_version
from motet.config import JobConfig
from motet.errors import ConfigError, MotetError, StoreError
from motet.service.adapters.adapters import Adapters, Found
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.types import ADAPTER_CONFIG, ADAPTER_FILES, JobState

_log = logging.getLogger(__name__)
UNFIT = (MotetError, OSError, ValueError)
"""What is raised where a job cannot be taken up as it stands: it fails with the reason, and no other does."""
FURTHEST = 366 * 24 * 3600.0
"""Seconds that a start may lie ahead."""
_LOOK_SECONDS = 30.0


@dataclass(frozen=True)
class When:
    """What a job has to wait for."""

    after: Sequence[str] = ()
    """Names or ids of jobs that have to succeed."""
    at: float | None = None
    """Unix seconds before which it does not start."""


NOW = When()


@dataclass(frozen=True)
class Plan:
    """A job's start, as it was looked up for whoever submits it."""

    columns: Mapping[str, Any]
    """Of the job's row."""
    source: Found | None
    """What its adapter starts from, where that is there already."""


class Starts:
    """Jobs that wait, and what jobs start from."""

    def __init__(
        self,
        store: Store,
        adapters: Adapters,
        run: Path,
        hear: Callable[[str, str, Mapping[str, Any]], None],
        hand_over: Callable[[StoredJob], None],
    ) -> None:
        """Nothing waits yet.

        Args:
            store: where jobs are kept.
            adapters: what the names of starts mean.
            run: the directory of jobs.
            hear: told of a job's new state.
            hand_over: gives a job to the engine, or tells that it has failed.
        """
        self._store, self._adapters, self._run = store, adapters, run
        self._hear, self._hand_over = hear, hand_over
        self._lock = threading.Lock()
        self._changed = asyncio.Event()

    # --- submitting -------------------------------------------------------------------------------------------------------

    def plan(self, who: Principal, config: JobConfig, when: When = NOW) -> Plan:
        """Look up what a job waits for and starts from.

        Raises:
            ConfigError: something of it is not there for them, or cannot come.
            StoreError: its name is taken by an uploaded adapter.
        """
        member = Principal.member_of(who.tenant_id)
        if self._adapters.uploaded(member, config.name) is not None:
            raise StoreError(f"there is an adapter {config.name!r} already; give the job another name")
        before = [self._awaited(who, name) for name in dict.fromkeys(when.after)]
        if when.at is not None and when.at > time.time() + FURTHEST:
            raise ConfigError("at: a start may lie a year ahead at most; give an earlier time")
        reference, source = self._source(who, config, [job.id for job in before])
        ids = [job.id for job in before] or None
        message = self._held_back(ids or (), when.at)
        columns = {
            "after": ids, "start_at": when.at, "waits": bool(message), "message": message, "starts_from": reference,
        }  # fmt: skip
        return Plan(columns, source)

    def submit(
        self, who: Principal, config: JobConfig, idempotency: str | None, plan: Plan, **columns: Any
    ) -> StoredJob:
        """Keep a job with what it starts from; `columns` are more of its row.

        Raises:
            StoreError: the tenant has a job of this name.
            ConfigError: the version it starts from went away just now.
        """
        draft = self._run / f".tmp-{new_id('start')}"
        try:
            if plan.source is not None:
                _link(plan.source.path, draft)
            spec = config.model_dump(mode="json")
            job = self._store.submit(who, config.name, spec, config.steps, idempotency, **plan.columns, **columns)
            if plan.source is not None and not self.path(job.id).exists():
                self.path(job.id).parent.mkdir(exist_ok=True)
                draft.rename(self.path(job.id))
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        if job.waits:
            self.wake()
        return job

    def _awaited(self, who: Principal, name: str) -> StoredJob:
        found = self._store.job(who, name)
        if found is None:
            raise ConfigError(f"after: there is no job {name!r}")
        if JobState(found.state) in (JobState.FAILED, JobState.CANCELLED):
            raise ConfigError(f"after: job {name!r} has {found.state}; name one that can still succeed")
        return found

    def _source(self, who: Principal, config: JobConfig, awaited: Sequence[str]) -> tuple[str | None, Found | None]:
        name = config.adapter.init
        if name is None:
            return None, None
        named = self._adapters.named(who, name)
        if named is not None and named.thing.id in awaited:  # looked up when that job has succeeded
            return f"{named.thing.id}@{named.version or 'best'}", None
        found = None if named is None else self._adapters.directory_of(named)
        if found is None:
            hint = "" if named is None else "; name the job in `after` too, and this one waits for it"
            raise ConfigError(
                f"adapter.init: there is no version {name!r}; name one as job@best, job@latest or job@12, an uploaded adapter, "
                f"or what another tenant shares as tenant/job@best{hint}"
            )
        _fits(config, name, found.path)
        return found.reference, found

    # --- what it starts from ----------------------------------------------------------------------------------------------

    def path(self, job_id: str) -> Path:
        """The PEFT directory that a job's adapter starts from."""
        return self._run / job_id / "start"

    def keep(self, job: StoredJob) -> None:
        """Link what a job starts from into its directory, unless it is there, or the job has begun and needs it no more.

        Raises:
            ConfigError: it is not there any more, or does not fit.
        """
        name = job.spec["adapter"]["init"]
        begun = any((self._run / job.id / "state").glob("[0-9]*"))
        if name is None or begun or self.path(job.id).exists():
            return
        owner = Principal.member_of(job.tenant_id)
        found = self._adapters.find_by_id(job.starts_from) if job.starts_from else self._adapters.find(owner, name)
        if found is None:
            raise ConfigError(
                f"adapter.init: {name!r} has no such version, or is gone; submit the job with another start"
            )
        _fits(JobConfig.model_validate(job.spec), name, found.path)
        self.path(job.id).parent.mkdir(parents=True, exist_ok=True)
        _link(found.path, self.path(job.id))

    # --- waiting ----------------------------------------------------------------------------------------------------------

    def steer(self, job: StoredJob, word: str) -> bool:
        """Pause, resume or cancel a job that waits; False where it does not, and the engine has to be asked."""
        with self._lock:
            if not self._waits(job.id):
                return False
            state, message = {
                "pause": (JobState.PAUSED, "paused while it waits to start"),
                "resume": (JobState.QUEUED, "waits to start"),
                "cancel": (JobState.CANCELLED, "cancelled before it began"),
            }[word]
            self._hear(job.id, "state", {"state": state.value, "message": message})
        self.wake()
        return True

    def wake(self) -> None:
        """Look again whether a job may start: something happened. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    _loop: asyncio.AbstractEventLoop | None = None

    async def watch(self) -> None:
        """Hand jobs over as soon as they may start, until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            try:
                seconds = await asyncio.to_thread(self.release)
            except Exception:  # whatever it is, the next look may succeed; without any, no job that waits would start
                _log.exception("the jobs that wait could not be looked at")
                seconds = 5.0
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def release(self) -> float:
        """Hand over what need not wait any longer; gives the seconds after which to look again."""
        at = [_LOOK_SECONDS]
        for job in self._waiting():
            try:
                message = self._held_back(job.after or (), job.start_at)
                if not message:
                    self.keep(job)
            except UNFIT as error:
                self._let_go(job, JobState.FAILED, str(error))
                continue
            if not message:
                self._let_go(job, JobState.QUEUED, "")
            elif message != job.message:
                self._store.change_job(job.id, message=message)
            if message and job.start_at is not None:
                at.append(max(0.01, job.start_at - time.time()))
        return min(at)

    def _let_go(self, job: StoredJob, state: JobState, message: str) -> None:
        """A job waits no longer: it may start, or it cannot."""
        with self._lock:
            still = update(StoredJob).where(
                StoredJob.id == job.id, StoredJob.waits, StoredJob.state == JobState.QUEUED.value
            )
            with self._store.transaction() as session:
                # one that failed waits again when it is resumed
                gone = not session.execute(still.values(waits=state is JobState.FAILED)).rowcount  # type: ignore[attr-defined]
            if gone:  # it was paused, cancelled or removed meanwhile
                return
            self._hear(job.id, "state", {"state": state.value, "message": message})
            if state is JobState.QUEUED:
                self._hand_over(job)

    def _held_back(self, after: Sequence[str], at: float | None) -> str:
        """Why a job cannot start yet, for a person; empty where it can.

        Raises:
            StoreError: it never can, and why.
        """
        names = []
        for job_id in after:
            found = self._adapters.by_id(job_id)
            if not isinstance(found, StoredJob):
                raise StoreError("a job that this one waits for is gone; submit it anew without it")
            if found.state in (JobState.FAILED.value, JobState.CANCELLED.value):
                told = f": {found.message}" if found.message else ""
                raise StoreError(f"job {found.name!r}, which this one waits for, has {found.state}{told}")
            if found.state != JobState.SUCCEEDED.value:
                names.append(repr(found.name))
        reasons = [f"for {', '.join(names)} to succeed"] if names else []
        if at is not None and at > time.time():
            reasons.append(f"until {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC")
        return f"waits {' and '.join(reasons)}" if reasons else ""

    def _waiting(self) -> list[StoredJob]:
        query = select(StoredJob).where(StoredJob.waits, StoredJob.state == JobState.QUEUED.value)
        with self._store.transaction() as session:
            return list(session.scalars(query.order_by(StoredJob.number)))

    def _waits(self, job_id: str) -> bool:
        with self._store.transaction() as session:
            return bool(session.scalar(select(StoredJob.waits).where(StoredJob.id == job_id)))


def _link(source: Path, target: Path) -> None:
    """The files of an adapter once more, without their bytes where the file system can.

    Raises:
        ConfigError: they went away just now.
        AdapterError: they are not what was saved.
    """
    check_version(source)
    draft = target.with_name(f".tmp-{target.name.removeprefix('.tmp-')}-{new_id('link')}")
    draft.mkdir(parents=True)
    try:
        for name in ADAPTER_FILES:
            try:
                os.link(source / name, draft / name)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(source / name, draft / name)
        draft.rename(target)
    except FileNotFoundError as error:
        raise ConfigError("adapter.init: that version was removed just now; submit the job again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fits(config: JobConfig, name: str, path: Path) -> None:
    """Whether a job's adapter has the shape of its start, as far as it can be told without the base.

    Raises:
        ConfigError: it has not, and which field to set.
    """
    try:
        told = json.loads((path / ADAPTER_CONFIG).read_text())
        shape = {"rank": told["r"], "alpha": told["lora_alpha"]}
    except (OSError, ValueError, KeyError, TypeError):
        return  # the engine looks closer
    for field, value in shape.items():
        wanted = getattr(config.adapter, field)
        if value != wanted:
            raise ConfigError(
                f"adapter.init: {name!r} has {field} {value:g}, the job asks for {wanted:g}; set adapter.{field} to {value:g}"
            )
