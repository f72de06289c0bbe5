"""API keys; for admins."""

from __future__ import annotations

from fastapi import APIRouter

from motet.service.database.tables import Key, now
from motet.service.http.asking import Admin, AtDesk, Refusal
from motet.service.schemas import ApiKey, KeyRequest, Keys, NewKey

router = APIRouter(prefix="/v1/keys", tags=["keys"])
_DAY = 86400.0


@router.post("", status_code=201)
def create(who: Admin, desk: AtDesk, wanted: KeyRequest) -> NewKey:
    """Make a key, and its tenant where there is none of the name. The key is shown this once."""
    expires = None if wanted.expires_days is None else now() + wanted.expires_days * _DAY
    key, text = desk.store.tenants.create_key(wanted.tenant, wanted.name, wanted.role, expires)
    desk.store.audit(who, "create key", key.id)
    return NewKey(**_shown(key, wanted.tenant).model_dump(), key=text)


@router.get("")
def list_keys(who: Admin, desk: AtDesk) -> Keys:
    """All keys, without their texts."""
    return Keys(data=[_shown(key, tenant) for key, tenant in desk.store.tenants.all_keys()])


@router.delete("/{key}", status_code=204)
def revoke(who: Admin, desk: AtDesk, key: str) -> None:
    """End a key; it is refused from now on."""
    if not desk.store.tenants.revoke_key(key):
        raise Refusal(404, f"there is no key {key!r}")
    desk.store.audit(who, "revoke key", key)


def _shown(key: Key, tenant: str) -> ApiKey:
    return ApiKey(
        id=key.id, tenant=tenant, name=key.name, role=key.role, created=key.created, expires=key.expires, revoked=key.revoked
    )  # fmt: skip
