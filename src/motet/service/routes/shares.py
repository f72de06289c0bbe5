"""Adapters for other tenants to chat with, start from and take home."""

from __future__ import annotations

from fastapi import APIRouter

from motet.service.adapters.adapters import ALL
from motet.service.database.tables import Share as StoredShare
from motet.service.database.tables import StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.service.desk import Desk
from motet.service.http.asking import Asker, AtDesk, Refusal
from motet.service.schemas.adapters import Share, ShareRequest, Shares

router = APIRouter(prefix="/v1/shares", tags=["adapters"])


@router.post("", status_code=201)
def share(who: Asker, desk: AtDesk, wanted: ShareRequest) -> Share:
    """Share a job's versions, or an uploaded adapter, with another tenant or with all. Nothing else of the job is seen."""
    thing = desk.store.job(who, wanted.name) or desk.adapters.uploaded(who, wanted.name)
    if thing is None:
        raise Refusal(404, f"there is no job or uploaded adapter {wanted.name!r}", "name")
    known = desk.store.tenants.find(wanted.tenant)
    other = ALL if wanted.tenant == ALL else None if known is None else known.id
    if other is None:
        raise Refusal(404, f"there is no tenant {wanted.tenant!r}; an admin's `motet keys create` makes one", "tenant")
    if other == thing.tenant_id:
        raise Refusal(400, f"{wanted.name!r} is this tenant's already; name another tenant", "tenant")
    found = desk.adapters.share(
        StoredShare(id=new_id("share"), tenant_id=thing.tenant_id, object=thing.id, with_tenant=other)
    )
    desk.store.audit(who, "share", f"{found.id} {thing.id}")
    return _shown(desk, found)


@router.get("")
def list_shares(who: Asker, desk: AtDesk) -> Shares:
    """What the tenant shares, and what others share with it."""
    found = desk.adapters.shares(who)
    received = [one for one in found if _received(one, who)]
    given = [one for one in found if who.admin or one.tenant_id == who.tenant_id]
    return Shares(given=[_shown(desk, one) for one in given], received=[_shown(desk, one) for one in received])


@router.delete("/{share}", status_code=204)
def unshare(who: Asker, desk: AtDesk, share: str) -> None:
    """End a share; jobs that started from it go on."""
    found = desk.adapters.unshare(who, share)
    if found is None:
        raise Refusal(404, f"there is no share {share!r}")
    desk.store.audit(who, "unshare", f"{found.id} {found.object}")


def received_models(desk: Desk, who: Principal) -> list[str]:
    """How a tenant names what others share with it."""
    shares = [one for one in desk.adapters.shares(who) if _received(one, who)]
    return list(dict.fromkeys(name for one in shares for name in _shown(desk, one).models))


def _received(share: StoredShare, who: Principal) -> bool:
    return share.tenant_id != who.tenant_id and share.with_tenant in (who.tenant_id, ALL)


def _shown(desk: Desk, share: StoredShare) -> Share:
    owner = desk.store.tenants.name_of(share.tenant_id)
    tenant = ALL if share.with_tenant == ALL else desk.store.tenants.name_of(share.with_tenant)
    thing = desk.adapters.by_id(share.object)
    name, models = "" if thing is None else thing.name, []
    if isinstance(thing, StoredJob):
        numbers = [str(number) for number in desk.directory(thing.id).versions()]
        models = [f"{owner}/{name}@{version}" for version in [*numbers, *(["latest", "best"] if numbers else [])]]
    elif thing is not None:
        models = [f"{owner}/{name}"]
    return Share(id=share.id, name=name, owner=owner, tenant=tenant, models=models, created=share.created)
