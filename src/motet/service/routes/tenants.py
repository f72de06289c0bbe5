"""Routes for tenants: keys, audit log, limits, and usage as JSON or CSV."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import AsyncIterator, Callable
from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from motet.config.service import LimitsConfig
from motet.service.database.store import Store
from motet.service.database.tables import Key, now
from motet.service.database.tenants import PLACE_OF_KEY, Principal
from motet.service.depends import Admin, Asker, KeyEnder, ServiceDep
from motet.service.errors import Refusal, existing
from motet.service.http.pages import page
from motet.service.http.rights import check_new
from motet.service.routing import TenantRoute
from motet.service.schemas import ApiKey, AuditEntries, AuditEntry, KeyRequest, Keys, NewKey
from motet.service.schemas.usage import By, Erased, TenantInfo, Tenants, UsageLine, UsageReport
from motet.service.tenants.ledger import PLACE

router = APIRouter(prefix="/v1", route_class=TenantRoute)
Limit = Annotated[int, Query(ge=1, le=1000)]
_DAY = 86400.0


@router.post("/keys", status_code=201, tags=["keys"])
def create(who: Asker, service: ServiceDep, wanted: KeyRequest) -> NewKey:
    """Create a key with a role that is not higher than your own; it ends with the key that created it.

    The key is shown only once. An admin creates keys for all tenants, also new ones, and these do not end with the
    admin's.
    """
    tenant = wanted.tenant or who.tenant
    if tenant != who.tenant and not who.admin:
        raise Refusal(403, "only an admin makes keys of another tenant: leave `tenant` out", "tenant")
    expires = None if wanted.expires_days is None else now() + wanted.expires_days * _DAY
    if not who.admin:
        expires = expires or who.expires
        check_new(who, wanted.role, expires)
    made_by = None if who.admin else who.key_id
    key, text = service.store.tenants.create_key(
        tenant, wanted.name, wanted.role, expires, wanted.scope, made_by, asker=who
    )
    return NewKey(**_shown(key, tenant).model_dump(), key=text)


@router.get("/keys", tags=["keys"])
def list_keys(
    who: Asker,
    service: ServiceDep,
    after: Annotated[str, Query(pattern=PLACE_OF_KEY, description="`next` of the previous page.")] = "",
    limit: Limit = 1000,
) -> Keys:
    """List keys without their texts: your own and those that it created. Admins see those of their tenant, or all.

    Of ended keys, the list has the newest 1,000.
    """
    keys = service.store.tenants.keys_of(who, after, limit + 1)
    last = keys[limit - 1][0] if len(keys) > limit else None
    following = None if last is None else f"{last.created!r}/{last.id}"
    return Keys(data=[_shown(key, tenant) for key, tenant in keys[:limit]], next=following)


@router.post("/keys/{key}/rotate", status_code=201, tags=["keys"])
def rotate(who: KeyEnder, service: ServiceDep, key: str) -> NewKey:
    """Replace a key by a new one with the same name, rights and expiry. The new key is shown only once."""
    old, tenant = _visible(service.store, who, key)
    made_by = None if who.admin or who.key_id in (old.id, old.made_by) else who.key_id
    made = existing(
        service.store.tenants.rotate_key(key, made_by, who), f"the key {key!r} was revoked or has expired; make another"
    )
    return NewKey(**_shown(made[0], tenant).model_dump(), key=made[1])


@router.delete("/keys/{key}", status_code=204, tags=["keys"])
def revoke(who: KeyEnder, service: ServiceDep, key: str) -> None:
    """Revoke a key and those created with it."""
    _visible(service.store, who, key, ends=True)
    service.store.tenants.revoke_key(key, who)


@router.get("/audit", tags=["keys"])
def list_entries(
    who: Admin,
    service: ServiceDep,
    tenant: Annotated[str | None, Query(max_length=100, description="Only of this tenant.")] = None,
    after: Annotated[str | None, Query(pattern=r"^[0-9]{1,15}$", description="`next` of the previous page.")] = None,
    limit: Limit = 100,
) -> AuditEntries:
    """List changes, newest first. Every change over HTTP is recorded."""
    known = None if tenant is None else service.store.tenants.find(tenant)
    if tenant is not None and known is None:
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    before = None if after is None else int(after)
    entries = service.store.audit_entries(tenant_id=None if known is None else known.id, before=before, limit=limit + 1)
    shown = [
        AuditEntry(id=entry.id, time=entry.time, tenant=name, key=entry.key_id, key_name=key, submitter=whose,
                   action=entry.action, object=entry.object)
        for entry, name, key, whose in entries[:limit]
    ]  # fmt: skip
    return AuditEntries(data=shown, next=str(shown[-1].id) if len(entries) > limit else None)


@router.get("/tenants", tags=["tenants"])
def list_tenants(
    who: Admin,
    service: ServiceDep,
    after: Annotated[str, Query(max_length=100, description="`next` of the previous page.")] = "",
    limit: Limit = 1000,
) -> Tenants:
    """List tenants by name, with limits and usage."""
    found = service.quotas.used(after=after, limit=limit + 1)
    return Tenants(data=found[:limit], next=found[limit - 1].name if len(found) > limit else None)


@router.put("/tenants/{tenant}/limits", tags=["tenants"])
def set_limits(who: Admin, service: ServiceDep, tenant: str, wanted: LimitsConfig) -> TenantInfo:
    """Set a tenant's own limits, all at once; existing jobs stay.

    Null means no limit. Fields that you leave out get the service's default.
    """
    known = existing(service.store.tenants.find(tenant), f"there is no tenant {tenant!r}; motet keys create makes one")
    service.quotas.set(known.id, wanted.model_dump(exclude_unset=True))
    service.store.audit(who, "set limits", known.name)
    return service.quotas.used(known.name)[0]


@router.delete("/tenants/{tenant}", tags=["tenants"])
def erase(who: Admin, service: ServiceDep, response: Response, tenant: str) -> Erased:
    """Erase a tenant: end its keys and jobs, then delete all its data. Repeat while jobs are ending (202)."""
    known = existing(service.store.tenants.find(tenant), f"there is no tenant {tenant!r}")
    if known.id == who.tenant_id:
        raise Refusal(409, f"{tenant!r} is your own tenant; ask with an admin's key of another one")
    waiting = service.erasure.erase(known.id)
    if waiting:
        response.status_code = 202
    else:
        service.store.audit(who, "erase tenant", known.id)
    return Erased(erased=not waiting, open_jobs=waiting)


@router.get("/limits", tags=["tenants"])
def own_limits(who: Asker, service: ServiceDep) -> TenantInfo:
    """Get the limits and usage of the requester's tenant, and what is left of them."""
    return service.quotas.used(who.tenant)[0]


