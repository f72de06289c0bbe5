"""Uploaded files of rows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from fastapi import APIRouter, UploadFile
from fastapi import File as FormFile

from motet.config import DataConfig
from motet.errors import MotetError
from motet.service.asking import Asker, AtDesk, Refusal
from motet.service.schemas import File, Files
from motet.service.store import new_id
from motet.service.tables import StoredFile
from motet.tasks.sources import read_rows

router = APIRouter(prefix="/v1/files", tags=["files"])
_PIECE = 2**20


@router.post("", status_code=201)
async def upload(
    who: Asker, desk: AtDesk, file: Annotated[UploadFile, FormFile(description=".jsonl or .parquet")]
) -> File:
    """Upload rows; every one is read before the file is taken."""
    file_id, name = new_id("file"), (file.filename or "rows.jsonl").replace("\0", "")[-255:]
    path, limit = desk.file_path(file_id, name), int(desk.settings.max_upload_mb * 2**20)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    try:
        with path.open("wb") as target:
            while piece := await file.read(_PIECE):
                size += len(piece)
                if size > limit:
                    raise Refusal(
                        413, f"{name} is larger than {desk.settings.max_upload_mb:g} MB, the limit of this service"
                    )
                await asyncio.to_thread(target.write, piece)
        rows = await asyncio.to_thread(lambda: len(read_rows(DataConfig(source=str(path)))[0]))
        return _shown(await asyncio.to_thread(desk.store.add_file, who, file_id, name, size, rows))
    except (Refusal, MotetError, OSError) as error:
        path.unlink(missing_ok=True)
        if isinstance(error, MotetError):
            raise Refusal(400, str(error).replace(str(path), name)) from error
        raise


@router.get("")
def list_files(who: Asker, desk: AtDesk) -> Files:
    """The tenant's files."""
    return Files(data=[_shown(found) for found in desk.store.files(who)])


@router.delete("/{file}", status_code=204)
def delete(who: Asker, desk: AtDesk, file: str) -> None:
    """Remove a file; jobs that name it fail when they are taken up again."""
    found = desk.store.file(who, file)
    if found is None:
        raise Refusal(404, f"there is no file {file!r}")
    desk.store.delete_file(found.id)
    with contextlib.suppress(OSError):
        desk.file_path(found.id, found.filename).unlink()


def _shown(found: StoredFile) -> File:
    return File(id=found.id, filename=found.filename, bytes=found.bytes, rows=found.rows, created=found.created)
