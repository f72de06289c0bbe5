"""Forms of uploads, read piece by piece: one file and few small fields, because `Bodies` counts the memory of one file only."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException

_MOST_FIELDS, _MOST_BYTES = 16, 4096
"""Fields besides the file, and bytes of each, and of what describes it."""
_SPOOLED = 2**20
"""Bytes of a file in memory."""


class FormReader:
    """Reads a multipart form from pieces. Its time depends on its length only: each piece is searched once."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._rest = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._step: Callable[[FormReader], bool] = FormReader._body  # bound, it would hold itself and the file
        self._parts = list[tuple[str, UploadFile | str]]()
        self._name, self._text = "", bytearray()
        self._file: UploadFile | None = None
        """The file that is read now."""
        self._begun = self._done = False

    def add(self, piece: bytes) -> None:
        """Read another piece. Raises HTTPException if it is no form, or has too much."""
        self._rest += piece
        while not self._done and self._step(self):
            pass
        if self._done:
            self._rest.clear()

    def form(self) -> FormData:
        """All of it. Raises HTTPException if its end is missing."""
        if not self._done:
            raise HTTPException(400, "the form ends before its last boundary; send it whole")
        return FormData(self._parts)

    def close(self) -> None:
        """Release the file of a form that is not read to its end."""
        for _, one in self._parts:
            if isinstance(one, UploadFile):
                one.file.close()

    def _body(self) -> bool:
        """Take what is before the next delimiter."""
        found = self._rest.find(self._delimiter)
        end = found if found >= 0 else len(self._rest) - len(self._delimiter)
        if end > 0:
            self._take(bytes(self._rest[:end]))
            del self._rest[:end]
        if found < 0:
            return False
        del self._rest[: len(self._delimiter)]
        if self._file is not None:
            self._file.size = self._file.file.tell()
            self._file.file.seek(0)
        elif self._begun:
            self._parts.append((self._name, _text(bytes(self._text))))
        self._begun, self._step = True, FormReader._head
        return True

    def _head(self) -> bool:
        """Take the lines before a part's content, or the end of the form."""
        if self._rest.startswith(b"--"):
            self._done = True
            return False
        if len(self._rest) >= 2 and not self._rest.startswith(b"\r\n"):
            raise HTTPException(400, "the content of the form has its boundary; choose a longer one, at random")
        end = self._rest.find(b"\r\n\r\n", 0, _MOST_BYTES)
        if end < 0:
            if len(self._rest) >= _MOST_BYTES:
                raise HTTPException(400, f"a part of the form has more than {_MOST_BYTES} bytes before its content")
            return False
        lines = bytes(self._rest[:end]).split(b"\r\n")
        del self._rest[: end + 4]
        named = [line.partition(b":") for line in lines]
        given = Headers(raw=[(name.strip().lower(), value.strip()) for name, colon, value in named if colon])
        kind, options = parse_options_header(given.get("content-disposition"))
        if kind != b"form-data" or b"name" not in options:
            raise HTTPException(400, "a part of the form has no name: Content-Disposition: form-data; name=…")
        self._name, self._text, self._file = _text(options[b"name"]), bytearray(), None
        if (filename := options.get(b"filename")) is not None:
            if any(isinstance(one, UploadFile) for _, one in self._parts):
                raise HTTPException(400, "Too many files. Maximum number of files is 1.")
            place: Any = tempfile.SpooledTemporaryFile(max_size=_SPOOLED)  # noqa: SIM115 - closed with the request
            self._file = UploadFile(place, filename=_text(filename), headers=given)
            self._parts.append((self._name, self._file))
        elif sum(isinstance(one, str) for _, one in self._parts) >= _MOST_FIELDS:
            raise HTTPException(400, f"Too many fields. Maximum number of fields is {_MOST_FIELDS}.")
        self._step = FormReader._body
        return True

    def _take(self, content: bytes) -> None:
        if not self._begun:  # what is before the first part
            return
        if self._file is not None:
            self._file.file.write(content)
            return
        self._text += content
        if len(self._text) > _MOST_BYTES:
            raise HTTPException(400, f"Field exceeded maximum size of {_MOST_BYTES} bytes.")


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
