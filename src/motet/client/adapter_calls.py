"""What a service can be asked about adapters and shares, and who changed what."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from motet.client.archive import unpack
from motet.client.calls import Call, json_of, nothing
from motet.errors import DataError
from motet.service.adapters.archive import pack
from motet.service.schemas import AuditEntries
from motet.service.schemas.adapters import Adapter, Adapters, Share, Shares
from motet.types import ADAPTER_FILES


class AdapterCalls:
    """Everything about adapters that a service can be asked in one request."""

    @staticmethod
    def push(directory: str | Path, name: str | None = None) -> Call[Adapter]:
        """Bring a PEFT directory to the service; its id or name is a job's `adapter.init` and a model for completions."""
        place = Path(directory).expanduser()

        def packed() -> tuple[str, bytes]:
            for file in ADAPTER_FILES:
                if not (place / file).is_file():
                    raise DataError(f"{place} has no {file}; give a directory that `peft` or Motet wrote")
            return "adapter.tar.gz", pack(place, "adapter")

        return Call("POST", "/v1/adapters", json_of(Adapter), {"name": name}, packed=packed)

    @staticmethod
    def adapters() -> Call[list[Adapter]]:
        """Uploaded adapters, newest first."""
        return Call("GET", "/v1/adapters", lambda content: json_of(Adapters)(content).data)

    @staticmethod
    def adapter(name: str) -> Call[Adapter]:
        """An uploaded adapter by its id or name."""
        return Call("GET", f"/v1/adapters/{quote(name, safe='')}", json_of(Adapter))

    @staticmethod
    def delete_adapter(name: str) -> Call[None]:
        """Remove an uploaded adapter; jobs that started from it go on."""
        return Call("DELETE", f"/v1/adapters/{quote(name, safe='')}", nothing)

    @staticmethod
    def share(name: str, tenant: str) -> Call[Share]:
        """Share a job's versions or an uploaded adapter with a tenant, or with all (`*`)."""
        return Call("POST", "/v1/shares", json_of(Share), body={"name": name, "tenant": tenant})

    @staticmethod
    def shares() -> Call[Shares]:
        """What is shared with others, and by others."""
        return Call("GET", "/v1/shares", json_of(Shares))

    @staticmethod
    def unshare(share: str) -> Call[None]:
        """End a share by its id."""
        return Call("DELETE", f"/v1/shares/{quote(share, safe='')}", nothing)


def audit_page(tenant: str | None, after: str | None, limit: int) -> Call[AuditEntries]:
    """A page of changes."""
    return Call("GET", "/v1/audit", json_of(AuditEntries), {"tenant": tenant, "after": after, "limit": limit})


def download(name: str, version: str | int | None, directory: str | Path) -> Call[Path]:
    """An adapter under the name of a job, of an uploaded one or of a share, unpacked."""
    named = name if version is None else f"{name}@{version}"
    return Call(
        "GET", f"/v1/adapters/{quote(named, safe='')}/download", lambda content: unpack(content, Path(directory))
    )
