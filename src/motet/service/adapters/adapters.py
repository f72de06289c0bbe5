"""Adapters that have names: versions of jobs, uploaded adapters, and those that other tenants share.

A name is `sort@best`, `sort@12`, `sort` (the best), `mine` or `adapter-…` (uploaded), or `team-a/sort@best` for an
adapter that another tenant shares. Other tenants' unshared adapters are not found.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, delete, func, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from motet.core.errors import StoreError
from motet.service.bases import Bases
from motet.service.database.store import Store, find_job, only_one
from motet.service.database.tables import Share, StoredJob, Tenant, UploadedAdapter
from motet.service.database.tenants import Principal, hold_tenant
from motet.service.storage import Storage

ALL = "*"
"""Shares with all tenants."""
_OF_TEMPLATE = ("chat_template", "chat_template_kwargs", "tool_format", "thoughts")
_PLACE = tuple_(Share.created, Share.id)
_ROW = r"[0-9]{1,15}\.[0-9]{1,20}/[0-9A-Za-z_.-]{1,60}"
PLACE_OF_SHARE = f"^(given|received)/{_ROW}$"
"""A place in a tenant's list of shares: which kind, and the row after which to go on."""
PLACE_OF_ADAPTER = f"^{_ROW}$"
"""A place in a tenant's list of uploaded adapters: the row after which to go on."""
MOST_SHARES = 1000
"""Most shares that a tenant gives."""


class NoModelError(LookupError):
    """The requester can see no model of this name."""

    def __init__(self, model: str) -> None:
        super().__init__(f"there is no model {model!r}; GET /v1/models lists them")


@dataclass(frozen=True)
class Named:
    """The meaning of a name: a job or an uploaded adapter, and a version."""

    thing: StoredJob | UploadedAdapter
    version: str
    """A number, `latest` or `best`; empty if the name has none."""


@dataclass(frozen=True)
class Resolved:
    """The PEFT directory that a name refers to."""

    path: Path
    name: str
    """Name for downloads: `sort-v12`, `mine`."""
    reference: str
    """The same version with ids: `job-…@12`, `adapter-…`."""
    base: str | None
    """The base that it was trained on, under its stored name."""
    job_of: str | None = None
    """The tenant whose job made it; None for an uploaded adapter."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """How its job uses the chat template: fields of its `data`."""


@dataclass(frozen=True)
class Answerer:
    """What a model name resolves to."""

    base: str
    """The name of the base."""
    directory: Path | None = None
    """A version of an adapter; None for the base itself."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """How its job uses the chat template."""


@dataclass(frozen=True)
class Shared:
    """A share and the names in it."""

    share: Share
    owner: str
    tenant: str
    """The other tenant; `*` for all."""
    name: str
    """The owner's name for what is shared; empty if it is gone."""
    base: str | None
    """Its base, under its stored name."""
    is_job: bool


