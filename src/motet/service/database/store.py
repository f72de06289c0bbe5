"""The service's data in a database: tenants, keys, jobs, events and files. SQLite by default, PostgreSQL by URL.

Every call is one short transaction. Requests of a tenant only search that tenant's objects, so others are not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Select, Text, cast, delete, func, select, tuple_, update
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import InstrumentedAttribute, Session, defer, sessionmaker

from motet.core.errors import StoreError
from motet.core.types import JobState, Wanted
from motet.service.database.opening import (
    EVENTS,
    UnknownShape,
    lock,
    migrate,
    open_engine,
    public,
)
from motet.service.database.presence import DatabaseReplaced, Presence
from motet.service.database.tables import (
    AuditEntry,
    Event,
    FineTuning,
    Key,
    KnownBase,
    StoredFile,
    StoredJob,
    Tenant,
    UploadedAdapter,
    new_id,
)
from motet.service.database.tenants import Principal, Tenants, audit_entry

Value = TypeVar("Value")
Named = TypeVar("Named", StoredJob, UploadedAdapter)
AWAY = (OperationalError, InterfaceError, NoConnection)
"""Errors of a database that is unreachable, full, read-only (in a failover) or out of connections; a retry may succeed."""
_READ_ONLY = "25006"
"""PostgreSQL's error code for a read-only transaction."""
MOST_OF_A_PAGE = 2**22
"""Characters of the configurations on a page, which has one of them in any case."""
IN_PARTS = {"yield_per": 8}
"""Option of a query whose rows may be large: a page often ends before the last one."""
OPEN = tuple(state.value for state in JobState if not state.final)


def only_one(tenants: Tenants, who: Principal, name: str, found: Sequence[Named]) -> Named | None:
    """The job or adapter that an admin means: the tenant's own, that of the id, or the only one.

    Raises:
        StoreError: it could be any of several.
    """
    mine = [one for one in found if name == one.id or one.tenant_id == who.tenant_id]
    if not mine and len(found) > 1:
        each = ", ".join(f"{one.id} of {tenants.name_of(one.tenant_id)}" for one in found[:10])
        raise StoreError(f"{len(found)} tenants have a {name!r}; give its id: {each}")
    return next(iter(mine or found), None)


def size_of(*columns: InstrumentedAttribute[Any]) -> Any:
    """The characters of a row's JSON, for `first_of`."""
    return sum(func.length(cast(column, Text)) for column in columns)


def first_of(rows: Iterable[Any], limit: int) -> tuple[list[Any], bool]:
    """The rows of a page without their last column, the size: `limit`, or fewer large ones; and whether others follow."""
    kept, total = list[Any](), 0
    for *row, size in rows:
        total += size
        if kept and (len(kept) == limit or total > MOST_OF_A_PAGE):
            return kept, True
        kept.append(row)
    return kept, False


def files_of(who: Principal, after: StoredFile | None, *, newest: bool) -> Select[StoredFile]:
    """A tenant's files, newest or oldest first; `after` is the previous page's last one."""
    place = StoredFile.created, StoredFile.id
    query = select(StoredFile).where(StoredFile.tenant_id == who.tenant_id)
    query = query.order_by(*(one.desc() if newest else one.asc() for one in place))
    if after is None:
        return query
    there = tuple_(after.created, after.id)
    return query.where(tuple_(*place) < there if newest else tuple_(*place) > there)


def jobs_of(who: Principal, state: str | None, before: int | None) -> Select[StoredJob]:
    """A tenant's jobs (an admin's: all), newest first; `before` is the number of the previous page's last job."""
    query = select(StoredJob).order_by(StoredJob.number.desc())
    for wanted in (
        None if who.admin else StoredJob.tenant_id == who.tenant_id,
        None if state is None else StoredJob.state == state,
        None if before is None else StoredJob.number < before,
    ):
        query = query if wanted is None else query.where(wanted)
    return query


def find_job(session: Session, job_id: str) -> StoredJob | None:
    """A job of any tenant by its id, within a transaction."""
    return session.scalar(select(StoredJob).where(StoredJob.id == job_id))


