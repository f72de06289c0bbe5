"""Who changed what; for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from motet.service.database import audit
from motet.service.http.asking import Admin, AtDesk, Refusal
from motet.service.schemas import AuditEntries, AuditEntry

router = APIRouter(prefix="/v1/audit", tags=["keys"])


@router.get("")
def list_entries(
    who: Admin,
    desk: AtDesk,
    tenant: Annotated[str | None, Query(max_length=100, description="Only of this tenant.")] = None,
    after: Annotated[str | None, Query(pattern=r"^[0-9]{1,15}$", description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditEntries:
    """Who changed what, newest first. Every change that is asked for over HTTP is written down."""
    known = None if tenant is None else desk.store.tenants.find(tenant)
    if tenant is not None and known is None:
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    before = None if after is None else int(after)
    found = audit.entries(desk.store, tenant_id=None if known is None else known.id, before=before, limit=limit + 1)
    page = [
        AuditEntry(id=entry.id, time=entry.time, tenant=name, key=entry.key_id, key_name=key, action=entry.action,
                   object=entry.object)
        for entry, name, key in found[:limit]
    ]  # fmt: skip
    return AuditEntries(data=page, next=str(page[-1].id) if len(found) > limit else None)