class Adapters:
    """Uploaded adapters, shares, and the resolution of names."""

    def __init__(self, store: Store, storage: Storage, bases: Bases) -> None:
        self._store, self._storage, self.bases = store, storage, bases

    def path(self, adapter_id: str) -> Path:
        """The directory of an uploaded adapter."""
        return self._storage.adapters / adapter_id

    def add(self, who: Principal, adapter: UploadedAdapter) -> UploadedAdapter:
        """Record an uploaded adapter. Raises StoreError if a job or adapter of the tenant, or a base, has this name."""
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

    def page(self, who: Principal, after: str | None, limit: int) -> tuple[list[UploadedAdapter], str | None]:
        """A tenant's uploaded adapters, newest first, and the place after which there are more.

        `after` matches `PLACE_OF_ADAPTER`.
        """
        place = tuple_(UploadedAdapter.created, UploadedAdapter.id)
        query = select(UploadedAdapter).where(UploadedAdapter.tenant_id == who.tenant_id)
        if after is not None:
            created, adapter_id = after.split("/")
            query = query.where(place < (float(created), adapter_id))
        query = query.order_by(UploadedAdapter.created.desc(), UploadedAdapter.id.desc())
        rows = self._store.scalars(query.limit(limit + 1))
        return rows[:limit], f"{rows[limit - 1].created!r}/{rows[limit - 1].id}" if len(rows) > limit else None

    def uploaded(self, who: Principal, name: str) -> UploadedAdapter | None:
        """An uploaded adapter by its id, or by its name among the tenant's; an admin's also by one that only one tenant has.

        Raises:
            StoreError: several tenants have an adapter of this name, and the admin's own has none.
        """
        query = select(UploadedAdapter).where((UploadedAdapter.id == name) | (UploadedAdapter.name == name))
        found = self._store.scalars(query.order_by(UploadedAdapter.created, UploadedAdapter.id))
        seen = [one for one in found if who.admin or one.tenant_id == who.tenant_id]
        return only_one(self._store.tenants, who, name, seen)

    def remove(self, adapter: UploadedAdapter) -> None:
        """Remove an uploaded adapter and its shares; jobs that started from it have their own copy."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == adapter.id))
            session.execute(delete(UploadedAdapter).where(UploadedAdapter.id == adapter.id))
        shutil.rmtree(self.path(adapter.id), ignore_errors=True)

    def named(self, who: Principal, name: str) -> Named | None:
        """Resolve a name for a principal; None if it is not visible to them."""
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
        """The PEFT directory of a name for a principal; None if it is not visible or does not exist."""
        named = self.named(who, name)
        return None if named is None else self.resolve(named)

    def of_model(self, who: Principal, model: str) -> Answerer:
        """Resolve a model name to a base or a version of an adapter.

        Raises:
            NoModelError: the requester can see none of this name.
            ConfigError: its base is not served any more.
        """
        if (base := self.bases.find(model)) is not None:
            return Answerer(base)
        resolved = self.find(who, model)
        if resolved is None:
            raise NoModelError(model)
        return Answerer(self.bases.of(resolved.base), resolved.path, resolved.template)

    def find_by_id(self, reference: str) -> Resolved | None:
        """The PEFT directory of a `Resolved.reference`, or of a job's id with `best` or `latest`."""
        thing_id, _, version = reference.partition("@")
        thing = self.by_id(thing_id)
        return None if thing is None else self.resolve(Named(thing, version))

    def by_id(self, thing_id: str) -> StoredJob | UploadedAdapter | None:
        """A job or an uploaded adapter of any tenant."""
        with self._store.transaction() as session:
            return find_job(session, thing_id) or session.get(UploadedAdapter, thing_id)

    def resolve(self, named: Named) -> Resolved | None:
        """The PEFT directory of a version; None if it does not exist."""
        thing = named.thing
        if isinstance(thing, UploadedAdapter):
            path = self.path(thing.id)
            return Resolved(path, thing.name, thing.id, thing.base) if not named.version and path.is_dir() else None
        version = self._storage.version(thing.id, named.version or "best")
        if version is None:
            return None
        number, path = version
        data = thing.spec.get("data")
        template = {name: data[name] for name in _OF_TEMPLATE if name in data} if isinstance(data, dict) else {}
        reference = f"{thing.id}@{number}"
        return Resolved(path, f"{thing.name}-v{number}", reference, thing.base, thing.tenant_id, template)

    def share(self, share: Share) -> Shared:
        """Create a share, or return the existing one. Raises StoreError if the tenant gives too many."""
        same = (Share.object == share.object) & (Share.with_tenant == share.with_tenant)
        given = select(func.count()).where(Share.tenant_id == share.tenant_id)
        with self._store.transaction() as session:
            hold_tenant(session, share.tenant_id)
            if session.scalar(select(Share.id).where(same)) is None:
                if (session.scalar(given) or 0) >= MOST_SHARES:
                    raise StoreError(
                        f"this tenant gives {MOST_SHARES} shares, the most of a tenant: end some with `motet unshare`, or "
                        f"share with all tenants (`{ALL}`) instead of each"
                    )
                session.add(share)
        return self._shares(same)[0]

    def given(self, who: Principal, share_id: str) -> Share | None:
        """A share of the tenant (an admin: any); None if there is none."""
        with self._store.transaction() as session:
            share = session.get(Share, share_id)
        return share if share is not None and (who.admin or share.tenant_id == who.tenant_id) else None

    def unshare(self, share: Share) -> bool:
        """Delete a share; False if it is gone."""
        with self._store.transaction() as session:
            gone = delete(Share).where(Share.id == share.id).returning(Share.id)
            return session.scalar(gone) is not None

    def listed(self, who: Principal, after: str | None, limit: int) -> tuple[list[Shared], list[Shared], str | None]:
        """Shares by a tenant (an admin: all), then those of others with it, oldest first; `after` matches `PLACE_OF_SHARE`.

        Returns:
            both, and the place after which there are more.
        """
        kind, created, share_id = (after or "given/0.0/").split("/")
        since = (float(created), share_id) < _PLACE
        by = [] if who.admin else [Share.tenant_id == who.tenant_id]
        given = self._shares(*by, since, limit=limit + 1) if kind == "given" else []
        later = [since] if kind == "received" else []
        received = self._shares(*_with(who), *later, limit=limit + 1 - len(given))
        rows = [("given", one) for one in given] + [("received", one) for one in received]
        last, one = rows[limit - 1] if len(rows) > limit else ("", None)
        place = None if one is None else f"{last}/{one.share.created!r}/{one.share.id}"
        return given[:limit], received[: max(0, limit - len(given))], place

    def received(
        self, who: Principal, since: tuple[float, str] | None = None, limit: int | None = None
    ) -> list[Shared]:
        """Shares of others with a tenant, oldest first, from the one that was created then and has this id."""
        return self._shares(*_with(who), *([] if since is None else [since <= _PLACE]), limit=limit)

    def _shares(self, *which: ColumnElement[bool], limit: int | None = None) -> list[Shared]:
        owner, other = aliased(Tenant), aliased(Tenant)
        name = func.coalesce(StoredJob.name, UploadedAdapter.name, "")
        base = func.coalesce(StoredJob.base, UploadedAdapter.base)
        query = (
            select(
                Share, owner.name, func.coalesce(other.name, Share.with_tenant), name, base, StoredJob.id.is_not(None)
            )
            .join(owner, owner.id == Share.tenant_id)
            .outerjoin(other, other.id == Share.with_tenant)
            .outerjoin(StoredJob, StoredJob.id == Share.object)
            .outerjoin(UploadedAdapter, UploadedAdapter.id == Share.object)
            .where(*which)
            .order_by(Share.created, Share.id)
            .limit(limit)
        )
        with self._store.transaction() as session:
            return [Shared(*row) for row in session.execute(query)]

    def forget_shares(self, thing_id: str) -> None:
        """Delete all shares of a deleted object."""
        with self._store.transaction() as session:
            session.execute(delete(Share).where(Share.object == thing_id))

    def _shared(self, thing_id: str, who: Principal) -> bool:
        query = select(Share.id).where(Share.object == thing_id, Share.with_tenant.in_((who.tenant_id, ALL)))
        return self._store.scalar(query.limit(1)) is not None


def _with(who: Principal) -> tuple[ColumnElement[bool], ...]:
    """Of shares that others give to a tenant."""
    return Share.tenant_id != who.tenant_id, Share.with_tenant.in_((who.tenant_id, ALL))