@router.get(
    "/usage",
    tags=["usage"],
    response_model=UsageReport,
    responses={200: {"content": {"text/csv": {}}, "description": "JSON, or CSV."}},
)
def usage(
    request: Request,
    who: Asker,
    service: ServiceDep,
    by: Annotated[
        list[By], Query(max_length=5, description="How to group the lines: job (default), day, tenant, base, key.")
    ] = ["job"],  # noqa: B006 - FastAPI copies it
    since: Annotated[date | None, Query(description="The first day (UTC).")] = None,
    until: Annotated[date | None, Query(description="The last day (UTC).")] = None,
    tenant: Annotated[
        str | None, Query(max_length=100, description="The tenant's name; default for admins: all.")
    ] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format", description="CSV has all pages.")] = "json",
    after: Annotated[str, Query(pattern=PLACE, description="`next` of the previous page.")] = "",
    limit: Limit = 1000,
) -> Response:
    """Get tokens and device time of your tenant. Admins see all tenants, and unassigned time."""
    whose, based = _whose(service.store, who, tenant), "base" in by or (service.bases.several and "job" in by)
    called = service.bases.called if based else None

    def read(after: str) -> tuple[list[UsageLine], str | None]:
        return service.ledger.page(whose, by, since, until, called, after, 1000 if form == "csv" else limit)

    async def tables() -> AsyncIterator[str]:
        place: str | None = after
        while place is not None:
            piece = functools.partial(service.access.timed, request.scope, functools.partial(_table, read, place))
            text, place = await service.answer_threads.run(who.tenant_id, piece)
            yield text

    if form == "csv":
        return StreamingResponse(tables(), media_type="text/csv")
    lines, following = read(after)
    return page(UsageReport(data=[], next=following), lines)


def _whose(store: Store, who: Principal, tenant: str | None) -> str | None:
    """The id of the requested tenant; None for all."""
    if tenant is None:
        return None if who.admin else who.tenant_id
    known = store.tenants.find(tenant)
    if known is None or not (who.admin or known.id == who.tenant_id):
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    return known.id


def _table(read: Callable[[str], tuple[list[UsageLine], str | None]], after: str) -> tuple[str, str | None]:
    lines, following = read(after)
    writer = csv.DictWriter(text := io.StringIO(), list(UsageLine.model_fields), lineterminator="\n")
    if not after:
        writer.writeheader()
    writer.writerows(line.model_dump() for line in lines)
    return text.getvalue(), following


def _visible(store: Store, who: Principal, key_id: str, *, ends: bool = False) -> tuple[Key, str]:
    """A key with its tenant's name; with `ends`, it may outlive the requester's.

    Raises:
        Refusal: the requester can see no such key, or its role is higher than theirs.
    """
    key, tenant = existing(store.tenants.key_of(who, key_id), f"there is no key {key_id!r}")
    if not who.admin:
        check_new(who, key.role, who.expires if ends else key.expires)
    return key, tenant


def _shown(key: Key, tenant: str) -> ApiKey:
    return ApiKey(
        id=key.id, tenant=tenant, name=key.name, role=key.role, created=key.created, expires=key.expires, revoked=key.revoked,
        scope=key.scope, signed_in=key.person is not None, submitter=key.submitter,
    )  # fmt: skip
