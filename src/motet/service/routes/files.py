"""Routes for uploaded files of rows."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, UploadFile
from fastapi import File as FormFile
from fastapi.responses import Response

from motet.core.errors import LimitError, MotetError
from motet.data.row_files import UPLOADED, count_isolated
from motet.service.database.store import files_of, size_of
from motet.service.database.tables import StoredFile, new_id
from motet.service.depends import Asker, ServiceDep, read, while_there, worked
from motet.service.errors import Refusal, bad_field, existing
from motet.service.http.downloads import Download
from motet.service.http.pages import page
from motet.service.http.rights import check_change
from motet.service.routing import TenantRoute
from motet.service.schemas import File, FileDeleted, Files

router = APIRouter(prefix="/v1/files", tags=["files"], route_class=TenantRoute)
_PIECE = 2**20
PURPOSE = "fine-tune"
"""The purpose of all files, in the terms of the `openai` package."""


@router.post("", status_code=201)
async def upload(
    request: Request,
    who: Asker,
    service: ServiceDep,
    file: Annotated[UploadFile, FormFile(description=".jsonl or .parquet")],
    purpose: Annotated[str, Form(description="Must be `fine-tune`.")] = PURPOSE,
) -> File:
    """Upload a file of rows; every row is checked first."""
    if purpose != PURPOSE:
        raise bad_field("purpose", f"{purpose!r:.80} is not supported; files are for {PURPOSE!r}")
    if odd := sorted(set(await request.form()) - {"file", "purpose"}):
        raise Refusal(400, f"{odd[0]:.80}: this field is not supported", odd[0][:80])
    name = "".join(letter for letter in file.filename or "rows.jsonl" if letter.isprintable())[-255:]
    file_id = new_id("file")
    path, limit = service.storage.upload(file_id, name), int(service.settings.config.max_upload_mb * 2**20)
    part = service.storage.arriving(path)
    size, adding = 0, None
    try:
        with part.open("wb") as target:
            while piece := await file.read(_PIECE):
                size += len(piece)
                if size > limit:
                    most = service.settings.config.max_upload_mb
                    raise Refusal(413, f"{name} is larger than {most:g} MB, the limit of this service")
                await asyncio.to_thread(target.write, piece)
        rows = await while_there(request, read(service, who, lambda: count_isolated(part, UPLOADED)))
        with_room = service.quotas.storing(who.tenant_id, size)
        landed = service.storage.landed(part, path)
        add = functools.partial(with_room(landed(service.store.add_file)), who, file_id, name, size, rows)
        adding = asyncio.create_task(service.write_threads.run(who.tenant_id, add))
        stored = await asyncio.shield(adding)
    except BaseException as error:  # any error, also a disconnected client: an unlisted file must not stay
        if adding is None or not await worked(adding):
            part.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if isinstance(error, MotetError) and not isinstance(error, LimitError):
            raise Refusal(400, str(error).replace(str(part), name)) from error
        raise
    return _shown(stored)


@router.get("", response_model=Files)
def list_files(
    who: Asker,
    service: ServiceDep,
    after: Annotated[str | None, Query(max_length=100, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(description="All files are for `fine-tune`.")] = None,
) -> Response:
    """List the tenant's files."""
    if purpose not in (None, PURPOSE):
        return page(Files(data=[], has_more=False, first_id=None, last_id=None))
    last_seen = None if after is None else service.store.file(who, after)
    if after is not None and last_seen is None:
        raise bad_field("after", f"there is no file {after!r}")
    query = files_of(who, last_seen, newest=order == "desc")
    files, more = service.store.page(query, size_of(StoredFile.filename), limit)
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return page(Files(data=[], has_more=more, first_id=first, last_id=last), map(_shown, files))


def _named_file(file: str, who: Asker, service: ServiceDep) -> StoredFile:
    return existing(service.store.file(who, file), f"there is no file {file!r}")


NamedFile = Annotated[StoredFile, Depends(_named_file)]
"""The file named in the path, among those of the requester."""


@router.get("/{file}")
def retrieve(stored: NamedFile) -> File:
    """Get a file's metadata."""
    return _shown(stored)


@router.get("/{file}/content", response_class=Download)
def content(service: ServiceDep, stored: NamedFile) -> Download:
    """Download the file as it was uploaded."""
    path = service.storage.upload(stored.id, stored.filename)
    if not path.is_file():
        raise Refusal(404, f"the content of {stored.id} is not there any more")
    return Download(path, media_type="application/octet-stream", filename=stored.filename)


@router.delete("/{file}")
def delete(who: Asker, service: ServiceDep, stored: NamedFile) -> FileDeleted:
    """Delete a file; jobs that name it fail when they resume."""
    check_change(who, stored, f"file {stored.filename!r}")
    service.store.delete_file(stored.id)
    with contextlib.suppress(OSError):
        service.storage.upload(stored.id, stored.filename).unlink()
    service.store.audit(who, "delete file", stored.id)
    return FileDeleted(id=stored.id)


def _shown(stored: StoredFile) -> File:
    return File(
        id=stored.id, filename=stored.filename, bytes=stored.bytes, rows=stored.rows, created=stored.created,
        created_at=int(stored.created), submitter=stored.submitter,
    )  # fmt: skip
