"""Downloads that are packed on request, on disk instead of in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fastapi.responses import Response, StreamingResponse

_PIECE = 2**20


def packed(scratch: Path, write: Callable[[IO[bytes]], None], kind: str, name: str) -> Response:
    """A download from an unnamed temporary file, which is removed in all cases."""
    file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 -- `_pieces` closes it
    try:
        write(file)
    except BaseException:
        file.close()
        raise
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(file.tell())}
    file.seek(0)
    return StreamingResponse(_pieces(file), media_type=kind, headers=headers)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