class Store:
    """One database."""

    def __init__(self, url: str, *, lock_seconds: float = 20.0) -> None:
        """Open the database and migrate it. `lock_seconds` limits the wait for another service's PostgreSQL lock.

        Raises:
            StoreError: it cannot be opened; the message says why.
        """
        self._engine, self._lock_seconds = open_engine(url), lock_seconds
        self._session = sessionmaker(self._engine, expire_on_commit=False)
        self.tenants = Tenants(self.transaction)
        try:
            migrate(self._engine, lock_seconds)
            self.presence = Presence(self._engine)
        except (SQLAlchemyError, UnknownShape) as error:
            self._engine.dispose()
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise StoreError(f"the database {public(url)} cannot be opened: {reason}") from error

    def close(self) -> None:
        """Close the connections."""
        self.presence.close()
        self._engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session, committed at the end, or rolled back on an exception. Raises DatabaseReplaced if it is another one."""
        self.presence.check_files()
        try:
            with self._session.begin() as session:
                self.presence.check_row(session)
                yield session
        except InternalError as error:
            if getattr(error.orig, "sqlstate", None) != _READ_ONLY:
                raise
            raise OperationalError(error.statement, error.params, error.orig or error) from error

    def scalars(self, query: Select[Value]) -> list[Value]:
        """All results of a query, in a separate transaction."""
        with self.transaction() as session:
            return list(session.scalars(query))

    def scalar(self, query: Select[Value]) -> Value | None:
        """The first result of a query."""
        with self.transaction() as session:
            return session.scalar(query)

    def failure(self) -> str:
        """Why the database cannot be used, for a person; empty if it can."""
        try:
            self.scalar(select(1))
        except DatabaseReplaced as error:
            return str(error.orig)
        except AWAY:
            return "the database does not answer"
        return ""

    def audit(self, who: Principal, action: str, thing: str) -> None:
        """Record who changed what."""
        with self.transaction() as session:
            session.add(audit_entry(who, action, thing))

    def audit_entries(
        self, *, tenant_id: str | None = None, before: int | None = None, limit: int = 100
    ) -> Sequence[tuple[AuditEntry, str, str, str | None]]:
        """Entries before a given one, with the names of tenant, key and the key's submitter, newest first."""
        query = (
            select(AuditEntry, Tenant.name, Key.name, Key.submitter)
            .join(Tenant, Tenant.id == AuditEntry.tenant_id, isouter=True)
            .join(Key, Key.id == AuditEntry.key_id, isouter=True)
            .order_by(AuditEntry.id.desc())
            .limit(limit)
        )
        if tenant_id is not None:
            query = query.where(AuditEntry.tenant_id == tenant_id)
        if before is not None:
            query = query.where(AuditEntry.id < before)
        with self.transaction() as session:
            return [(entry, tenant or "", key or "", whose) for entry, tenant, key, whose in session.execute(query)]

    def known_bases(self, places: Mapping[str, str]) -> dict[str, str]:
        """Record the bases, and return all recorded ones, oldest first."""
        with self.transaction() as session:
            known = {one.name: one for one in session.scalars(select(KnownBase).order_by(KnownBase.number))}
            for name, place in places.items():
                if (one := known.setdefault(name, KnownBase(name=name, place=place))) not in session:
                    session.add(one)
                one.place = place
            return {name: one.place for name, one in known.items()}

    # --- jobs ---------------------------------------------------------------------------------------------------------------

    def submit(self, who: Principal, jobs: Sequence[StoredJob]) -> list[StoredJob]:
        """Queue jobs (rows with name, spec and steps) in one transaction: all or none.

        Raises:
            StoreError: the tenant has a job with such a name or idempotency key.
        """
        for job in jobs:
            job.id, job.tenant_id = job.id or new_id("job"), who.tenant_id
            job.state, job.wanted = JobState.QUEUED.value, Wanted.RUN.value
            job.account, job.submitter = who.account, who.submitter
        whose = {"submitter": who.submitter} if who.submitter else {}
        try:
            with self.transaction() as session:
                self.wait_for_earlier_events(session)
                for job in jobs:
                    session.add(job)
                    session.flush()
                    data = {"state": job.state, "message": job.message or "", **whose}
                    session.add(Event(job_id=job.id, kind="state", key="0", data=data))
        except IntegrityError as error:
            raise StoreError(name_taken(" or ".join(job.name for job in jobs[:3]))) from error
        return list(jobs)

    def submitted(self, who: Principal, idempotency: str | None) -> StoredJob | None:
        """The job that a tenant submitted with an idempotency key."""
        same = (StoredJob.tenant_id == who.tenant_id) & (StoredJob.idempotency_key == idempotency)
        return None if idempotency is None else self.scalar(select(StoredJob).where(same))

    def jobs(
        self, who: Principal, *, state: str | None = None, before: int | None = None, limit: int = 50
    ) -> list[StoredJob]:
        """Some of `jobs_of`, without `spec`."""
        return self.scalars(jobs_of(who, state, before).limit(limit).options(defer(StoredJob.spec)))

    def page(self, query: Select[Value], size: Any, limit: int) -> tuple[list[Value], bool]:
        """A page of a query, shorter if its rows are large, and whether others follow; `size` is from `size_of`."""
        query = query.limit(limit + 1).add_columns(size)
        with self.transaction() as session, session.execute(query, execution_options=IN_PARTS) as every:
            rows, more = first_of(every, limit)
        return [row[0] for row in rows], more

    def job(self, who: Principal, name: str) -> StoredJob | None:
        """A job by its id, or by its name among the tenant's jobs; an admin's also by a name that only one tenant has.

        Raises:
            StoreError: several tenants have a job of this name, and the admin's own has none.
        """
        own = (StoredJob.tenant_id == who.tenant_id) & (StoredJob.name == name)  # an index has both
        with self.transaction() as session:
            candidates = list(session.scalars(select(StoredJob).where(own | (StoredJob.id == name))))
            if not candidates and who.admin:
                named = select(StoredJob).where(StoredJob.name == name).order_by(StoredJob.number)
                candidates = list(session.scalars(named))
        seen = [job for job in candidates if who.admin or job.tenant_id == who.tenant_id]
        return only_one(self.tenants, who, name, seen)

    def job_by_id(self, job_id: str) -> StoredJob | None:
        """A job of any tenant by its id."""
        with self.transaction() as session:
            return find_job(session, job_id)

    def open_jobs(self) -> list[StoredJob]:
        """Unfinished jobs in order of submission, which a starting service resumes."""
        return self.scalars(select(StoredJob).where(StoredJob.state.in_(OPEN)).order_by(StoredJob.number))

    def change_job(self, job_id: str, **fields: Any) -> None:
        """Set columns of a job."""
        with self.transaction() as session:
            session.execute(update(StoredJob).where(StoredJob.id == job_id).values(**fields))

    def delete_job(self, job_id: str) -> None:
        """Delete a job and its events."""
        with self.transaction() as session:
            session.execute(delete(Event).where(Event.job_id == job_id))
            session.execute(delete(FineTuning).where(FineTuning.job_id == job_id))
            session.execute(delete(StoredJob).where(StoredJob.id == job_id))

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        with self.transaction() as session:
            rows = session.execute(select(StoredJob.state, func.count()).group_by(StoredJob.state)).all()
            return {str(row[0]): int(row[1]) for row in rows}

    # --- events -------------------------------------------------------------------------------------------------------------

    def add_event(
        self,
        job_id: str,
        kind: str,
        key: str,
        data: Mapping[str, Any],
        also: Callable[[Session], None] | None = None,
        unless: Collection[JobState] = (),
        **fields: Any,
    ) -> int | None:
        """Store an event, run `also` in the same transaction, and set columns of its job.

        Returns the event's id; None if it was stored before, its job is gone, or has a state of `unless`.
        """
        entry = Event(job_id=job_id, kind=kind, key=key, data=dict(data))
        try:
            with self.transaction() as session:
                self.wait_for_earlier_events(session)
                session.add(entry)
                session.flush()
                if unless and session.scalar(select(StoredJob.state).where(StoredJob.id == job_id)) in unless:
                    session.rollback()
                    return None
                if also is not None:
                    also(session)
                if fields:
                    session.execute(update(StoredJob).where(StoredJob.id == job_id).values(**fields))
        except IntegrityError:
            return None
        return entry.id

    def wait_for_earlier_events(self, session: Session) -> None:
        """Commit events in the order of their ids; otherwise a reader could skip one that is committed late.

        SQLite has a single writer, so it needs no lock.
        """
        if self._engine.dialect.name == "postgresql":
            lock(session, EVENTS, self._lock_seconds)

    def events(self, job_id: str, after: int = 0, limit: int = 500) -> Sequence[Event]:
        """Events of a job after a given one, in order."""
        query = select(Event).where(Event.job_id == job_id, Event.id > after).order_by(Event.id).limit(limit)
        return self.scalars(query)

    def last_event(self, job_id: str) -> Event | None:
        """The newest event of a job."""
        return self.scalar(select(Event).where(Event.job_id == job_id).order_by(Event.id.desc()).limit(1))

    # --- files --------------------------------------------------------------------------------------------------------------

    def add_file(self, who: Principal, file_id: str, filename: str, size: int, rows: int) -> StoredFile:
        """Record an uploaded file, and who uploaded it."""
        about = {"filename": filename, "bytes": size, "rows": rows, **who.submitted}
        file = StoredFile(id=file_id, tenant_id=who.tenant_id, **about)
        with self.transaction() as session:  # one write to the disk for both
            session.add_all((file, audit_entry(who, "upload file", file_id)))
        return file

    def file(self, who: Principal, file_id: str) -> StoredFile | None:
        """One of a tenant's files."""
        return self.scalar(select(StoredFile).where(StoredFile.id == file_id, StoredFile.tenant_id == who.tenant_id))

    def has_upload(self, upload_id: str) -> bool:
        """Whether an uploaded file or adapter has this id."""
        ids = (select(kind.id).where(kind.id == upload_id) for kind in (StoredFile, UploadedAdapter))
        return any(self.scalar(query) is not None for query in ids)

    def delete_file(self, file_id: str) -> None:
        """Delete a file's record."""
        with self.transaction() as session:
            session.execute(delete(StoredFile).where(StoredFile.id == file_id))


def name_taken(name: str) -> str:
    """Message for a duplicate name."""
    return f"there is a job {name!r} already; give this one another name"
