"""Downloads that are packed on request, on disk instead of in memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fastapi.responses import Response, StreamingResponse

from motet.service.errors import Refusal

_PIECE = 2**20


def packed(scratch: Path, source: Path, write: Callable[[IO[bytes]], None], kind: str, name: str) -> Response:
    """A download of a directory from an unnamed temporary file, which is removed in all cases.

    Raises:
        Refusal: the directory was deleted before it was packed.
    """
    with contextlib.ExitStack() as unfinished:
        file = unfinished.enter_context(tempfile.TemporaryFile(dir=scratch))
        try:
            write(file)
        finally:
            if not source.is_dir():
                raise Refusal(404, f"what {name} is made of was deleted meanwhile")
        unfinished.pop_all()  # `_pieces` closes the file
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(file.tell())}
    file.seek(0)
    return StreamingResponse(_pieces(file), media_type=kind, headers=headers)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
