"""Events of all jobs, read from the database once for everybody who listens."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from sqlalchemy import select

from motet.service.database.store import Store
from motet.service.database.tables import Event, StoredJob
from motet.service.database.tenants import Principal
from motet.service.events.news import News
from motet.service.events.stream import written
from motet.service.schemas import TenantEvent

KEPT = 1000


@dataclass(frozen=True)
class Told:
    """An event, ready to be sent."""

    id: int
    tenant_id: str
    text: str
    """As a server-sent event."""


class Feed:
    """The newest events, filled when there is news. Threads may share it."""

    def __init__(self, store: Store, news: News, most: int = KEPT) -> None:
        """Nothing is read yet.

        Args:
            store: where events are kept.
            news: counts what happens.
            most: events in memory; who is further behind reads the database.
        """
        self._store, self._news, self._most = store, news, most
        self._lock = threading.Lock()
        self._kept: deque[Told] = deque()
        self._floor: int | None = None
        """All events after this one are in memory, up to `_top`."""
        self._top = 0
        self._count = -1

    def since(self, who: Principal, after: int, limit: int) -> list[Told]:
        """Events of a tenant's jobs (an admin's: of all) after one of them, in order, about `limit` at most."""
        with self._lock:
            count = self._news.count  # before looking: what comes meanwhile is looked for the next time
            if count != self._count:
                self._load()
                self._count = count
            floor, kept = self._floor, list(self._kept)
        if floor is None or after < floor:
            return self._read(after, limit, None if who.admin else who.tenant_id)
        return [one for one in kept if one.id > after and (who.admin or one.tenant_id == who.tenant_id)]

    def _load(self) -> None:
        if self._floor is None:
            with self._store.transaction() as session:
                newest = session.scalar(select(Event.id).order_by(Event.id.desc()).limit(1)) or 0
            self._floor = self._top = newest
            return
        while found := self._read(self._top, self._most, None):
            self._kept.extend(found)
            self._top = found[-1].id
            while len(self._kept) > self._most:
                self._floor = self._kept.popleft().id

    def _read(self, after: int, limit: int, tenant_id: str | None) -> list[Told]:
        query = select(Event, StoredJob.tenant_id).join(StoredJob, StoredJob.id == Event.job_id)
        query = query.where(Event.id > after).order_by(Event.id).limit(limit)
        if tenant_id is not None:
            query = query.where(StoredJob.tenant_id == tenant_id)
        with self._store.transaction() as session:
            return [_told(row[0], str(row[1])) for row in session.execute(query)]


def _told(event: Event, tenant_id: str) -> Told:
    shown = TenantEvent.model_validate(
        {"id": event.id, "job": event.job_id, "kind": event.kind, "time": event.time, "data": event.data}
    )
    return Told(event.id, tenant_id, written(shown))
