"""What the service remembers, as tables. `migrations/` brings a database of an older release to this shape."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint, false
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in INTEGER columns


def now() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def new_id(kind: str) -> str:
    """A name for an object."""
    return f"{kind}-{secrets.token_hex(8)}"


def newer_evaluation(before: dict[str, Any] | None, version: int, value: float) -> dict[str, Any]:
    """What a job's `held_out` is after the evaluation of one more version; of equal ones the earlier is the best."""
    best = (before["best_version"], before["best"]) if before is not None else (version, value)
    best = (version, value) if value > best[1] else best
    return {"version": version, "value": value, "best_version": best[0], "best": best[1]}


class Table(DeclarativeBase):
    """Base of all tables."""


class Tenant(Table):
    """Whoever owns jobs: a person or a team."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created: Mapped[float] = mapped_column(default=now)


class ClosedTenant(Table):
    """A tenant that was erased. Nobody signs in to it until an admin makes a key of it."""

    __tablename__ = "closed_tenants"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of its name, which is not kept."""
    time: Mapped[float] = mapped_column(default=now)


class Key(Table):
    """An API key; only its digest is kept."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    created: Mapped[float] = mapped_column(default=now)
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    scope: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The rights that it has of those of its role; all where there is none."""
    made_by: Mapped[str | None] = mapped_column(String(40))
    """The key, by its id, that a member made it with; it ends with that."""
    person: Mapped[str | None] = mapped_column(String(64), index=True)
    """Of a sign-in: a digest that names the person at the provider. None for a key that was made by hand."""


class StoredJob(Table):
    """A job as it was asked for, and where it stands."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "idempotency_key"))
    number: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    """Jobs in the order they came."""
    id: Mapped[str] = mapped_column(String(40), unique=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The validated job."""
    state: Mapped[str] = mapped_column(String(20), index=True)
    wanted: Mapped[str] = mapped_column(String(20))
    """What its owner asked for last: `run`, `pause` or `cancel`."""
    message: Mapped[str] = mapped_column(Text, default="")
    step: Mapped[int] = mapped_column(default=0)
    steps: Mapped[int]
    created: Mapped[float] = mapped_column(default=now)
    ended: Mapped[float | None]
    reward: Mapped[float | None]
    """Mean reward of the newest step."""
    held_out: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """The newest and the best held-out figure, as `newer_evaluation` makes it."""
    after: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Ids of the jobs that have to succeed before this one starts."""
    start_at: Mapped[float | None]
    """Unix seconds before which it does not start."""
    waits: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether the engine does not know of it yet: `after` or `start_at` holds it back."""
    starts_from: Mapped[str | None] = mapped_column(String(160))
    """What its adapter starts from, under ids instead of names: `job-…@best`, `adapter-…`."""
    base: Mapped[str | None] = mapped_column(Text)
    """The name of the base that it trains on; None is the first one, from when there was only one."""


class Event(Table):
    """Something that happened to a job. (job, kind, key) is unique, so that what is told twice is kept once."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job_id", "kind", "key"),
        Index("events_of_job", "job_id", "id"),
        {"sqlite_autoincrement": True},  # an id is never used again: who listens asks for what came after the last one
    )
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    kind: Mapped[str] = mapped_column(String(20))
    key: Mapped[str] = mapped_column(String(60))
    time: Mapped[float] = mapped_column(default=now)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class StoredFile(Table):
    """An uploaded file of rows."""

    __tablename__ = "files"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    filename: Mapped[str] = mapped_column(String(255))
    bytes: Mapped[int] = mapped_column(BIG)
    rows: Mapped[int]
    created: Mapped[float] = mapped_column(default=now)


class FineTuning(Table):
    """What a job was asked for through the fine-tuning routes."""

    __tablename__ = "fine_tunings"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    """As it was sent."""


class AuditEntry(Table):
    """Who changed what."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    time: Mapped[float] = mapped_column(default=now)
    tenant_id: Mapped[str] = mapped_column(String(40), index=True)
    key_id: Mapped[str] = mapped_column(String(40))
    action: Mapped[str] = mapped_column(String(60))
    object: Mapped[str] = mapped_column(String(120))


