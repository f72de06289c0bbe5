"""Routes for adapters: versions of jobs, uploads, downloads and shares."""

from __future__ import annotations

import asyncio
import functools
import shutil
from pathlib import Path
from typing import IO, Annotated

from fastapi import APIRouter, Query, Request, UploadFile
from fastapi import File as FormFile
from fastapi.responses import Response

from motet.core.errors import DataError
from motet.core.types import ADAPTER_FILES
from motet.hosts.hosts import Hosts
from motet.hosts.messages import AdapterExamined, ExamineAdapter, Unfit
from motet.runtime.held_out import first_trained, lines_of
from motet.service.adapters.adapters import ALL, PLACE_OF_ADAPTER, PLACE_OF_SHARE, Shared
from motet.service.adapters.adapters import Adapters as AdaptersPart
from motet.service.adapters.archive import pack_into, unpack_isolated
from motet.service.composition import Service
from motet.service.database.tables import Share as StoredShare
from motet.service.database.tables import UploadedAdapter, new_id
from motet.service.database.tenants import Principal
from motet.service.depends import After, Asker, NamedJob, ServiceDep, read, worked
from motet.service.errors import Refusal, existing
from motet.service.http.pages import page
from motet.service.http.rights import check_change
from motet.service.routing import TenantRoute
from motet.service.schemas import Version, Versions
from motet.service.schemas.adapters import Adapter, Adapters, Share, ShareRequest, Shares

router = APIRouter(prefix="/v1", tags=["adapters"], route_class=TenantRoute)
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}$"
_PIECE, _MOST_MODELS = 2**20, 1000
WithReceipts = Annotated[
    bool, Query(description="Add the receipts of an own job's version; a tenant with whom it is shared gets none.")
]


@router.get("/jobs/{job}/versions")
def list_versions(
    service: ServiceDep,
    job: NamedJob,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
) -> Versions:
    """List the stored versions."""
    storage = service.storage
    directory, best, latest = storage.job(job.id), storage.version(job.id, "best"), storage.version(job.id, "latest")
    numbers = [number for number in directory.versions() if after is None or number > int(after)]
    trained = first_trained(lines_of(directory.metrics))
    return Versions(
        data=[
            Version(
                version=number,
                best=best is not None and best[0] == number,
                latest=latest is not None and latest[0] == number,
                untrained=trained is None or number < trained,
                model=f"{job.name}@{number}",
                bytes=_size(directory.version(number)),
            )
            for number in numbers[:limit]
        ],
        next=str(numbers[limit - 1]) if len(numbers) > limit else None,
    )


@router.get("/jobs/{job}/versions/{version}/download", response_class=Response)
async def download_version(
    request: Request, who: Asker, service: ServiceDep, job: NamedJob, version: str, receipts: WithReceipts = False
) -> Response:
    """Download a version (a number, `best` or `latest`) as a .tar.gz of a PEFT directory."""

    def find() -> tuple[int, Path]:
        if (saved := service.storage.version(job.id, version)) is None:
            kept = ", ".join(map(str, service.storage.job(job.id).versions())) or "none yet"
            raise Refusal(404, f"version {version!r} of job {job.name!r} does not exist; kept versions: {kept}")
        return saved

    number, directory = await service.answer_threads.run(who.tenant_id, find)
    return await _archive(request, service, who.tenant_id, directory, f"{job.name}-v{number}", receipts)


