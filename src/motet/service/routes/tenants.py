"""Tenants, their limits and what they used, as JSON or as a table for a spreadsheet."""

from __future__ import annotations

import csv
import io
from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from motet.config.service import LimitsConfig
from motet.service.database.store import Store
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.http.depends import Admin, Asker, BasesDep, LedgerDep, QuotasDep, StoreDep
from motet.service.schemas.usage import By, TenantInfo, Tenants, UsageLine, UsageReport

router = APIRouter(prefix="/v1")


@router.get("/tenants", tags=["tenants"])
def list_tenants(who: Admin, quotas: QuotasDep) -> Tenants:
    """All tenants, with their limits and what they use of them."""
    return Tenants(data=quotas.used())


@router.put("/tenants/{tenant}/limits", tags=["tenants"])
def set_limits(who: Admin, store: StoreDep, quotas: QuotasDep, tenant: str, wanted: LimitsConfig) -> TenantInfo:
    """Set a tenant's own limits, all at once, from now on; jobs that are there already stay.

    Null is no limit, and the service's default stands for what is left out.
    """
    known = store.tenants.find(tenant)
    if known is None:
        raise Refusal(404, f"there is no tenant {tenant!r}; motet keys create makes one")
    quotas.set(known.id, wanted.model_dump(exclude_unset=True))
    store.audit(who, "set limits", known.name)
    return quotas.used(known.name)[0]


@router.get("/limits", tags=["tenants"])
def own_limits(who: Asker, quotas: QuotasDep) -> TenantInfo:
    """What the asker's tenant may use, and what it uses."""
    return quotas.used(who.tenant)[0]


@router.get(
    "/usage",
    tags=["usage"],
    response_model=UsageReport,
    responses={200: {"content": {"text/csv": {}}, "description": "JSON, or CSV."}},
)
def usage(
    who: Asker,
    store: StoreDep,
    ledger: LedgerDep,
    bases: BasesDep,
    by: Annotated[
        list[By], Query(max_length=4, description="What gets lines of its own: job (unless given), day, tenant, base.")
    ] = ["job"],  # noqa: B006 - FastAPI copies it
    since: Annotated[date | None, Query(description="The first day (UTC).")] = None,
    until: Annotated[date | None, Query(description="The last day (UTC).")] = None,
    tenant: Annotated[
        str | None, Query(max_length=100, description="Whose, by name; admins see all without it.")
    ] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> Response:
    """Tokens and device time, of the asker's tenant; of all tenants, and of nobody, for admins."""
    based = "base" in by or (bases.several and "job" in by)
    lines = ledger.report(
        _whose(store, who, tenant),
        by,
        None if since is None else since.isoformat(),
        None if until is None else until.isoformat(),
        bases.called if based else None,
    )
    if form == "csv":
        return Response(_table(lines), media_type="text/csv")
    return JSONResponse(UsageReport(data=lines).model_dump())


def _whose(store: Store, who: Principal, tenant: str | None) -> str | None:
    """The id of the tenant whose usage is asked for; None for all."""
    if tenant is None:
        return None if who.admin else who.tenant_id
    known = store.tenants.find(tenant)
    if known is None or not (who.admin or known.id == who.tenant_id):
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    return known.id


def _table(lines: list[UsageLine]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(UsageLine.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(line.model_dump() for line in lines)
    return text.getvalue()
