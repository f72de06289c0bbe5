"""Adapters for other tenants to chat with, start from and take home."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from motet.service.adapters.adapters import ALL
from motet.service.database.tables import Share as StoredShare
from motet.service.database.tables import StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.http.depends import AdaptersDep, Asker, StorageDep, StoreDep
from motet.service.schemas.adapters import Share, ShareRequest, Shares

router = APIRouter(prefix="/v1/shares", tags=["adapters"])


class ShareAnswers:
    """Shares as they are answered."""

    def __init__(self, store: StoreDep, storage: StorageDep, adapters: AdaptersDep) -> None:
        self._store, self._storage, self._adapters = store, storage, adapters

    def __call__(self, share: StoredShare) -> Share:
        """The answer for one share."""
        owner = self._store.tenants.name_of(share.tenant_id)
        tenant = ALL if share.with_tenant == ALL else self._store.tenants.name_of(share.with_tenant)
        thing = self._adapters.by_id(share.object)
        name, models = "" if thing is None else thing.name, []
        if isinstance(thing, StoredJob):
            models = [f"{owner}/{name}@{version}" for version in self._storage.version_names(thing.id)]
        elif thing is not None:
            models = [f"{owner}/{name}"]
        return Share(id=share.id, name=name, owner=owner, tenant=tenant, models=models, created=share.created)

    def received_models(self, who: Principal) -> dict[str, str | None]:
        """How a tenant names what others share with it, and the base of each, as it was stored."""
        shares = [one for one in self._adapters.shares(who) if _received(one, who)]
        things = {share.object: self._adapters.by_id(share.object) for share in shares}
        return {
            name: thing.base for one in shares if (thing := things[one.object]) is not None for name in self(one).models
        }


SharesDep = Annotated[ShareAnswers, Depends()]


def _received(share: StoredShare, who: Principal) -> bool:
    return share.tenant_id != who.tenant_id and share.with_tenant in (who.tenant_id, ALL)


@router.post("", status_code=201)
def share(who: Asker, store: StoreDep, adapters: AdaptersDep, shown: SharesDep, wanted: ShareRequest) -> Share:
    """Share a job's versions, or an uploaded adapter, with another tenant or with all. Nothing else of the job is seen."""
    thing = store.job(who, wanted.name) or adapters.uploaded(who, wanted.name)
    if thing is None:
        raise Refusal(404, f"there is no job or uploaded adapter {wanted.name!r}", "name")
    known = store.tenants.find(wanted.tenant)
    other = ALL if wanted.tenant == ALL else None if known is None else known.id
    if other is None:
        raise Refusal(404, f"there is no tenant {wanted.tenant!r}; an admin's `motet keys create` makes one", "tenant")
    if other == thing.tenant_id:
        raise Refusal(400, f"{wanted.name!r} is this tenant's already; name another tenant", "tenant")
    made = adapters.share(
        StoredShare(id=new_id("share"), tenant_id=thing.tenant_id, object=thing.id, with_tenant=other)
    )
    store.audit(who, "share", f"{made.id} {thing.id}")
    return shown(made)


@router.get("")
def list_shares(who: Asker, adapters: AdaptersDep, shown: SharesDep) -> Shares:
    """What the tenant shares, and what others share with it."""
    shares = adapters.shares(who)
    received = [one for one in shares if _received(one, who)]
    given = [one for one in shares if who.admin or one.tenant_id == who.tenant_id]
    return Shares(given=[shown(one) for one in given], received=[shown(one) for one in received])


@router.delete("/{share}", status_code=204)
def unshare(who: Asker, store: StoreDep, adapters: AdaptersDep, share: str) -> None:
    """End a share; jobs that started from it go on."""
    ended = adapters.unshare(who, share)
    if ended is None:
        raise Refusal(404, f"there is no share {share!r}")
    store.audit(who, "unshare", f"{ended.id} {ended.object}")
