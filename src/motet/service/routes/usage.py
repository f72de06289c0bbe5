"""What was used: by job, day and tenant, as JSON or as a table for a spreadsheet."""

from __future__ import annotations

import csv
import io
from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from motet.service.database.tenants import Principal
from motet.service.desk import Desk
from motet.service.http.asking import Asker, AtDesk, Refusal
from motet.service.schemas.usage import By, UsageLine, UsageReport
from motet.service.tenants.ledger import Used

router = APIRouter(prefix="/v1/usage", tags=["usage"])


@router.get(
    "", response_model=UsageReport, responses={200: {"content": {"text/csv": {}}, "description": "JSON, or CSV."}}
)
def usage(
    who: Asker,
    desk: AtDesk,
    by: Annotated[
        list[By], Query(max_length=3, description="What gets lines of its own: job (unless given), day, tenant.")
    ] = ["job"],  # noqa: B006 - FastAPI copies it
    since: Annotated[date | None, Query(description="The first day (UTC).")] = None,
    until: Annotated[date | None, Query(description="The last day (UTC).")] = None,
    tenant: Annotated[
        str | None, Query(max_length=100, description="Whose, by name; admins see all without it.")
    ] = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> Response:
    """Tokens and device time, of the asker's tenant; of all tenants, and of nobody, for admins."""
    found = desk.ledger.report(
        _whose(desk, who, tenant),
        by,
        None if since is None else since.isoformat(),
        None if until is None else until.isoformat(),
    )
    lines = [_shown(one, by) for one in found]
    if form == "csv":
        return Response(_table(lines), media_type="text/csv")
    return JSONResponse(UsageReport(data=lines).model_dump())


def _whose(desk: Desk, who: Principal, tenant: str | None) -> str | None:
    """The id of the tenant whose usage is told; None for all."""
    if tenant is None:
        return None if who.admin else who.tenant_id
    known = desk.store.tenants.find(tenant)
    if known is None or not (who.admin or known.id == who.tenant_id):
        raise Refusal(404, f"there is no tenant {tenant!r}", "tenant")
    return known.id


def _shown(one: Used, by: list[By]) -> UsageLine:
    kind: Literal["job", "completions", "idle", "all"] = "job" if one.job else "completions"
    if one.tenant is None and not one.job:
        kind = "idle"
    elif "job" not in by:
        kind = "all"
    return UsageLine(
        day=one.day, tenant=one.tenant, job=one.job, name=one.name, kind=kind, tokens_prompt=one.tokens_prompt,
        tokens_sampled=one.tokens_sampled, tokens_trained=one.tokens_trained, device_seconds=one.device_seconds,
    )  # fmt: skip


def _table(lines: list[UsageLine]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(UsageLine.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(line.model_dump() for line in lines)
    return text.getvalue()