@router.post("/adapters", status_code=201)
async def upload(
    who: Asker,
    service: ServiceDep,
    file: Annotated[UploadFile, FormFile(description="A .tar.gz or .zip of a PEFT directory.")],
    name: Annotated[
        str | None, Query(pattern=NAME, description="Unique among the tenant's adapters and jobs; the id without one.")
    ] = None,
    base: Annotated[str | None, Query(max_length=1000, description="Its base; default: the first.")] = None,
) -> Adapter:
    """Upload an adapter to start jobs from and to chat with. It is checked against the base first."""
    adapter_id, of_base = new_id("adapter"), service.adapters.bases.named(base)
    path = service.adapters.path(adapter_id)
    directory = service.storage.arriving(path)
    directory.mkdir()
    adding: asyncio.Task[UploadedAdapter] | None = None
    try:
        limit = int(service.settings.config.max_adapter_mb * 2**20)
        size = await read(service, who, lambda: _unpack(file, directory, limit))
        await asyncio.to_thread(service.quotas.check_storage, who.tenant_id, size)  # before the engine has work with it
        shape = await _examined(service.hosts, directory, of_base, who.tenant_id)
        adapter = UploadedAdapter(
            id=adapter_id, tenant_id=who.tenant_id, name=name or adapter_id, bytes=size, rank=shape.rank,
            alpha=shape.alpha, target_modules=shape.target_modules, base=of_base, **who.submitted,
        )  # fmt: skip
        with_room = service.quotas.storing(who.tenant_id, size)
        landed = service.storage.landed(directory, path)
        add = functools.partial(with_room(landed(service.adapters.add)), who, adapter)
        adding = asyncio.create_task(service.write_threads.run(who.tenant_id, add))
        await asyncio.shield(adding)
    except BaseException:  # also if the client has disconnected
        if adding is None or not await worked(adding):
            for place in (directory, path):
                shutil.rmtree(place, ignore_errors=True)
        raise
    await asyncio.to_thread(service.store.audit, who, "upload adapter", adapter_id)
    return _shown(service.adapters, adapter)


