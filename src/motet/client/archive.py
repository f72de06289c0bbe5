"""From the archive that a service sends to a PEFT directory: two files are taken from it, and nothing else is allowed in it."""

from __future__ import annotations

import io
import os
import re
import tarfile
import zlib
from pathlib import Path

from motet.errors import ServiceError
from motet.types import ADAPTER_FILES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")


def unpack(content: bytes, directory: Path) -> Path:
    """Write the adapter in a .tar.gz to a directory below this one: `<job>-v<version>`, or an uploaded adapter's name.

    Raises:
        ServiceError: it is not the archive of an adapter.
    """
    try:
        name, files = _read(content)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ServiceError(f"what the service sent is not a whole .tar.gz ({error}); try again") from error
    target = directory.expanduser() / name
    target.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        part = target / f".{file}.part"
        part.write_bytes(text)
        os.replace(part, target / file)
    return target


def _read(content: bytes) -> tuple[str, dict[str, bytes]]:
    files: dict[str, bytes] = {}
    top = ""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            name, _, file = member.name.partition("/")
            if not member.isreg() or file not in ADAPTER_FILES or file in files or top not in ("", name):
                raise ServiceError(f"the service sent an archive with {member.name!r}, which no adapter has")
            top, source = name, archive.extractfile(member)
            files[file] = source.read() if source is not None else b""
    if set(files) != set(ADAPTER_FILES) or not _NAME.fullmatch(top):
        raise ServiceError(f"the service sent an archive that is not an adapter's: {top or 'empty'}")
    return top, files
