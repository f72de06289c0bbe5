"""The adapters that a tenant may ask, in pages: versions of its jobs, uploaded adapters, and those that others share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import select, tuple_

from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob, UploadedAdapter
from motet.service.database.tenants import Principal
from motet.service.storage import Storage

PLACE = r"^(0/[0-9]{1,15}//|[12]/[0-9]{1,15}\.[0-9]{1,20}/[0-9A-Za-z_.-]{1,60}/)([0-9]{1,9}|latest|best)?$"
"""A place in the list: a section, a row of it in two parts, and the last version of the row that was listed."""


@dataclass(frozen=True)
class Listed:
    """A model's name."""

    name: str
    base: str | None
    """Its stored base."""
    created: float
    """0 for those that others share."""


@dataclass(frozen=True)
class _Row:
    """Something that has one name, or one for each of its versions."""

    place: str
    name: str
    base: str | None
    created: float = 0
    job: str = ""
    """Id of the job with the versions; empty for an uploaded adapter."""


class Listing:
    """Reads a page: no more rows, and no more jobs' directories, than it may show models."""

    def __init__(self, store: Store, storage: Storage, adapters: Adapters) -> None:
        self._store, self._storage, self._adapters = store, storage, adapters

    def page(self, who: Principal, after: str | None, limit: int) -> tuple[list[Listed], str | None]:
        """Models after a place, and the place after which there may be more. `after` matches `PLACE`."""
        listed, left, here = dict[str, Listed](), limit, after
        first = 0 if after is None else int(after[0])
        for section, rows in enumerate((self._jobs, self._uploaded, self._received)[first:], first):
            since = after if section == first else None
            for row in rows(who, None if since is None else since.split("/"), left + 2):
                known = since.rpartition("/")[2] if since is not None and since.startswith(row.place) else ""
                if known == "best":  # the last one of the page before
                    continue
                if not left:
                    return list(listed.values()), here
                for version in self._versions(row, known):
                    if len(listed) == limit:
                        return list(listed.values()), here
                    name, here = f"{row.name}@{version}" if version else row.name, f"{row.place}{version}"
                    listed[name] = Listed(name, row.base, row.created)  # one may be shared twice
                left, here = left - 1, f"{row.place}best"
        return list(listed.values()), None

    def _versions(self, row: _Row, known: str) -> Sequence[str]:
        """Names of the versions after a known one; one without a name for an uploaded adapter."""
        if not row.job:
            return [""] if row.name else []
        names = self._storage.version_names(row.job)
        if known == "latest":
            return names[-1:]
        return [one for one in names if not known or not one.isdecimal() or int(one) > int(known)]

    def _jobs(self, who: Principal, since: Sequence[str] | None, limit: int) -> Iterable[_Row]:
        wanted = select(StoredJob.number, StoredJob.id, StoredJob.name, StoredJob.base, StoredJob.created)
        query = wanted.order_by(StoredJob.number.desc()).limit(limit)
        if not who.admin:
            query = query.where(StoredJob.tenant_id == who.tenant_id)
        if since is not None:
            query = query.where(StoredJob.number <= int(since[1]))
        with self._store.transaction() as session:
            rows = session.execute(query).all()
        for number, job, name, base, created in rows:
            yield _Row(f"0/{number}//", name, base, created, job)

    def _uploaded(self, who: Principal, since: Sequence[str] | None, limit: int) -> Iterable[_Row]:
        place = UploadedAdapter.created, UploadedAdapter.id
        query = select(UploadedAdapter).where(UploadedAdapter.tenant_id == who.tenant_id)
        query = query.order_by(*(one.desc() for one in place)).limit(limit)
        if since is not None:
            query = query.where(tuple_(*place) <= (float(since[1]), since[2]))
        for one in self._store.scalars(query):
            yield _Row(f"1/{one.created!r}/{one.id}/", one.name, one.base, one.created)

    def _received(self, who: Principal, since: Sequence[str] | None, limit: int) -> Iterable[_Row]:
        place = None if since is None else (float(since[1]), since[2])
        for one in self._adapters.received(who, place, limit):
            share = one.share
            name, job = one.name and f"{one.owner}/{one.name}", share.object if one.is_job else ""
            yield _Row(f"2/{share.created!r}/{share.id}/", name, one.base, job=job)
