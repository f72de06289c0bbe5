"""Adapters: versions of a job's, those that tenants bring, and all of them to take home."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

from fastapi import APIRouter, Query, UploadFile
from fastapi import File as FormFile
from fastapi.responses import Response, StreamingResponse

from motet.errors import DataError
from motet.service.adapters.archive import pack_into, unpack_apart
from motet.service.database.tables import UploadedAdapter, new_id
from motet.service.database.tenants import Principal
from motet.service.desk import Desk
from motet.service.http.asking import Asker, AtDesk, NamedJob, Refusal
from motet.service.schemas import Version, Versions
from motet.service.schemas.adapters import Adapter, Adapters
from motet.types import ADAPTER_FILES

router = APIRouter(prefix="/v1", tags=["adapters"])
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}$"
_PIECE = 2**20


@router.get("/jobs/{job}/versions")
def list_versions(desk: AtDesk, job: NamedJob) -> Versions:
    """The versions that are kept."""
    directory, best, latest = desk.directory(job.id), desk.version(job, "best"), desk.version(job, "latest")
    return Versions(
        data=[
            Version(
                version=number,
                best=best is not None and best[0] == number,
                latest=latest is not None and latest[0] == number,
                model=f"{job.name}@{number}",
                bytes=_size(directory.version(number)),
            )
            for number in directory.versions()
        ]
    )


@router.get("/jobs/{job}/versions/{version}/download", response_class=Response)
def download_version(desk: AtDesk, job: NamedJob, version: str) -> Response:
    """A version (a number, `best` or `latest`) as a .tar.gz of a PEFT directory."""
    found = desk.version(job, version)
    if found is None:
        kept = ", ".join(map(str, desk.directory(job.id).versions())) or "none yet"
        raise Refusal(404, f"version {version!r} of job {job.name!r} is not there; kept are {kept}")
    return _packed(desk, found[1], f"{job.name}-v{found[0]}")


@router.post("/adapters", status_code=201)
async def upload(
    who: Asker,
    desk: AtDesk,
    file: Annotated[UploadFile, FormFile(description="A .tar.gz or .zip of a PEFT directory.")],
    name: Annotated[
        str | None, Query(pattern=NAME, description="Unique among the tenant's adapters and jobs; the id without one.")
    ] = None,
) -> Adapter:
    """Upload an adapter to start jobs from and to talk to. It is checked against the base before it is taken."""
    adapter_id = new_id("adapter")
    directory = desk.adapters.path(adapter_id)
    directory.mkdir(parents=True)
    try:
        size = await _unpacked(desk, file, directory)
        await asyncio.to_thread(desk.limits.room, who.tenant_id, size)  # before the engine is troubled
        shape = await _examined(desk, directory)
        adapter = UploadedAdapter(
            id=adapter_id, tenant_id=who.tenant_id, name=name or adapter_id, bytes=size, rank=shape["rank"],
            alpha=shape["alpha"], target_modules=shape["target_modules"],
        )  # fmt: skip
        with_room = desk.steward.storing(who.tenant_id, size)
        await asyncio.to_thread(with_room(desk.adapters.add), who, adapter)
    except BaseException:  # also when the client has gone
        shutil.rmtree(directory, ignore_errors=True)
        raise
    await asyncio.to_thread(desk.store.audit, who, "upload adapter", adapter_id)
    return _shown(adapter)


@router.get("/adapters")
def list_adapters(who: Asker, desk: AtDesk) -> Adapters:
    """The adapters that the tenant uploaded."""
    return Adapters(data=[_shown(one) for one in desk.adapters.all(who)])


@router.get("/adapters/{adapter:path}/download", response_class=Response)
def download(who: Asker, desk: AtDesk, adapter: str) -> Response:
    """An adapter as a .tar.gz of a PEFT directory: an uploaded one, `job@version`, or `tenant/job@version` of a share."""
    found = desk.adapters.find(who, adapter)
    if found is None:
        raise Refusal(404, f"there is no adapter {adapter!r}")
    return _packed(desk, found.path, found.name)


@router.get("/adapters/{adapter}")
def show(who: Asker, desk: AtDesk, adapter: str) -> Adapter:
    """An uploaded adapter, by id or name."""
    return _shown(_uploaded(desk, who, adapter))


@router.delete("/adapters/{adapter}", status_code=204)
def delete(who: Asker, desk: AtDesk, adapter: str) -> None:
    """Remove an uploaded adapter; jobs that started from it go on."""
    found = _uploaded(desk, who, adapter)
    desk.adapters.remove(found)
    desk.store.audit(who, "delete adapter", found.id)


def _uploaded(desk: Desk, who: Principal, name: str) -> UploadedAdapter:
    found = desk.adapters.uploaded(who, name)
    if found is None:
        raise Refusal(404, f"there is no uploaded adapter {name!r}")
    return found


async def _unpacked(desk: Desk, file: UploadFile, directory: Path) -> int:
    """The archive's two files in the directory; gives their bytes."""
    archive, limit = directory / "archive", int(desk.settings.config.max_adapter_mb * 2**20)

    def work() -> int:
        with archive.open("wb") as target:
            shutil.copyfileobj(file.file, target, _PIECE)
        try:
            return unpack_apart(archive, directory, limit)
        finally:
            archive.unlink()

    try:
        return await asyncio.to_thread(work)
    except DataError as error:
        raise Refusal(
            413 if "too large" in str(error) else 400, f"{error} (the limit is {limit / 2**20:g} MB)"
        ) from error


async def _examined(desk: Desk, directory: Path) -> dict[str, Any]:
    """Rank, alpha and modules, as the engine's process reads them, which knows the base."""
    told: dict[str, Any] = {}
    async for message in desk.link.ask("examine", directory=str(directory)):
        told |= message
    if "wrong" in told:
        raise Refusal(400, str(told["wrong"]).replace(f"{directory}/", "").replace(str(directory), "the adapter"))
    found: dict[str, Any] = told["found"]
    return found


def _shown(one: UploadedAdapter) -> Adapter:
    return Adapter(
        id=one.id, name=one.name, rank=one.rank, alpha=one.alpha, target_modules=one.target_modules,
        bytes=one.bytes, created=one.created,
    )  # fmt: skip


def _packed(desk: Desk, directory: Path, name: str) -> Response:
    """A download; it lies in a file without a name meanwhile, of which nothing is left whatever happens."""
    file = tempfile.TemporaryFile(dir=desk.settings.directory)  # noqa: SIM115 -- `_pieces` closes it
    try:
        pack_into(file, directory, name)
    except BaseException:
        file.close()
        raise
    headers = {"Content-Disposition": f'attachment; filename="{name}.tar.gz"', "Content-Length": str(file.tell())}
    file.seek(0)
    return StreamingResponse(_pieces(file), media_type="application/gzip", headers=headers)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece


def _size(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in ADAPTER_FILES if (directory / name).is_file())
