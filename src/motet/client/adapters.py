"""Client methods for models and adapters, named by job, upload or share."""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
import zlib
from pathlib import Path

from motet.client.connection import PAGE, Connection, path_of
from motet.core.errors import DataError, ServiceError
from motet.core.types import ADAPTER_FILES
from motet.service.adapters.archive import pack
from motet.service.schemas import Model, Models
from motet.service.schemas.adapters import Adapter, Adapters, Share, Shares

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")
_RECEIPT = re.compile(r"receipt\.json|receipts/v\d{1,9}\.json")


class AdapterMethods(Connection):
    """Methods of both clients."""

    async def models(self) -> list[Model]:
        """Models for completions: the base, and `job@version`."""
        return [one async for one in self._all_pages(Models, "/v1/models")]

    async def model(self, name: str) -> Model:
        """A model by any name that a request may give."""
        return await self._ask(Model, "GET", path_of("models", name))

    async def push(self, directory: str | Path, name: str | None = None, base: str | None = None) -> Adapter:
        """Upload a PEFT directory; its id or name is a job's `adapter.init` and a model for completions.

        `base` is the base that it fits, if the service has several; default: the first.
        """
        packed = await asyncio.to_thread(_packed, Path(directory))
        files = {"file": ("adapter.tar.gz", packed)}
        return await self._ask(Adapter, "POST", "/v1/adapters", params={"name": name, "base": base}, files=files)

    async def pull(self, job: str, version: str | int | None = None, directory: str | Path = ".") -> Path:
        """Download an adapter as a PEFT directory below `directory`, with the receipts of an own job's version.

        Args:
            job: a job, an uploaded adapter, or what another tenant shares: `tenant/job`.
            version: of a job: a number, `best` or `latest`; default: `best`.
            directory: parent of the new directory `<job>-v<version>`, or the name of an uploaded adapter.
        """
        name = job if version is None else f"{job}@{version}"
        response = await self._send("GET", f"{path_of('adapters', name)}/download", params={"receipts": "true"})
        return await asyncio.to_thread(unpack, response.content, Path(directory))

    async def adapters(self) -> list[Adapter]:
        """Uploaded adapters, newest first."""
        return [one async for one in self._all_pages(Adapters, "/v1/adapters")]

    async def adapter(self, name: str) -> Adapter:
        """An uploaded adapter by its id or name."""
        return await self._ask(Adapter, "GET", path_of("adapters", name))

    async def delete_adapter(self, name: str) -> None:
        """Remove an uploaded adapter. Jobs that started from it continue."""
        await self._send("DELETE", path_of("adapters", name))

    async def share(self, name: str, tenant: str) -> Share:
        """Share a job's versions or an uploaded adapter with a tenant, or with all (`*`)."""
        return await self._ask(Share, "POST", "/v1/shares", json={"name": name, "tenant": tenant})

    async def shares(self) -> Shares:
        """Shares with others, and of others."""
        whole = await self._ask(Shares, "GET", "/v1/shares", params={"limit": PAGE})
        while whole.next is not None:
            more = await self._ask(Shares, "GET", "/v1/shares", params={"after": whole.next, "limit": PAGE})
            whole = Shares(given=whole.given + more.given, received=whole.received + more.received, next=more.next)
        return whole

    async def unshare(self, share: str) -> None:
        """End a share by its id."""
        await self._send("DELETE", path_of("shares", share))


def _packed(directory: Path) -> bytes:
    place = Path(os.path.expanduser(directory))
    for file in ADAPTER_FILES:
        if not (place / file).is_file():
            raise DataError(f"{place} has no {file}; give a directory that `peft` or Motet wrote")
    return pack(place, "adapter")


def unpack(content: bytes, directory: Path) -> Path:
    """Write the adapter in a .tar.gz to a directory below this one: `<job>-v<version>`, or an uploaded adapter's name.

    Raises:
        ServiceError: it is not the archive of an adapter.
    """
    try:
        name, files = _read(content)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ServiceError(f"the download is not a complete .tar.gz ({error}); try again") from error
    target = Path(os.path.expanduser(directory)) / name
    target.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        place = target / file
        place.parent.mkdir(exist_ok=True)
        part = place.with_name(f".{place.name}.part")
        part.write_bytes(text)
        os.replace(part, place)
    return target


def _read(content: bytes) -> tuple[str, dict[str, bytes]]:
    files: dict[str, bytes] = {}
    top = ""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            name, _, file = member.name.partition("/")
            known = file in ADAPTER_FILES or _RECEIPT.fullmatch(file)
            if not member.isreg() or not known or file in files or top not in ("", name):
                raise ServiceError(f"the service sent an archive with {member.name!r}, which no adapter has")
            top, source = name, archive.extractfile(member)
            files[file] = source.read() if source is not None else b""
    if not set(ADAPTER_FILES) <= set(files) or not _NAME.fullmatch(top):
        raise ServiceError(f"the service sent an archive that is not an adapter's: {top or 'empty'}")
    return top, files