class UploadedAdapter(Table):
    """A PEFT directory that a tenant brought."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    bytes: Mapped[int] = mapped_column(BIG)
    rank: Mapped[int]
    alpha: Mapped[float]
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    base: Mapped[str | None] = mapped_column(Text)
    """The name of the base that it fits; None as of a job."""
    created: Mapped[float] = mapped_column(default=now)


class Share(Table):
    """What others may chat with, start from and take home: a job's adapter, or an uploaded one."""

    __tablename__ = "shares"
    __table_args__ = (UniqueConstraint("object", "with_tenant"),)
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    """Whose it is."""
    object: Mapped[str] = mapped_column(String(40), index=True)
    """The id of a job or of an uploaded adapter."""
    with_tenant: Mapped[str] = mapped_column(String(40), index=True)
    """A tenant's id, or `*`: all."""
    created: Mapped[float] = mapped_column(default=now)


class TenantLimits(Table):
    """What an admin set for one tenant; the service's defaults stand for the rest."""

    __tablename__ = "limits"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    given: Mapped[dict[str, Any]] = mapped_column(JSON)
    """Fields of `LimitsConfig`; null is no limit."""


class KnownBase(Table):
    """A base of a service that has, or had, several; what was stored under its name is of no other."""

    __tablename__ = "bases"
    number: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    """In the order they came: what was stored under no name is of the first."""
    name: Mapped[str] = mapped_column(Text, unique=True)
    place: Mapped[str] = mapped_column(Text)
    """What it was the last time: `small`, a hub id, a path."""


class ServiceStart(Table):
    """A start of the service. While it runs, its row tells its database from any other."""

    __tablename__ = "starts"
    token: Mapped[str] = mapped_column(String(40), primary_key=True)
    time: Mapped[float] = mapped_column(default=now)
    proof: Mapped[str | None] = mapped_column(Text)
    """Something encrypted with the operator's key, by which the next start recognises it."""


class Usage(Table):
    """What was used on one day: by a job, by a tenant's completions (no job), or by nobody (no tenant: the device idled)."""

    __tablename__ = "usage"
    __table_args__ = (
        UniqueConstraint("day", "tenant_id", "job_id", "base", name="usage_once"),
        Index("usage_of_tenant", "tenant_id", "day"),
    )
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    day: Mapped[str] = mapped_column(String(10))
    """In UTC, as 2026-01-31."""
    tenant_id: Mapped[str] = mapped_column(String(40))
    job_id: Mapped[str] = mapped_column(String(40), index=True)
    """Stays when the job is deleted."""
    job_name: Mapped[str] = mapped_column(String(100))
    tokens_prompt: Mapped[int] = mapped_column(BIG)
    tokens_sampled: Mapped[int] = mapped_column(BIG)
    tokens_trained: Mapped[int] = mapped_column(BIG)
    microseconds: Mapped[int] = mapped_column(BIG)
    """Of the device."""
    base: Mapped[str] = mapped_column(Text, default="")
    """The name of the base, as with a job; empty as None there."""


class MeterReading(Table):
    """The last window of device time of each engine, and the work of each client's job, so that none is counted twice."""

    __tablename__ = "meter_readings"
    engine: Mapped[str] = mapped_column(String(100), primary_key=True)
    window: Mapped[int] = mapped_column(BIG)


class ScoringUnit(Table):
    """One reward of one problem's completions that a reward worker is to score; see `ScoringUnits`."""

    __tablename__ = "scoring_units"
    __table_args__ = (UniqueConstraint("job_id", "key"), Index("scoring_units_of_lease", "lease"))
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    key: Mapped[str] = mapped_column(String(64))
    """A digest of the work."""
    step: Mapped[int]
    """Steps that the job had done when it was asked."""
    created: Mapped[float] = mapped_column(default=now)
    work: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """`reward`, `problem`, `completions` and `transcripts`, until it is scored."""
    completions: Mapped[int]
    scores: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    worker: Mapped[str | None] = mapped_column(String(60))
    lease: Mapped[str | None] = mapped_column(String(40))
    leased_until: Mapped[float | None]
    """Unix seconds; after them others may have it."""
    handed_out: Mapped[int] = mapped_column(default=0)
