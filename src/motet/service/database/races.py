"""Races in the database."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Integer, cast, delete, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from motet.core.errors import StoreError
from motet.core.types import JobState
from motet.service.database.store import Store, only_one, size_of
from motet.service.database.tables import Event, StoredJob, StoredRace, now
from motet.service.database.tenants import Principal


class CandidateRow(NamedTuple):
    """Where a candidate stands."""

    id: str
    state: str
    step: int
    until: int | None

    @property
    def waits(self) -> bool:
        """Whether it has done all steps before the next decision, and is not paused."""
        return self.state != JobState.PAUSED.value and self.until is not None and self.step >= self.until


class RaceRows:
    """The rows of races; every call is one short transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def page(self, who: Principal, *, before: int | None = None, limit: int = 50) -> tuple[list[StoredRace], bool]:
        """A tenant's races (an admin's: all), newest first, fewer if they are large, and whether others follow.

        `before` is the number of the previous page's last race.
        """
        query = select(StoredRace).order_by(StoredRace.number.desc())
        query = query if who.admin else query.where(StoredRace.tenant_id == who.tenant_id)
        query = query if before is None else query.where(StoredRace.number < before)
        return self._store.page(query, size_of(StoredRace.spec), limit)

    def find(self, who: Principal, name: str) -> StoredRace | None:
        """A race by its id, or by its name among the tenant's races; an admin's also by a name that only one tenant has.

        Raises:
            StoreError: several tenants have a race of this name, and the admin's own has none.
        """
        named = (
            select(StoredRace).where((StoredRace.id == name) | (StoredRace.name == name)).order_by(StoredRace.number)
        )
        found = self._store.scalars(named if who.admin else named.where(StoredRace.tenant_id == who.tenant_id))
        return only_one(self._store.tenants, who, name, sorted(found, key=lambda one: one.id != name))

    def get(self, race_id: str) -> StoredRace | None:
        """A race of any tenant by its id."""
        return self._store.scalar(select(StoredRace).where(StoredRace.id == race_id))

    def open(self) -> dict[str, list[CandidateRow]]:
        """The candidates of all races that have not ended, by the race's id, without their configurations."""
        fields = StoredJob.id, StoredJob.state, StoredJob.step, StoredJob.until
        query = select(StoredRace.id, *fields).join(StoredJob, StoredJob.race == StoredRace.id)
        found: dict[str, list[CandidateRow]] = {}
        with self._store.transaction() as session:
            for row in session.execute(query.where(StoredRace.ended.is_(None)).order_by(StoredRace.number)):
                found.setdefault(row[0], []).append(CandidateRow(row[1], row[2], row[3], row[4]))
        return found

    def candidates(self, race_id: str) -> list[StoredJob]:
        """The jobs of a race, in order."""
        return self._store.scalars(select(StoredJob).where(StoredJob.race == race_id).order_by(StoredJob.number))

    def names(self, race_id: str) -> dict[str, str]:
        """The ids of a race's jobs by name, in order."""
        query = select(StoredJob.name, StoredJob.id).where(StoredJob.race == race_id).order_by(StoredJob.number)
        with self._store.transaction() as session:
            return {str(row[0]): str(row[1]) for row in session.execute(query)}

    def continue_job(self, row: StoredJob, original: StoredJob) -> None:
        """Queue a job that continues another one. It takes that job's step events, so no step is charged twice.

        Raises:
            StoreError: the tenant has a job with its name.
        """
        step = cast(Event.key, Integer) < row.step
        values = select(literal(row.id), Event.kind, Event.key, Event.time, Event.data).order_by(Event.id)
        steps = values.where(Event.job_id == original.id, Event.kind == "step", step)
        try:
            with self._store.transaction() as session:
                self._store.wait_for_earlier_events(session)
                session.add(row)
                session.flush()
                session.execute(insert(Event).from_select(["job_id", "kind", "key", "time", "data"], steps))
        except IntegrityError as error:
            raise StoreError(
                f"there is a job {row.name!r} already, and a copy needs this name; submit the race again under another name"
            ) from error

    def end(self, race_id: str, failure: str = "") -> None:
        """Record that a race has ended."""
        with self._store.transaction() as session:
            session.execute(update(StoredRace).where(StoredRace.id == race_id).values(ended=now(), failure=failure))

    def delete(self, race_id: str) -> None:
        """Delete a race without jobs."""
        with self._store.transaction() as session:
            session.execute(delete(StoredRace).where(StoredRace.id == race_id))
