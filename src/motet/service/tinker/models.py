"""Models trained by clients: each is a job, found by the client's id for it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, func, select

from motet.config import OF_CLIENT
from motet.core.errors import LimitError
from motet.core.types import JobState
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Nudge
from motet.runtime.journal import AnyCommand, Journal, JournalError, Nothing, Save
from motet.service.bases import Bases
from motet.service.database.store import Store
from motet.service.database.tables import OF_CLIENTS, StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal, existing
from motet.service.http.rights import check_change
from motet.service.jobs.submissions import GivenJob, Submissions
from motet.service.secrets import Secrets
from motet.service.storage import Storage
from motet.service.tenants.quotas import Quotas
from motet.service.tenants.stored import blocks
from motet.service.tinker.requests import Lora
from motet.service.tinker.wire import AskedGradient

SESSION = re.compile(r"(session-[0-9a-f]{16})([0-9a-f]{16})")
"""An id, and a signature that binds it to its tenant."""
_SESSION_LETTERS = len("session-") + 32
STEPS = 1_000_000
ALPHA = 32.0
MOST_WAITING = 2**31
"""Bytes of waiting commands per model above which gradients are refused; above twice as many, all commands."""
MOST_COMMANDS = 2**13
"""As `MOST_WAITING`, but their number, because each command costs a look at those that wait."""
MISSING_SECONDS = 60.0
"""Wait of a command for one with a smaller number, which its client may still send again."""
_LOOK_SECONDS = 10.0
_MOST_IDS = 1000
"""Models of a session in a list."""
MOST_AHEAD = 2**10
"""Numbers between a command and the last one before it: each that is missing gets an outcome."""
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
_COUNTED_SECONDS = 5.0
"""Seconds after which a finished request counts as stored in the ledger, even if less of it was computed."""
_NEWEST = StoredJob.number.desc()


@dataclass
class _Promise:
    """Tokens of a request that was admitted."""

    work: int
    done_at: float | None = None
    """When it was first seen done, on a monotonic clock."""


class Models:
    """Creates and finds models, and stores their clients' commands."""

    def __init__(
        self,
        bases: Bases,
        store: Store,
        storage: Storage,
        submissions: Submissions,
        quotas: Quotas,
        hosts: Hosts,
        secrets: Secrets,
    ) -> None:
        self.bases = bases
        self._secrets = secrets
        self._store, self._storage, self._submissions = store, storage, submissions
        self._quotas, self._hosts, self.stored = quotas, hosts, quotas.stored
        self._promised: dict[str, dict[tuple[str, int], _Promise]] = {}
        """Admitted requests that are not counted yet, by tenant, and by job and number."""
        self._held: dict[str, float] = {}
        """When a gradient of a job was last told to come again later, in Unix seconds."""
        self._looked: dict[str, float] = {}
        """When missing numbers of a job were looked for."""
        self._began = time.time()
        """Clients come back some seconds after the service."""
        self._counted: dict[str, tuple[int, int]] = {}
        """By job: its tokens in the ledger at the last check, and how many of these belong to no finished request yet."""

    def new_session(self, who: Principal) -> str:
        """A new session id for a tenant's client."""
        name = new_id("session")
        return f"{name}{self._secrets.signature(f'{who.tenant_id} {name}')}"

    def check_session(self, who: Principal, session_id: str) -> None:
        """Raise `Refusal` if a session does not belong to a tenant, or does not exist."""
        parts = SESSION.fullmatch(session_id)
        if parts is None or not self._secrets.signed(f"{who.tenant_id} {parts[1]}", parts[2]):
            raise Refusal(404, f"there is no session {session_id!r}; create_session makes one")

    def model_id(self, who: Principal, session_id: str, number: int) -> str:
        """The id of a session's model, as clients compute it. Raises `Refusal` for the session of another tenant."""
        self.check_session(who, session_id)
        return f"{session_id}:train:{number}"

    def base(self, name: str | None) -> str:
        """The base for a client's name or local path, or the default for None. Raises `Refusal` if it is not served."""
        base = self.bases.find(name) or (name and self.bases.alike(name))
        if not base:
            raise Refusal(
                400, f"base_model {name!r} is not served here; give {' or '.join(map(repr, self.bases.names))}"
            )
        return base

    def create(
        self, who: Principal, model_id: str, base: str, lora: Lora, first: AnyCommand, about: dict[str, Any]
    ) -> str:
        """Queue the job of a new model on a base, with `first` as command 0; returns the id of its future.

        Raises:
            MotetError: it is not accepted; the message says why.
        """
        if not (lora.train_mlp or lora.train_attn):
            raise Refusal(400, "lora_config: set train_mlp or train_attn; the head has no adapter here")
        targets = "all-linear"
        if not (lora.train_mlp and lora.train_attn):
            targets = _FEED_FORWARD if lora.train_mlp else _ATTENTION  # type: ignore[assignment]
        session, _, number = model_id.partition(":train:")
        steps = min(STEPS, self._quotas.of(who.tenant_id).steps or STEPS)
        tree = {
            "base": base,
            "name": f"tinker-{session.removeprefix('session-')}-{number}",
            "algorithm": "client",
            "data": {"source": OF_CLIENT, "chat_template": False},
            "adapter": {"rank": lora.rank, "alpha": ALPHA, "target_modules": targets},
            "optimizer": {"max_skipped": 10**7},
            "steps": steps,
            "seed": int(number) if lora.seed is None else lora.seed,  # the same program creates the same model
        }
        fresh = self._store.submitted(who, model_id) is None
        job = self._submissions.submit(who, [GivenJob(tree, driven=True)], model_id)[0]
        check_change(who, job, f"model {model_id!r}")
        if fresh:
            self._store.audit(who, "job.submit", job.id)
        journal = self.journal(job)
        if not journal.known(0):
            journal.describe({**about, "lora": lora.model_dump(exclude={"type"})})
        return self.order(job, 0, first)

    def find(self, who: Principal, model_id: str) -> StoredJob:
        """The job of a tenant's model. Raises `Refusal` if it does not exist."""
        return existing(self._store.submitted(who, model_id), f"there is no model {model_id!r}")

    def everybodys(self, model_id: str) -> list[StoredJob]:
        """Models of any tenant with an id, oldest first."""
        return self._store.scalars(
            select(StoredJob).where(StoredJob.idempotency_key == model_id).order_by(StoredJob.number)
        )

    def of_session(self, who: Principal, session_id: str) -> list[StoredJob]:
        """The models of one session, newest first."""
        return self._store.scalars(select(StoredJob).where(*_models(who, f"{session_id}:train:")).order_by(_NEWEST))

    def page(self, who: Principal, limit: int, offset: int) -> tuple[list[StoredJob], int]:
        """Some of a tenant's models, newest first, and the number of all."""
        query = select(StoredJob).where(*_models(who)).order_by(_NEWEST).limit(limit).offset(offset)
        return self._store.scalars(query), self._store.scalar(select(func.count()).where(*_models(who))) or 0

    def ids(self, who: Principal, session_id: str) -> list[str]:
        """Ids of the newest models of one session, newest first."""
        of = select(StoredJob.idempotency_key).where(*_models(who, f"{session_id}:train:"))
        return list(filter(None, self._store.scalars(of.order_by(_NEWEST).limit(_MOST_IDS))))

    def sessions(self, who: Principal, limit: int, offset: int) -> list[str]:
        """Some ids of a tenant's sessions with models, that of the newest model first."""
        session = func.substr(StoredJob.idempotency_key, 1, _SESSION_LETTERS)
        query = select(session).where(*_models(who)).group_by(session).order_by(func.max(StoredJob.number).desc())
        return self._store.scalars(query.limit(limit).offset(offset))

    def ends(self, who: Principal) -> Sequence[Row[str, str | None, float | None]]:
        """The job, the id and the end of each of a tenant's models, newest first: no more is read of many."""
        query = select(StoredJob.id, StoredJob.idempotency_key, StoredJob.ended).where(*_models(who)).order_by(_NEWEST)
        with self._store.transaction() as session:
            return session.execute(query).all()

    def directory(self, job: StoredJob) -> Path:
        """The directory of a model's job."""
        return self._storage.job(job.id).path

    def journal(self, job: StoredJob) -> Journal:
        """The commands of a model."""
        return Journal(self.directory(job))

    def order(self, job: StoredJob, number: int, command: AnyCommand | AskedGradient) -> str:
        """Store a command and notify the engine; returns the id of its future.

        Raises:
            Refusal: the model has ended, or another command has this number.
            LimitError: the tenant's storage is full.
        """
        journal, gradient = self.journal(job), command if isinstance(command, AskedGradient) else None
        known = journal.known(number)
        if JobState(job.state).final and not known:
            reason = f": {job.message}" if job.message else ""
            raise Refusal(
                400, f"this model has {job.state}{reason}; create another, from a checkpoint where there is one"
            )
        times = 1 if gradient else 2  # the step that they wait for remains possible
        count, n_bytes, last = (0, 0, number) if known else journal.waiting()
        if number > last + MOST_AHEAD:
            raise Refusal(
                400, f"seq_id {number} is far from the last one of this model, {last}: numbers follow each other"
            )
        if count >= times * MOST_COMMANDS or n_bytes > times * MOST_WAITING:
            wanted = "call optim_step" if gradient else "wait for those before this one"
            raise Refusal(400, f"{count} commands of this model wait to be done, {n_bytes >> 20} MB: {wanted}")
        data = gradient.command if gradient else msgspec.msgpack.encode(command)
        size = sum(map(blocks, (len(data), 32, gradient.outcome if gradient else 256)))
        known, small = journal.known(number), not (gradient or isinstance(command, Save))  # it may be there since
        try:
            with contextlib.nullcontext() if known else self._quotas.storing(job.tenant_id, size, job.id, small=small):
                journal.put(number, data)
        except JournalError as error:
            raise Refusal(400, str(error)) from error
        self._hosts.send(Nudge(job.id))
        return f"{job.idempotency_key}/{number}"

    def admit(self, job: StoredJob, number: int, work: int) -> None:
        """Raise `LimitError` if a command's tokens exceed the tenant's; with status 429, its number stays free.

        Call it in the turn of the tenant, because it looks at all that the tenant waits for.
        """
        if self._quotas.of(job.tenant_id).tokens_per_day is None:
            return
        waiting = self._promised[job.tenant_id] = self._still_waiting(job.tenant_id)
        if not self.journal(job).known(number):
            waiting.pop((job.id, number), None)  # requested again
            try:
                self._quotas.check_work(job.tenant_id, work, sum(one.work for one in waiting.values()))
            except LimitError:
                self._held[job.id] = time.time()
                raise
            waiting[job.id, number] = _Promise(work)
            if job.id not in self._counted:
                self._counted[job.id] = self._quotas.counted(job.id), 0

    def _still_waiting(self, tenant_id: str) -> dict[tuple[str, int], _Promise]:
        promised = self._promised.get(tenant_id, {})
        jobs = {job_id: self._store.job_by_id(job_id) for job_id in {job_id for job_id, _ in promised}}
        journals = {
            name: self.journal(job) for name, job in jobs.items() if job is not None and not JobState(job.state).final
        }
        waiting = {
            (name, number): promise
            for (name, number), promise in promised.items()
            if name in journals and not (journals[name].done(number) and self._is_counted(name, promise))
        }
        for name in jobs.keys() - {name for name, _ in waiting}:
            self._counted.pop(name, None)
        return waiting

    def _is_counted(self, job_id: str, promise: _Promise) -> bool:
        """Whether the ledger has a finished request, which it counts a moment later; a cancelled one may be less."""
        promise.done_at = promise.done_at or time.monotonic()
        counted = self._quotas.counted(job_id)
        before, more = self._counted.get(job_id, (counted, 0))
        more += counted - before
        found = more >= promise.work
        self._counted[job_id] = counted, more - promise.work if found else more
        return found or time.monotonic() > promise.done_at + _COUNTED_SECONDS

    def refuse(self, job: StoredJob, number: int) -> None:
        """Record a refused request, so that later commands proceed."""
        if not self.journal(job).known(number):
            self.order(job, number, Nothing())

    def look_in(self, job: StoredJob, number: int) -> float:
        """Seconds until `pass_over` should be called for a command that waits."""
        now, since = time.time(), self.journal(job).came_at(number)
        if since is None:
            return MISSING_SECONDS
        asked = max(since, self._held.get(job.id, 0.0), self._began)
        return max(asked + MISSING_SECONDS, self._looked.get(job.id, 0.0) + _LOOK_SECONDS) - now

    def pass_over(self, job: StoredJob) -> bool:
        """Refuse what waits behind numbers that never came: a program may number a request that it then cannot send.

        Call it in the turn of the tenant. Returns whether anything was refused.
        """
        if not self.journal(job).refuse_behind_gap():
            return False
        self.stored.changed(job.id)
        self._hosts.send(Nudge(job.id))
        return True

    def looks(self, job: StoredJob) -> None:
        """Note that `pass_over` is called: many commands may wait, and each look reads all names."""
        now = time.time()
        self._looked = {name: at for name, at in self._looked.items() if now < at + _LOOK_SECONDS} | {job.id: now}
        self._held = {name: at for name, at in self._held.items() if now < at + MISSING_SECONDS}

    def cancel(self, job: StoredJob, number: int) -> None:
        """Cancel a gradient that is not done."""
        self.journal(job).cancel(number)
        self._hosts.send(Nudge(job.id))

    def finish(self, job: StoredJob, reason: str = "") -> None:
        """End a model: its job succeeds when its commands are done, or fails if the `reason` is an error."""
        self.journal(job).finish(reason)
        self._hosts.send(Nudge(job.id))


def own_model(models: Models, who: Principal, model_id: str) -> StoredJob:
    """`find` for a request that changes the model. Raises `Refusal` if another member of the tenant made it."""
    check_change(who, job := models.find(who, model_id), f"model {model_id!r}")
    return job


def _models(who: Principal, begin: str = OF_CLIENTS) -> tuple[ColumnElement[bool], ...]:
    """A tenant's models whose ids begin so."""
    return StoredJob.tenant_id == who.tenant_id, StoredJob.idempotency_key.startswith(begin)
