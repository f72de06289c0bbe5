"""What a client asks of a service besides jobs: adapters and shares, keys, limits, usage and who changed what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

from motet.client.archive import unpack
from motet.client.connection import Connection, path_of
from motet.errors import DataError
from motet.service.adapters.archive import pack
from motet.service.schemas import ApiKey, AuditEntries, AuditEntry, Keys, NewKey
from motet.service.schemas.adapters import Adapter, Adapters, Share, Shares
from motet.service.schemas.usage import By, TenantInfo, Tenants, UsageLine, UsageReport
from motet.types import ADAPTER_FILES

Day = date | str | None


class Adaptership(Connection):
    """Adapters, by the name of a job, of an uploaded one or of a share."""

    async def push(self, directory: str | Path, name: str | None = None) -> Adapter:
        """Bring a PEFT directory to the service; its id or name is a job's `adapter.init` and a model for completions."""
        packed = await asyncio.to_thread(_packed, Path(directory))
        files = {"file": ("adapter.tar.gz", packed)}
        return await self._ask(Adapter, "POST", "/v1/adapters", params={"name": name}, files=files)

    async def pull(self, job: str, version: str | int | None = None, directory: str | Path = ".") -> Path:
        """Take an adapter home as a PEFT directory below `directory`.

        Args:
            job: a job, an uploaded adapter, or what another tenant shares: `tenant/job`.
            version: of a job: a number, `best` or `latest`; the best unless given.
            directory: where the new directory is put: `<job>-v<version>`, or the name of an uploaded adapter.
        """
        name = job if version is None else f"{job}@{version}"
        response = await self._send("GET", f"{path_of('adapters', name)}/download")
        return await asyncio.to_thread(unpack, response.content, Path(directory))

    async def adapters(self) -> list[Adapter]:
        """Uploaded adapters, newest first."""
        return (await self._ask(Adapters, "GET", "/v1/adapters")).data

    async def adapter(self, name: str) -> Adapter:
        """An uploaded adapter by its id or name."""
        return await self._ask(Adapter, "GET", path_of("adapters", name))

    async def delete_adapter(self, name: str) -> None:
        """Remove an uploaded adapter; jobs that started from it go on."""
        await self._send("DELETE", path_of("adapters", name))

    async def share(self, name: str, tenant: str) -> Share:
        """Share a job's versions or an uploaded adapter with a tenant, or with all (`*`)."""
        return await self._ask(Share, "POST", "/v1/shares", json={"name": name, "tenant": tenant})

    async def shares(self) -> Shares:
        """What is shared with others, and by others."""
        return await self._ask(Shares, "GET", "/v1/shares")

    async def unshare(self, share: str) -> None:
        """End a share by its id."""
        await self._send("DELETE", path_of("shares", share))


class Administration(Connection):
    """Keys, tenants and their limits, usage, changes."""

    async def create_key(
        self,
        tenant: str,
        name: str = "",
        role: Literal["admin", "member"] = "member",
        expires_days: float | None = None,
    ) -> NewKey:
        """Make a key, and its tenant where there is none of the name; needs an admin's key."""
        body = {"tenant": tenant, "name": name, "role": role, "expires_days": expires_days}
        return await self._ask(NewKey, "POST", "/v1/keys", json=body)

    async def keys(self) -> list[ApiKey]:
        """All keys, oldest first, without their texts; needs an admin's key."""
        return (await self._ask(Keys, "GET", "/v1/keys")).data

    async def revoke_key(self, key: str) -> None:
        """End a key by its id; needs an admin's key."""
        await self._send("DELETE", path_of("keys", key))

    async def usage(
        self, by: Sequence[By] = ("job",), since: Day = None, until: Day = None, tenant: str | None = None
    ) -> list[UsageLine]:
        """Tokens and device time by job, day or tenant, from a day to another (both included, UTC); admins see all tenants."""
        return (await self._ask(UsageReport, "GET", "/v1/usage", params=_usage_params(by, since, until, tenant))).data

    async def usage_csv(
        self, by: Sequence[By] = ("job",), since: Day = None, until: Day = None, tenant: str | None = None
    ) -> str:
        """The same as a table for a spreadsheet."""
        params = {**_usage_params(by, since, until, tenant), "format": "csv"}
        return (await self._send("GET", "/v1/usage", params=params)).content.decode()

    async def limits(self) -> TenantInfo:
        """What one's own tenant may use, and what it uses."""
        return await self._ask(TenantInfo, "GET", "/v1/limits")

    async def tenants(self) -> list[TenantInfo]:
        """All tenants with their limits and use; needs an admin's key."""
        return (await self._ask(Tenants, "GET", "/v1/tenants")).data

    async def set_limits(self, tenant: str, limits: Mapping[str, Any]) -> TenantInfo:
        """Set a tenant's own limits, all at once (None is no limit, defaults stand for the rest); needs an admin's key."""
        return await self._ask(TenantInfo, "PUT", f"{path_of('tenants', tenant)}/limits", json=dict(limits))

    async def audit(self, tenant: str | None = None) -> AsyncGenerator[AuditEntry, None]:
        """Who changed what, newest first: all, or what one tenant did; needs an admin's key."""
        async for entry in self._all_pages(AuditEntries, "/v1/audit", tenant=tenant):
            yield entry


def _packed(directory: Path) -> bytes:
    place = directory.expanduser()
    for file in ADAPTER_FILES:
        if not (place / file).is_file():
            raise DataError(f"{place} has no {file}; give a directory that `peft` or Motet wrote")
    return pack(place, "adapter")


def _usage_params(by: Sequence[By], since: Day, until: Day, tenant: str | None) -> dict[str, Any]:
    first, last = (None if day is None else str(day) for day in (since, until))
    return {"by": list(by), "tenant": tenant, "since": first, "until": last}