@router.get("/adapters", response_model=Adapters)
def list_adapters(
    who: Asker,
    service: ServiceDep,
    after: Annotated[str | None, Query(pattern=PLACE_OF_ADAPTER, description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
) -> Response:
    """List the tenant's uploaded adapters."""
    adapters, following = service.adapters.page(who, after, limit)
    return page(Adapters(data=[], next=following), (_shown(service.adapters, one) for one in adapters))


@router.get("/adapters/{adapter:path}/download", response_class=Response)
async def download(
    request: Request, who: Asker, service: ServiceDep, adapter: str, receipts: WithReceipts = False
) -> Response:
    """Download an adapter as a .tar.gz: an uploaded one, `job@version`, or a shared `tenant/job@version`."""
    found = await service.answer_threads.run(who.tenant_id, lambda: service.adapters.find(who, adapter))
    resolved = existing(found, f"there is no adapter {adapter!r}")
    receipts = receipts and resolved.job_of is not None and (who.admin or resolved.job_of == who.tenant_id)
    return await _archive(request, service, who.tenant_id, resolved.path, resolved.name, receipts)


@router.get("/adapters/{adapter}")
def show(who: Asker, service: ServiceDep, adapter: str) -> Adapter:
    """Get an uploaded adapter by id or name."""
    return _shown(service.adapters, _uploaded(service.adapters, who, adapter))


@router.delete("/adapters/{adapter}", status_code=204)
def delete(who: Asker, service: ServiceDep, adapter: str) -> None:
    """Delete an uploaded adapter. Jobs that started from it continue."""
    uploaded = _uploaded(service.adapters, who, adapter)
    check_change(who, uploaded, f"adapter {uploaded.name!r}")
    service.adapters.remove(uploaded)
    service.store.audit(who, "delete adapter", uploaded.id)


def _shown(adapters: AdaptersPart, adapter: UploadedAdapter) -> Adapter:
    return Adapter.model_validate(adapter).model_copy(update={"base": adapters.bases.shown(adapter.base)})


def _uploaded(adapters: AdaptersPart, who: Principal, name: str) -> UploadedAdapter:
    return existing(adapters.uploaded(who, name), f"there is no uploaded adapter {name!r}")


def _unpack(file: UploadFile, directory: Path, limit: int) -> int:
    """Extract the archive's two files into the directory; returns their bytes."""
    archive = directory / "archive"
    with archive.open("wb") as target:
        shutil.copyfileobj(file.file, target, _PIECE)
    try:
        return unpack_isolated(archive, directory, limit)
    except DataError as error:
        status = 413 if "too large" in str(error) else 400
        raise Refusal(status, f"{error} (the limit is {limit / 2**20:g} MB)") from error
    finally:
        archive.unlink()


async def _examined(hosts: Hosts, directory: Path, base: str, tenant: str) -> AdapterExamined:
    """Rank, alpha and modules, as read by a process that has the base."""
    (answer,) = [answer async for answer in hosts.ask(ExamineAdapter(str(directory), base=base, tenant=tenant))]
    if isinstance(answer, AdapterExamined):
        return answer
    reason = answer.reason if isinstance(answer, Unfit) else ""
    raise Refusal(400, reason.replace(f"{directory}/", "").replace(str(directory), "the adapter"))


async def _archive(
    request: Request, service: Service, key: str, directory: Path, name: str, receipts: bool
) -> Response:
    """An adapter as a .tar.gz, packed in the turn of `key`."""

    def pack(file: IO[bytes]) -> None:
        pack_into(file, directory, name, service.storage.receipts(directory) if receipts else None)

    return await service.packing.answer(request, key, directory, pack, "application/gzip", f"{name}.tar.gz")


def _size(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in ADAPTER_FILES if (directory / name).is_file())


class ShareAnswers:
    """Converts shares to responses."""

    def __init__(self, service: Service) -> None:
        self._adapters, self._versions = service.adapters, functools.cache(service.storage.version_names)

    def __call__(self, one: Shared) -> Share:
        """The response for one share."""
        return Share(
            id=one.share.id, name=one.name, owner=one.owner, tenant=one.tenant, models=self._models(one),
            created=one.share.created, base=self._adapters.bases.shown(one.base),
        )  # fmt: skip

    def _models(self, one: Shared) -> list[str]:
        if not one.name:
            return []
        name = f"{one.owner}/{one.name}"
        return (
            [f"{name}@{version}" for version in self._versions(one.share.object)[-_MOST_MODELS:]]
            if one.is_job
            else [name]
        )


@router.post("/shares", status_code=201)
def share(who: Asker, service: ServiceDep, wanted: ShareRequest) -> Share:
    """Share a job's versions or an uploaded adapter with another tenant, or with all. Nothing else becomes visible."""
    thing = service.store.job(who, wanted.name) or service.adapters.uploaded(who, wanted.name)
    if thing is None:
        raise Refusal(404, f"there is no job or uploaded adapter {wanted.name!r}", "name")
    check_change(who, thing, repr(wanted.name))
    known = service.store.tenants.find(wanted.tenant)
    other = ALL if wanted.tenant == ALL else None if known is None else known.id
    if other is None:
        raise Refusal(404, f"there is no tenant {wanted.tenant!r}; an admin's `motet keys create` makes one", "tenant")
    if other == thing.tenant_id:
        raise Refusal(400, f"{wanted.name!r} is this tenant's already; name another tenant", "tenant")
    made = service.adapters.share(
        StoredShare(id=new_id("share"), tenant_id=thing.tenant_id, object=thing.id, with_tenant=other)
    )
    service.store.audit(who, "share", f"{made.share.id} {thing.id}")
    return ShareAnswers(service)(made)


@router.get("/shares", response_model=Shares)
def list_shares(
    who: Asker,
    service: ServiceDep,
    after: Annotated[str | None, Query(pattern=PLACE_OF_SHARE, description="`next` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 200,
) -> Response:
    """List the tenant's shares, then those that others share with it."""
    given, received, following = service.adapters.listed(who, after, limit)
    shown = ShareAnswers(service)
    return page(Shares(given=[], received=[], next=following), given=map(shown, given), received=map(shown, received))


@router.delete("/shares/{share}", status_code=204)
def unshare(who: Asker, service: ServiceDep, share: str) -> None:
    """Delete a share. Jobs that started from it continue."""
    missing = f"there is no share {share!r}"
    given = existing(service.adapters.given(who, share), missing)
    if (thing := service.adapters.by_id(given.object)) is not None:
        check_change(who, thing, repr(thing.name))
    if not service.adapters.unshare(given):
        raise Refusal(404, missing)
    service.store.audit(who, "unshare", f"{given.id} {given.object}")
