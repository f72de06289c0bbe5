"""API keys, and who changed what; for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from motet.service.database.tables import Key, now
from motet.service.errors import Refusal
from motet.service.http.depends import Admin, StoreDep
from motet.service.schemas import ApiKey, AuditEntries, AuditEntry, KeyRequest, Keys, NewKey

router = APIRouter(prefix="/v1", tags=["keys"])
_DAY = 86400.0


@router.post("/keys", status_code=201)
def create(who: Admin, store: StoreDep, wanted: KeyRequest) -> NewKey:
    """Make a key, and its tenant where there is none of the name. The key is shown this once."""
    expires = None if wanted.expires_days is None else now() + wanted.expires_days * _DAY
    key, text = store.tenants.create_key(wanted.tenant, wanted.name, wanted.role, expires)
    store.audit(who, "create key", key.id)
    return NewKey(**_shown(key, wanted.tenant).model_dump(), key=text)


@router.get("/keys")
def list_keys(who: Admin, store: StoreDep) -> Keys:
    """All keys, without their texts."""
    return Keys(data=[_shown(key, tenant) for key, tenant in store.tenants.all_keys()])


@router.delete("/keys/{key}", status_code=204)
def revoke(who: Admin, store: StoreDep, key: str) -> None:
    """End a key; it is refused from now on."""
    if not store.tenants.revoke_key(key):
        raise Refusal(404, f"there is no key {key!r}")
    store.audit(who, "revoke key", key)


@router.get("/audit")
def list_entries(
    who: Admin,
    store: StoreDep,
    tenant: Annotated[str | None, Query(max_length=100, description="Only of this tenant.")] = None,
    after: Annotated[str | None, Query(pattern=r"^[0-9]{1,15}$", description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditEntries:
    """Who changed what, newest first. Every change that is asked for over HTTP is written down."""
    known = None if tenant is None else store.tenants.find(tenant)
    if tenant is not None and known is None:
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    before = None if after is None else int(after)
    entries = store.audit_entries(tenant_id=None if known is None else known.id, before=before, limit=limit + 1)
    page = [
        AuditEntry(id=entry.id, time=entry.time, tenant=name, key=entry.key_id, key_name=key, action=entry.action,
                   object=entry.object)
        for entry, name, key in entries[:limit]
    ]  # fmt: skip
    return AuditEntries(data=page, next=str(page[-1].id) if len(entries) > limit else None)


def _shown(key: Key, tenant: str) -> ApiKey:
    return ApiKey(
        id=key.id, tenant=tenant, name=key.name, role=key.role, created=key.created, expires=key.expires, revoked=key.revoked
    )  # fmt: skip
