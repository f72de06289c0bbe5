"""Tenants and their limits; for admins. What holds for oneself."""

from __future__ import annotations

from fastapi import APIRouter

from motet.config.service import LimitsConfig
from motet.service.http.asking import Admin, Asker, AtDesk, Refusal
from motet.service.schemas.usage import TenantInfo, Tenants
from motet.service.tenants.limits import TenantUse

router = APIRouter(prefix="/v1", tags=["tenants"])


@router.get("/tenants")
def list_tenants(who: Admin, desk: AtDesk) -> Tenants:
    """All tenants, with their limits and what they use of them."""
    return Tenants(data=[_shown(use) for use in desk.limits.uses()])


@router.put("/tenants/{tenant}/limits")
def set_limits(who: Admin, desk: AtDesk, tenant: str, wanted: LimitsConfig) -> TenantInfo:
    """Set a tenant's own limits, all at once, from now on; jobs that are there already stay.

    Null is no limit, and the service's default stands for what is left out.
    """
    known = desk.store.tenants.find(tenant)
    if known is None:
        raise Refusal(404, f"there is no tenant {tenant!r}; motet keys create makes one")
    desk.limits.set(known.id, wanted.model_dump(exclude_unset=True))
    desk.store.audit(who, "set limits", known.name)
    return _shown(desk.limits.uses(known.name)[0])


@router.get("/limits")
def own_limits(who: Asker, desk: AtDesk) -> TenantInfo:
    """What the asker's tenant may use, and what it uses."""
    return _shown(desk.limits.uses(who.tenant)[0])


def _shown(use: TenantUse) -> TenantInfo:
    return TenantInfo(
        id=use.tenant.id,
        name=use.tenant.name,
        limits=use.limits,
        own=list(use.own),
        running=use.running,
        waiting=use.waiting,
        tokens_today=use.tokens_today,
        stored_bytes=use.stored_bytes,
    )
