"""What the service remembers, as tables. `migrations/` brings a database to this shape."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in INTEGER columns


def now() -> float:
    """Unix seconds."""
    return datetime.now(UTC).timestamp()


class Table(DeclarativeBase):
    """Base of all tables."""


class Tenant(Table):
    """Whoever owns jobs: a person or a team."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    created: Mapped[float] = mapped_column(default=now)


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


class StoredJob(Table):
    """A job as it was asked for, and where it stands."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "idempotency_key"),
    )
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


class Event(Table):
    """Something that happened to a job. (job, kind, key) is unique, so that what is told twice is kept once."""

    __tablename__ = "events"
    __table_args__ = (UniqueConstraint("job_id", "kind", "key"), Index("events_of_job", "job_id", "id"))
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


class AuditEntry(Table):
    """Who changed what."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(BIG, primary_key=True, autoincrement=True)
    time: Mapped[float] = mapped_column(default=now)
    tenant_id: Mapped[str] = mapped_column(String(40), index=True)
    key_id: Mapped[str] = mapped_column(String(40))
    action: Mapped[str] = mapped_column(String(60))
    object: Mapped[str] = mapped_column(String(120))
