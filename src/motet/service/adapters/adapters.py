"""Adapters that can be named: versions of jobs, uploaded ones, and what other tenants share.

A name is `sort@best`, `sort@12`, `sort` (the best), `mine` or `adapter-…` (uploaded), and `team-a/sort@best` for what
another tenant shares. What is neither the asker's nor shared with them is not there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from motet.errors import StoreError
from motet.service.database.store import Store, find_job
from motet.service.database.tables import Share, StoredJob, UploadedAdapter
from motet.service.database.tenants import Principal

ALL = "*"
"""In the place of a tenant: all of them."""
FindVersion = Callable[[StoredJob, str], "tuple[int, Path] | None"]
"""A saved version of a job: its number and its PEFT directory."""


@dataclass(frozen=True)
class Named:
    """What a name means: a job or an uploaded adapter, and which version of it."""

    thing: StoredJob | UploadedAdapter
    version: str
    """A number, `latest` or `best`; empty where none was named."""


@dataclass(frozen=True)
class Found:
    """A PEFT directory that a name means."""

    path: Path
    name: str
    """What to call it at home: `sort-v12`, `mine`."""
    reference: str
    """The same version under ids: `job-…@12`, `adapter-…`."""


class Adapters:
    """Uploaded adapters and shares, and what names mean."""

    def __init__(self, store: Store, directory: Path, version: FindVersion) -> None:
        """Uploaded adapters lie in `directory`, one below each id."""
        self._store, self.directory, self._version = store, directory, version

    # --- uploaded ones ----------------------------------------------------------------------------------------------------

    def path(self, adapter_id: str) -> Path:
        """Where an uploaded adapter lies."""
        return self.directory / adapter_id

    def add(self, who: Principal, adapter: UploadedAdapter) -> UploadedAdapter:
        """Remember an uploaded adapter.

        Raises:
            StoreError: the tenant has an adapter or a job of this name.
        """
        taken = f"there is an adapter or a job {adapter.name!r} already; give this one another name"
        own = self._store.job(Principal.member_of(who.tenant_id), adapter.name)
        if own is not None:
            raise StoreError(taken)
        try:
            with self._store.transaction() as session:
                session.add(adapter)
        except IntegrityError as error:
            raise StoreError(taken) from error
        return adapter

    def all(self, who: Principal) -> list[UploadedAdapter]:
        """A tenant's uploaded adapters, newest first."""
        query = select(UploadedAdapter).where(UploadedAdapter.tenant_id == who.tenant_id)
        with self._store.transaction() as session:
            return list(session.scalars(query.order_by(UploadedAdapter.created.desc(), UploadedAdapter.id)))

    def uploaded(self, who: Principal, name: str) -> UploadedAdapter | None:
        """An uploaded adapter by its id, or by its name among the tenant's own."""
        query = select(UploadedAdapter).where((UploadedAdapter.id == name) | (UploadedAdapter.name == name))
        with self._store.transaction() as session:
            found = list(session.scalars(query))
        own = [one for one in found if one.tenant_id == who.tenant_id]
        return next(iter(own or (found if who.admin else [])), None)

    def remove(self, adapter: UploadedAdapter) -> None:
        """Forget an uploaded adapter with its shares; jobs that started from it have what they need."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == adapter.id))
            session.execute(delete(UploadedAdapter).where(UploadedAdapter.id == adapter.id))
        shutil.rmtree(self.path(adapter.id), ignore_errors=True)

    # --- names ------------------------------------------------------------------------------------------------------------

    def named(self, who: Principal, name: str) -> Named | None:
        """What a name means to somebody; None where it is not there for them."""
        owner, slash, rest = name.rpartition("/")
        title, _, version = rest.partition("@")
        if not slash:
            thing = self._store.job(who, title) or self.uploaded(who, title)
            return None if thing is None else Named(thing, version)
        tenant = self._store.tenants.find(owner)
        if tenant is None:
            return None
        as_owner = Principal.member_of(tenant.id)
        thing = self._store.job(as_owner, title) or self.uploaded(as_owner, title)
        if thing is None or not (tenant.id == who.tenant_id or who.admin or self._shared(thing.id, who)):
            return None
        return Named(thing, version)

    def find(self, who: Principal, name: str) -> Found | None:
        """The PEFT directory that a name means to somebody; None where there is none for them."""
        named = self.named(who, name)
        return None if named is None else self.directory_of(named)

    def find_by_id(self, reference: str) -> Found | None:
        """The PEFT directory of a `Found.reference`, or of a job's id with `best` or `latest`."""
        thing_id, _, version = reference.partition("@")
        thing = self.by_id(thing_id)
        return None if thing is None else self.directory_of(Named(thing, version))

    def by_id(self, thing_id: str) -> StoredJob | UploadedAdapter | None:
        """A job or an uploaded adapter, whoever's it is."""
        with self._store.transaction() as session:
            return find_job(session, thing_id) or session.get(UploadedAdapter, thing_id)

    def directory_of(self, named: Named) -> Found | None:
        """The PEFT directory of a thing's version; None where it has no such version."""
        thing = named.thing
        if isinstance(thing, UploadedAdapter):
            path = self.path(thing.id)
            return Found(path, thing.name, thing.id) if not named.version and path.is_dir() else None
        found = self._version(thing, named.version or "best")
        return None if found is None else Found(found[1], f"{thing.name}-v{found[0]}", f"{thing.id}@{found[0]}")

    # --- shares -----------------------------------------------------------------------------------------------------------

    def share(self, share: Share) -> Share:
        """Let others use something; the same share again where there is one."""
        same = select(Share).where(Share.object == share.object, Share.with_tenant == share.with_tenant)
        try:
            with self._store.transaction() as session:
                session.add(share)
        except IntegrityError:
            with self._store.transaction() as session:
                return session.scalars(same).one()
        return share

    def unshare(self, who: Principal, share_id: str) -> Share | None:
        """End one of a tenant's own shares (an admin: any); None where there is none."""
        with self._store.transaction() as session:
            found = session.get(Share, share_id)
            if found is None or not (who.admin or found.tenant_id == who.tenant_id):
                return None
            session.delete(found)
            return found

    def shares(self, who: Principal) -> list[Share]:
        """What a tenant gives others (an admin: all shares) and what others give it, oldest first."""
        query = select(Share).order_by(Share.created, Share.id)
        if not who.admin:
            query = query.where((Share.tenant_id == who.tenant_id) | Share.with_tenant.in_((who.tenant_id, ALL)))
        with self._store.transaction() as session:
            return list(session.scalars(query))

    def forget_shares(self, thing_id: str) -> None:
        """End all shares of something that goes away."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == thing_id))

    def _shared(self, thing_id: str, who: Principal) -> bool:
        query = select(Share.id).where(Share.object == thing_id, Share.with_tenant.in_((who.tenant_id, ALL)))
        with self._store.transaction() as session:
            return session.scalar(query.limit(1)) is not None
