"""Uploaded files of rows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, UploadFile
from fastapi import File as FormFile
from fastapi.responses import FileResponse

from motet.errors import LimitError, MotetError
from motet.service.database.tables import StoredFile, new_id
from motet.service.http.asking import Asker, AtDesk, Refusal
from motet.service.schemas import File, FileDeleted, Files
from motet.tasks.row_files import UPLOADED, count_rows

router = APIRouter(prefix="/v1/files", tags=["files"])
_PIECE = 2**20
PURPOSE = "fine-tune"
"""What files are for, as the `openai` package says it."""


@router.post("", status_code=201)
async def upload(
    request: Request,
    who: Asker,
    desk: AtDesk,
    file: Annotated[UploadFile, FormFile(description=".jsonl or .parquet")],
    purpose: Annotated[str, Form(description="`fine-tune`; there are no others.")] = PURPOSE,
) -> File:
    """Upload rows; every one is read before the file is taken."""
    if purpose != PURPOSE:
        raise Refusal(400, f"purpose: {purpose!r:.80} is not supported; files are for {PURPOSE!r}", "purpose")
    if odd := sorted(set(await request.form()) - {"file", "purpose"}):
        raise Refusal(400, f"{odd[0]:.80}: this field is not supported", odd[0][:80])
    file_id, name = new_id("file"), (file.filename or "rows.jsonl").replace("\0", "")[-255:]
    path, limit = desk.file_path(file_id, name), int(desk.settings.config.max_upload_mb * 2**20)
    path.parent.mkdir(parents=True, exist_ok=True)
    size, adding = 0, None
    try:
        with path.open("wb") as target:
            while piece := await file.read(_PIECE):
                size += len(piece)
                if size > limit:
                    raise Refusal(
                        413,
                        f"{name} is larger than {desk.settings.config.max_upload_mb:g} MB, the limit of this service",
                    )
                await asyncio.to_thread(target.write, piece)
        rows = await desk.reading.run(who.key_id, lambda: count_rows(path, UPLOADED))
        with_room = desk.steward.storing(who.tenant_id, size)
        adding = asyncio.create_task(asyncio.to_thread(with_room(desk.store.add_file), who, file_id, name, size, rows))
        found = await asyncio.shield(adding)
    except BaseException as error:  # whatever it is, also when the client has gone: what is not listed must not stay
        if adding is None or not await _worked(adding):
            path.unlink(missing_ok=True)
        if isinstance(error, MotetError) and not isinstance(error, LimitError):
            raise Refusal(400, str(error).replace(str(path), name)) from error
        raise
    await asyncio.to_thread(desk.store.audit, who, "upload file", file_id)
    return _shown(found)


async def _worked(adding: asyncio.Task[StoredFile]) -> bool:
    """Whether the file is listed in the end; a thread that has begun cannot be called back."""
    await asyncio.wait([adding])
    return adding.exception() is None


@router.get("")
def list_files(
    who: Asker,
    desk: AtDesk,
    after: Annotated[str | None, Query(max_length=100, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(description="All files are for `fine-tune`.")] = None,
) -> Files:
    """The tenant's files."""
    found = [] if purpose not in (None, PURPOSE) else desk.store.files(who)
    found = found if order == "desc" else found[::-1]
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise Refusal(400, f"after: there is no file {after!r}", "after")
        found = found[ids.index(after) + 1 :]
    page = [_shown(one) for one in found[:limit]]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return Files(data=page, has_more=len(found) > limit, first_id=first, last_id=last)


def file_of(file: str, who: Asker, desk: AtDesk) -> StoredFile:
    """The file that a path names, among the asker's."""
    found = desk.store.file(who, file)
    if found is None:
        raise Refusal(404, f"there is no file {file!r}")
    return found


NamedFile = Annotated[StoredFile, Depends(file_of)]


@router.get("/{file}")
def retrieve(found: NamedFile) -> File:
    """One file."""
    return _shown(found)


@router.get("/{file}/content", response_class=FileResponse)
def content(desk: AtDesk, found: NamedFile) -> FileResponse:
    """The file as it was uploaded."""
    path = desk.file_path(found.id, found.filename)
    if not path.is_file():
        raise Refusal(404, f"the content of {found.id} is not there any more")
    return FileResponse(path, media_type="application/octet-stream", filename=found.filename)


@router.delete("/{file}")
def delete(who: Asker, desk: AtDesk, found: NamedFile) -> FileDeleted:
    """Remove a file; jobs that name it fail when they are taken up again."""
    desk.store.delete_file(found.id)
    with contextlib.suppress(OSError):
        desk.file_path(found.id, found.filename).unlink()
    desk.store.audit(who, "delete file", found.id)
    return FileDeleted(id=found.id)


def _shown(found: StoredFile) -> File:
    return File(
        id=found.id, filename=found.filename, bytes=found.bytes, rows=found.rows, created=found.created,
        created_at=int(found.created),
    )  # fmt: skip
