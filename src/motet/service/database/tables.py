"""The database schema. `migrations/` updates databases of older releases to it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite only auto-increments INTEGER columns
OF_CLIENTS = "session-"
"""How the idempotency keys of jobs begin that clients of the Tinker protocol drive: their models' ids."""


_DAY = 86_400


def now() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


def until_tomorrow() -> int:
    """Seconds until 00:00 UTC."""
    return int(_DAY - now() % _DAY) + 1


def new_id(kind: str) -> str:
    """A random id for an object."""
    return f"{kind}-{secrets.token_hex(8)}"


def newer_evaluation(
    before: dict[str, Any] | None, version: int, figure: tuple[str, float], *, best: bool, best_by: str = ""
) -> dict[str, Any]:
    """A job's `held_out` after one more evaluation with this figure.

    `best`: its commits say that this version is the best so far, by the rule `best_by`.
    """
    name, value = figure
    known = (version, value) if best else (before["best_version"], before["best"]) if before else (None, None)
    named = {"figure": name, "best_by": best_by}
    return {"version": version, "value": value, "best_version": known[0], "best": known[1], **named}


class Table(DeclarativeBase):
    """Base of all tables."""


class Tenant(Table):
    """The owner of jobs: a person or a team."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created: Mapped[float] = mapped_column(default=now)


class ClosedTenant(Table):
    """An erased tenant. Nobody can sign in to it until an admin creates a key for it."""

    __tablename__ = "closed_tenants"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of its name, which is not stored."""
    time: Mapped[float] = mapped_column(default=now)


class Submitted:
    """Columns that say who made a row; None without keys, and if an earlier release stored it."""

    account: Mapped[str | None] = mapped_column(String(40))
    """The person or key that may change it: `person-…`, or the id of the first of keys that replaced each other."""
    submitter: Mapped[str | None] = mapped_column(String(100))
    """Name of the person or key."""


class Key(Submitted, Table):
    """An API key, stored as a digest."""

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
    """The subset of its role's rights that it has; None for all."""
    made_by: Mapped[str | None] = mapped_column(String(40), index=True)
    """Id of the member's key that created it; it ends with that key."""
    person: Mapped[str | None] = mapped_column(String(64), index=True)
    """Digest of the person's identity at the provider, for a sign-in. None for a key created by hand."""


class StoredJob(Submitted, Table):
    """A submitted job and its state."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("tenant_id", "name"), UniqueConstraint("tenant_id", "idempotency_key"))
    number: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    """Order of submission."""
    id: Mapped[str] = mapped_column(String(40), unique=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The validated configuration."""
    state: Mapped[str] = mapped_column(String(20), index=True)
    wanted: Mapped[str] = mapped_column(String(20))
    """The owner's last request: `run`, `pause` or `cancel`."""
    message: Mapped[str] = mapped_column(Text, default="")
    step: Mapped[int] = mapped_column(default=0)
    steps: Mapped[int]
    created: Mapped[float] = mapped_column(default=now)
    ended: Mapped[float | None]
    reward: Mapped[float | None]
    """Mean reward of the newest step."""
    held_out: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """The newest and the best held-out figure; see `newer_evaluation`."""
    after: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Ids of jobs that must succeed before this one starts."""
    start_at: Mapped[float | None]
    """Earliest start, in Unix seconds."""
    waits: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether `after` or `start_at` holds it back; the engine does not know it yet."""
    starts_from: Mapped[str | None] = mapped_column(String(160))
    """The initial adapter by id: `job-…@best`, `adapter-…`."""
    base: Mapped[str | None] = mapped_column(Text)
    """The name of its base; None for the first base, in databases from when there was only one."""
    race: Mapped[str | None] = mapped_column(ForeignKey("races.id"), index=True)
    """The race of an earlier release of which it was a candidate."""
    until: Mapped[int | None]
    """Not used any more."""


class StoredRace(Table):
    """A race of an earlier release. It is only read, and deleted with its tenant."""

    __tablename__ = "races"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)
    number: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    """Order of submission."""
    id: Mapped[str] = mapped_column(String(40), unique=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The validated job, with `race`."""
    base: Mapped[str | None] = mapped_column(Text)
    """The name of its base."""
    created: Mapped[float] = mapped_column(default=now)
    ended: Mapped[float | None]
    """When the last candidate had ended, or when the race failed."""
    failure: Mapped[str] = mapped_column(Text, default="")
    """Why it could not decide."""


class Event(Table):
    """An event of a job. (job, kind, key) is unique, so repeated reports are stored once."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job_id", "kind", "key"),
        Index("events_of_job", "job_id", "id"),
        {"sqlite_autoincrement": True},  # ids are never reused: listeners ask for events after the last id
    )
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    kind: Mapped[str] = mapped_column(String(20))
    key: Mapped[str] = mapped_column(String(60))
    time: Mapped[float] = mapped_column(default=now)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class StoredFile(Submitted, Table):
    """An uploaded file of rows."""

    __tablename__ = "files"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    filename: Mapped[str] = mapped_column(String(255))
    bytes: Mapped[int] = mapped_column(BIG)
    rows: Mapped[int]
    created: Mapped[float] = mapped_column(default=now)


