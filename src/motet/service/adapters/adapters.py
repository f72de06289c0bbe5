"""Adapters that can be named: versions of jobs, uploaded ones, and what other tenants share.

A name is `sort@best`, `sort@12`, `sort` (the best), `mine` or `adapter-…` (uploaded), and `team-a/sort@best` for what
another tenant shares. What is neither the asker's nor shared with them is not there.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from motet.errors import StoreError
from motet.service.bases import Bases
from motet.service.database.store import Store, find_job
from motet.service.database.tables import Share, StoredJob, UploadedAdapter
from motet.service.database.tenants import Principal
from motet.service.storage import Storage

ALL = "*"
"""In the place of a tenant: all of them."""


class NoModelError(LookupError):
    """There is no model of this name for whoever asks."""

    def __init__(self, model: str) -> None:
        super().__init__(f"there is no model {model!r}; GET /v1/models lists them")


@dataclass(frozen=True)
class Named:
    """What a name means: a job or an uploaded adapter, and which version of it."""

    thing: StoredJob | UploadedAdapter
    version: str
    """A number, `latest` or `best`; empty where none was named."""


@dataclass(frozen=True)
class Resolved:
    """A PEFT directory that a name means."""

    path: Path
    name: str
    """What to call it at home: `sort-v12`, `mine`."""
    reference: str
    """The same version under ids: `job-…@12`, `adapter-…`."""
    base: str | None
    """The base that it was trained on, as it was stored."""


@dataclass(frozen=True)
class Answerer:
    """What answers under a model's name."""

    base: str
    """The name of the base."""
    directory: Path | None = None
    """Of a version of an adapter on it; None is the base itself."""


class Adapters:
    """Uploaded adapters and shares, and what names mean."""

    def __init__(self, store: Store, storage: Storage, bases: Bases) -> None:
        self._store, self._storage, self.bases = store, storage, bases

    def path(self, adapter_id: str) -> Path:
        """Where an uploaded adapter lies."""
        return self._storage.adapters / adapter_id

    def add(self, who: Principal, adapter: UploadedAdapter) -> UploadedAdapter:
        """Remember an uploaded adapter.

        Raises:
            StoreError: the tenant has an adapter or a job of this name, or the service a base.
        """
        if self.bases.hides(adapter.name):
            raise StoreError(f"{adapter.name!r} is a base of this service; give the adapter another name")
        taken = f"there is an adapter or a job {adapter.name!r} already; give this one another name"
        if self._store.job(Principal.member_of(who.tenant_id), adapter.name) is not None:
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
        return self._store.scalars(query.order_by(UploadedAdapter.created.desc(), UploadedAdapter.id))

    def uploaded(self, who: Principal, name: str) -> UploadedAdapter | None:
        """An uploaded adapter by its id, or by its name among the tenant's own."""
        query = select(UploadedAdapter).where((UploadedAdapter.id == name) | (UploadedAdapter.name == name))
        candidates = self._store.scalars(query)
        own = [one for one in candidates if one.tenant_id == who.tenant_id]
        return next(iter(own or (candidates if who.admin else [])), None)

    def remove(self, adapter: UploadedAdapter) -> None:
        """Forget an uploaded adapter with its shares; jobs that started from it have what they need."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == adapter.id))
            session.execute(delete(UploadedAdapter).where(UploadedAdapter.id == adapter.id))
        shutil.rmtree(self.path(adapter.id), ignore_errors=True)

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

    def find(self, who: Principal, name: str) -> Resolved | None:
        """The PEFT directory that a name means to somebody; None where there is none for them."""
        named = self.named(who, name)
        return None if named is None else self.resolve(named)

    def of_model(self, who: Principal, model: str) -> Answerer:
        """The base that a model's name means, or the version of an adapter.

        Raises:
            NoModelError: there is none for the asker.
            ConfigError: its base is not served any more.
        """
        if (base := self.bases.find(model)) is not None:
            return Answerer(base)
        resolved = self.find(who, model)
        if resolved is None:
            raise NoModelError(model)
        return Answerer(self.bases.of(resolved.base), resolved.path)

    def find_by_id(self, reference: str) -> Resolved | None:
        """The PEFT directory of a `Resolved.reference`, or of a job's id with `best` or `latest`."""
        thing_id, _, version = reference.partition("@")
        thing = self.by_id(thing_id)
        return None if thing is None else self.resolve(Named(thing, version))

    def by_id(self, thing_id: str) -> StoredJob | UploadedAdapter | None:
        """A job or an uploaded adapter, whoever's it is."""
        with self._store.transaction() as session:
            return find_job(session, thing_id) or session.get(UploadedAdapter, thing_id)

    def resolve(self, named: Named) -> Resolved | None:
        """The PEFT directory of a thing's version; None where it has no such version."""
        thing = named.thing
        if isinstance(thing, UploadedAdapter):
            path = self.path(thing.id)
            return Resolved(path, thing.name, thing.id, thing.base) if not named.version and path.is_dir() else None
        version = self._storage.version(thing.id, named.version or "best")
        if version is None:
            return None
        number, path = version
        return Resolved(path, f"{thing.name}-v{number}", f"{thing.id}@{number}", thing.base)

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
            share = session.get(Share, share_id)
            if share is None or not (who.admin or share.tenant_id == who.tenant_id):
                return None
            session.delete(share)
            return share

    def shares(self, who: Principal) -> list[Share]:
        """What a tenant gives others (an admin: all shares) and what others give it, oldest first."""
        query = select(Share).order_by(Share.created, Share.id)
        if not who.admin:
            query = query.where((Share.tenant_id == who.tenant_id) | Share.with_tenant.in_((who.tenant_id, ALL)))
        return self._store.scalars(query)

    def forget_shares(self, thing_id: str) -> None:
        """End all shares of something that goes away."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == thing_id))

    def _shared(self, thing_id: str, who: Principal) -> bool:
        query = select(Share.id).where(Share.object == thing_id, Share.with_tenant.in_((who.tenant_id, ALL)))
        return self._store.scalar(query.limit(1)) is not None
