"""What a service can be asked about limits and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any
from urllib.parse import quote

from motet.client.calls import Call, json_of, path_of
from motet.service.schemas import Job
from motet.service.schemas.usage import By, TenantInfo, Tenants, UsageLine, UsageReport


class UsageCalls:
    """Everything about limits and usage that a service can be asked in one request."""

    @staticmethod
    def usage(
        by: Sequence[By] = ("job",),
        since: date | str | None = None,
        until: date | str | None = None,
        tenant: str | None = None,
    ) -> Call[list[UsageLine]]:
        """Tokens and device time by job, day or tenant, from a day to another (both included, UTC); admins see all tenants."""
        params = _asked(by, since, until, tenant)
        return Call("GET", "/v1/usage", lambda content: json_of(UsageReport)(content).data, params)

    @staticmethod
    def usage_csv(
        by: Sequence[By] = ("job",),
        since: date | str | None = None,
        until: date | str | None = None,
        tenant: str | None = None,
    ) -> Call[str]:
        """The same as a table for a spreadsheet."""
        return Call("GET", "/v1/usage", bytes.decode, {**_asked(by, since, until, tenant), "format": "csv"})

    @staticmethod
    def limits() -> Call[TenantInfo]:
        """What one's own tenant may use, and what it uses."""
        return Call("GET", "/v1/limits", json_of(TenantInfo))

    @staticmethod
    def tenants() -> Call[list[TenantInfo]]:
        """All tenants with their limits and use; needs an admin's key."""
        return Call("GET", "/v1/tenants", lambda content: json_of(Tenants)(content).data)

    @staticmethod
    def set_limits(tenant: str, limits: Mapping[str, Any]) -> Call[TenantInfo]:
        """Set a tenant's own limits, all at once (None is no limit, defaults stand for the rest); needs an admin's key."""
        return Call("PUT", f"/v1/tenants/{quote(tenant, safe='')}/limits", json_of(TenantInfo), body=dict(limits))

    @staticmethod
    def change(job: str, **fields: int | str | None) -> Call[Job]:
        """Give a job that has not ended another `budget` (None is none) or `priority` (a number, `low`, `normal`, `high`)."""
        return Call("PATCH", path_of(job), json_of(Job), body=fields)


def _asked(
    by: Sequence[By], since: date | str | None, until: date | str | None, tenant: str | None
) -> dict[str, str | int | float | list[str] | None]:
    first, last = (None if day is None else str(day) for day in (since, until))
    return {"by": list(by), "tenant": tenant, "since": first, "until": last}
