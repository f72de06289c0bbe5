"""Downloads that are packed on request, on disk instead of in memory."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fastapi import Request
from fastapi.responses import FileResponse, Response, StreamingResponse

from motet.process.thread_turns import ThreadTurns
from motet.service.errors import Refusal
from motet.service.http.bodies import when_sent

MOST_OPEN = 16
_PIECE = 2**20


class Download(FileResponse):
    """A file, in fewer pieces than of the framework, each of which goes to a thread and back."""

    chunk_size = _PIECE


class Packing:
    """Packs downloads in the turns of their tenants. A tenant may have few, because each is on the disk until it is sent."""

    def __init__(self, scratch: Path, turns: ThreadTurns) -> None:
        self._scratch, self._turns = scratch, turns
        self._open = Counter[str]()
        """Downloads by tenant."""

    async def answer(
        self, request: Request, tenant_id: str, source: Path, write: Callable[[IO[bytes]], None], kind: str, name: str
    ) -> Response:
        """A download of a directory.

        Raises:
            Refusal: too many of this tenant are open, or the directory was deleted before it was packed.
        """
        if self._open[tenant_id] >= MOST_OPEN:
            words = f"{MOST_OPEN} downloads of this tenant are open, the most here; wait for some to end"
            raise Refusal(429, words, headers={"Retry-After": "5"})
        self._open[tenant_id] += 1
        when_sent(request, functools.partial(self._sent, tenant_id))
        return await self._turns.run(tenant_id, lambda: packed(self._scratch, source, write, kind, name))

    def _sent(self, tenant_id: str) -> None:
        self._open -= Counter((tenant_id,))


def packed(scratch: Path, source: Path, write: Callable[[IO[bytes]], None], kind: str, name: str) -> Response:
    """A download from an unnamed temporary file. Raises Refusal if `source` was deleted before it was packed."""
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