class FineTuning(Table):
    """The fine-tuning request that created a job."""

    __tablename__ = "fine_tunings"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The request body."""


class AuditEntry(Table):
    """Who changed what."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    time: Mapped[float] = mapped_column(default=now)
    tenant_id: Mapped[str] = mapped_column(String(40), index=True)
    key_id: Mapped[str] = mapped_column(String(40))
    action: Mapped[str] = mapped_column(String(60))
    object: Mapped[str] = mapped_column(String(120))


class UploadedAdapter(Submitted, Table):
    """An uploaded PEFT directory."""

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
    """The name of its base; None as for a job."""
    created: Mapped[float] = mapped_column(default=now)


class Share(Table):
    """Allows others to chat with, start from and download an adapter of a job, or an uploaded one."""

    __tablename__ = "shares"
    __table_args__ = (UniqueConstraint("object", "with_tenant"),)
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    """The owner."""
    object: Mapped[str] = mapped_column(String(40), index=True)
    """Id of a job or an uploaded adapter."""
    with_tenant: Mapped[str] = mapped_column(String(40), index=True)
    """A tenant's id, or `*` for all."""
    created: Mapped[float] = mapped_column(default=now)


class TenantLimits(Table):
    """Limits set by an admin for one tenant; defaults apply to other fields."""

    __tablename__ = "limits"
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    given: Mapped[dict[str, Any]] = mapped_column(JSON)
    """Fields of `LimitsConfig`; null means unlimited."""


class KnownBase(Table):
    """A current or former base of a service with several; its name is never reused for another base."""

    __tablename__ = "bases"
    number: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    """In order of addition: objects stored without a name belong to the first."""
    name: Mapped[str] = mapped_column(Text, unique=True)
    place: Mapped[str] = mapped_column(Text)
    """Its last location: `small`, a hub id, a path."""


class ServiceStart(Table):
    """A start of the service. The running service recognises its database by this row."""

    __tablename__ = "starts"
    token: Mapped[str] = mapped_column(String(40), primary_key=True)
    time: Mapped[float] = mapped_column(default=now)
    proof: Mapped[str | None] = mapped_column(Text)
    """A value encrypted with the operator's key, so that the next start can check the key."""


class Usage(Table):
    """Usage per day: of a job, of a tenant's completions (no job), or idle time (no tenant)."""

    __tablename__ = "usage"
    __table_args__ = (
        UniqueConstraint("day", "tenant_id", "job_id", "base", "account", name="usage_once"),
        Index("usage_of_tenant", "tenant_id", "day"),
    )
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    day: Mapped[str] = mapped_column(String(10))
    """In UTC, such as 2026-01-31."""
    tenant_id: Mapped[str] = mapped_column(String(40))
    job_id: Mapped[str] = mapped_column(String(40), index=True)
    """Kept after the job is deleted."""
    job_name: Mapped[str] = mapped_column(String(100))
    tokens_prompt: Mapped[int] = mapped_column(BIG)
    tokens_sampled: Mapped[int] = mapped_column(BIG)
    tokens_trained: Mapped[int] = mapped_column(BIG)
    microseconds: Mapped[int] = mapped_column(BIG)
    """Device time."""
    cpu_microseconds: Mapped[int] = mapped_column(BIG, default=0, server_default=text("0"))
    """CPU time of rewards, graders and preparations."""
    base: Mapped[str] = mapped_column(Text, default="")
    """The name of the base, as for a job; empty for None."""
    account: Mapped[str] = mapped_column(String(40), default="", server_default=text("''"))
    """That of the job, or whose completions they were, as in `Submitted`; empty for None."""


class MeterReading(Table):
    """Last reported device time of each engine and work of each client's job, to avoid counting twice."""

    __tablename__ = "meter_readings"
    engine: Mapped[str] = mapped_column(String(100), primary_key=True)
    window: Mapped[int] = mapped_column(BIG)


class ScoringUnit(Table):
    """One reward for one problem's completions, to be scored by a reward worker; see `ScoringUnits`."""

    __tablename__ = "scoring_units"
    __table_args__ = (UniqueConstraint("job_id", "key"), Index("scoring_units_of_lease", "lease"))
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    key: Mapped[str] = mapped_column(String(64))
    """A digest of the work."""
    step: Mapped[int]
    """Steps that the job had done at the request."""
    created: Mapped[float] = mapped_column(default=now)
    work: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """`reward`, `problem`, `completions` and `transcripts`; None once scored."""
    completions: Mapped[int]
    scores: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    worker: Mapped[str | None] = mapped_column(String(60))
    lease: Mapped[str | None] = mapped_column(String(40))
    leased_until: Mapped[float | None]
    """End of the lease in Unix seconds; then other workers may take it."""
    handed_out: Mapped[int] = mapped_column(default=0)
