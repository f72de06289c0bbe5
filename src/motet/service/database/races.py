"""Races in the database."""

from __future__ import annotations

from sqlalchemy import delete, select, update

from motet.service.database.store import Store
from motet.service.database.tables import StoredJob, StoredRace, now
from motet.service.database.tenants import Principal


class RaceRows:
    """The rows of races; every call is one short transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def page(self, who: Principal, *, before: int | None = None, limit: int = 50) -> list[StoredRace]:
        """A tenant's races (an admin's: all), newest first; `before` is the number of the previous page's last race."""
        query = select(StoredRace).order_by(StoredRace.number.desc()).limit(limit)
        query = query if who.admin else query.where(StoredRace.tenant_id == who.tenant_id)
        return self._store.scalars(query if before is None else query.where(StoredRace.number < before))

    def find(self, who: Principal, name: str) -> StoredRace | None:
        """A race by its id, or by its name among the tenant's races (an admin's: among all, the tenant's own first)."""
        named = select(StoredRace).where((StoredRace.id == name) | (StoredRace.name == name))
        found = self._store.scalars(named if who.admin else named.where(StoredRace.tenant_id == who.tenant_id))
        return min(found, key=lambda one: (one.id != name, one.tenant_id != who.tenant_id), default=None)

    def open(self) -> list[StoredRace]:
        """Races of all tenants that have not ended, oldest first."""
        return self._store.scalars(select(StoredRace).where(StoredRace.ended.is_(None)).order_by(StoredRace.number))

    def candidates(self, race_id: str) -> list[StoredJob]:
        """The jobs of a race, in order."""
        return self._store.scalars(select(StoredJob).where(StoredJob.race == race_id).order_by(StoredJob.number))

    def names(self, race_id: str) -> dict[str, str]:
        """The ids of a race's jobs by name, in order."""
        query = select(StoredJob.name, StoredJob.id).where(StoredJob.race == race_id).order_by(StoredJob.number)
        with self._store.transaction() as session:
            return {str(row[0]): str(row[1]) for row in session.execute(query)}

    def end(self, race_id: str, failure: str = "") -> None:
        """Record that a race has ended."""
        with self._store.transaction() as session:
            session.execute(update(StoredRace).where(StoredRace.id == race_id).values(ended=now(), failure=failure))

    def delete(self, race_id: str) -> None:
        """Delete a race without jobs."""
        with self._store.transaction() as session:
            session.execute(delete(StoredRace).where(StoredRace.id == race_id))
