"""Client methods for tenants: keys, limits, usage and audit log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import date
from typing import Any, Literal

from motet.client.connection import Connection, path_of
from motet.service.schemas import ApiKey, AuditEntries, AuditEntry, Keys, NewKey
from motet.service.schemas.usage import By, Erased, TenantInfo, Tenants, UsageLine, UsageReport

Day = date | str | None


class TenantMethods(Connection):
    """Methods of both clients."""

    async def create_key(
        self,
        tenant: str | None = None,
        name: str = "",
        role: Literal["reader", "member", "tenant-admin", "admin"] = "member",
        expires_days: float | None = None,
        scope: Sequence[str] | None = None,
    ) -> NewKey:
        """Create a key for your tenant; with an admin key for any tenant, which is created if needed."""
        body = {"tenant": tenant, "name": name, "role": role, "expires_days": expires_days, "scope": scope}
        return await self._ask(NewKey, "POST", "/v1/keys", json=body)

    async def keys(self) -> list[ApiKey]:
        """Keys without their texts, oldest first: your own and those made with it; with an admin key, all."""
        return [key async for key in self._all_pages(Keys, "/v1/keys")]

    async def revoke_key(self, key: str) -> None:
        """Revoke a key by its id, and those created with it."""
        await self._send("DELETE", path_of("keys", key))

    async def rotate_key(self, key: str) -> NewKey:
        """Replace a key by a new one with the same name and rights."""
        return await self._ask(NewKey, "POST", f"{path_of('keys', key)}/rotate")

    async def usage(
        self, by: Sequence[By] = ("job",), since: Day = None, until: Day = None, tenant: str | None = None
    ) -> list[UsageLine]:
        """Tokens and device time by job, day, tenant, base or key, with both days (UTC); admins see all tenants."""
        params = _usage_params(by, since, until, tenant)
        return [line async for line in self._all_pages(UsageReport, "/v1/usage", **params)]

    async def usage_csv(
        self, by: Sequence[By] = ("job",), since: Day = None, until: Day = None, tenant: str | None = None
    ) -> str:
        """The same as CSV."""
        params = {**_usage_params(by, since, until, tenant), "format": "csv"}
        return (await self._send("GET", "/v1/usage", params=params)).content.decode()

    async def limits(self) -> TenantInfo:
        """Limits and usage of your tenant, and what is left of them."""
        return await self._ask(TenantInfo, "GET", "/v1/limits")

    async def tenants(self) -> list[TenantInfo]:
        """All tenants with their limits and usage; needs an admin key."""
        return [tenant async for tenant in self._all_pages(Tenants, "/v1/tenants")]

    async def set_limits(self, tenant: str, limits: Mapping[str, Any]) -> TenantInfo:
        """Set all limits of a tenant: None means no limit, and limits that you leave out get defaults. Needs an admin key."""
        return await self._ask(TenantInfo, "PUT", f"{path_of('tenants', tenant)}/limits", json=dict(limits))

    async def erase_tenant(self, tenant: str) -> Erased:
        """Erase a tenant; repeat until it is `erased`. Needs an admin key of another tenant."""
        return await self._ask(Erased, "DELETE", path_of("tenants", tenant))

    async def audit(self, tenant: str | None = None) -> AsyncGenerator[AuditEntry, None]:
        """Who changed what, newest first, optionally by one tenant; needs an admin key."""
        async for entry in self._all_pages(AuditEntries, "/v1/audit", tenant=tenant):
            yield entry


def _usage_params(by: Sequence[By], since: Day, until: Day, tenant: str | None) -> dict[str, Any]:
    first, last = (None if day is None else str(day) for day in (since, until))
    return {"by": list(by), "tenant": tenant, "since": first, "until": last}
