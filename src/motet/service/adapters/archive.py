"""PEFT directories as archives: .tar.gz or .zip in, .tar.gz out. Only the two adapter files are extracted.

Archives are untrusted: the unpacked size is limited, members are checked before they are read, and only those two files
are written.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from motet.core.checksums import check_version
from motet.core.errors import AdapterError, DataError, MotetError
from motet.core.safetensors_header import check_header
from motet.core.types import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS
from motet.process.isolated_calls import call
from motet.process.isolated_process import WorkLimits

MOST_MEMBERS = 1000
MOST_LIST = 2**20
"""Largest central directory of a .zip, in bytes."""
MOST_CONFIG = 2**20
"""Largest adapter_config.json, in bytes."""
_MOST_VALUES = 20_000
"""Values in an adapter_config.json."""
_HEADER = 2**16  # headers such as long names, which `tarfile` reads whole
_PIECE = 2**20
_SECONDS = 300.0
_END = struct.Struct("<4s4H2LH")  # last record of a .zip
_END_64 = b"PK\x06\x07"


def unpack(archive: Path, directory: Path, limit: int) -> int:
    """Extract an adapter from a .tar.gz or a .zip to an existing directory; returns the bytes, at most `limit`.

    Raises:
        DataError: it is not an adapter's archive, or is too large; the message says why.
    """
    with archive.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        try:
            if start[:2] == b"\x1f\x8b":
                sizes = _untar(file, directory, limit)
            elif start[:2] == b"PK":
                sizes = _unzip(file, directory, limit)
            else:
                raise DataError(
                    "this is neither a .tar.gz nor a .zip; pack adapter_config.json and the weights into one"
                )
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, LookupError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # a disk error, not the archive's
            raise DataError(f"the archive is damaged: {error}") from error
        except (
            NotImplementedError,
            RuntimeError,
        ) as error:  # raised by `zipfile` for unsupported compressions and passwords
            raise DataError(f"the archive cannot be read: {error}") from error
    for name in ADAPTER_FILES:
        if name not in sizes:
            raise DataError(f"the archive has no {name}; pack the files of one PEFT directory, nothing around them")
    return sum(sizes.values())


def _check_config(path: Path) -> None:
    """Raise AdapterError unless it is a JSON object of usual size."""
    text = path.read_bytes()
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_VALUES:
        raise AdapterError(f"{path} has more than {_MOST_VALUES} values, which no adapter has")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not a JSON object")


def unpack_isolated(archive: Path, directory: Path, limit: int) -> int:
    """Run `unpack` in a process behind a wall that sees only the archive and the directory; it also parses both files.

    The process with the base then reads only tensors of a known number, and JSON of a known size.

    Raises:
        DataError: as `unpack`, or a timeout.
        OSError: the disk failed.
    """
    places = str(archive.resolve()), str(directory.resolve())
    limits = WorkLimits(_SECONDS, clock=1.0, readable=places[:1], writable=places[1:], most_written=limit)
    try:
        answer = json.loads(call(_answer, json.dumps([*places, limit]).encode(), limits))
    except (MotetError, RuntimeError) as error:
        raise DataError(f"the archive could not be unpacked: {error}") from error
    if "of_disk" in answer:
        raise OSError(*answer["of_disk"])
    if "reason" in answer:
        raise DataError(answer["reason"])
    return int(answer["size"])


def pack(directory: Path, name: str) -> bytes:
    """An adapter as a .tar.gz of the directory `name`."""
    packed = io.BytesIO()
    pack_into(packed, directory, name)
    return packed.getvalue()


def pack_into(target: IO[bytes], directory: Path, name: str, beside: Mapping[str, Path] | None = None) -> None:
    """Write the result of `pack` to a file; `beside` are more files by their names in the archive.

    Raises:
        AdapterError: its files have changed since they were saved.
    """
    check_version(directory)
    # a version's receipt is a link to one of the job's: both are written as files
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1, dereference=True) as archive:
        for file in ADAPTER_FILES:
            if (directory / file).is_file():
                archive.add(directory / file, f"{name}/{file}")
        for file, path in (beside or {}).items():
            archive.add(path, f"{name}/{file}")


# --- both -------------------------------------------------------------------------------------------------------------------


class _Taken:
    """The extracted files so far."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._left, self._places = directory, limit, set[str]()
        self._members = 0
        self.sizes: dict[str, int] = {}

    def wants(self, member: str) -> str | None:
        """Which adapter file a member is; None for others. Raises DataError if the member is not allowed."""
        self._members += 1
        path = PurePosixPath(member)
        if self._members > MOST_MEMBERS:
            raise DataError(f"the archive has more than {MOST_MEMBERS} members; pack the files of one PEFT directory")
        if path.is_absolute() or ".." in path.parts or "\\" in member or "\0" in member:
            raise DataError(f"the archive has a member {member!r}, with a path outside of it")
        if path.name not in ADAPTER_FILES or len(path.parts) > 2:
            return None
        self._places.add(str(path.parent))
        if path.name in self.sizes or len(self._places) > 1:
            raise DataError(f"the archive holds more than one adapter: {member!r} is the second {path.name}")
        return path.name

    def take(self, name: str, source: IO[bytes]) -> None:
        """Extract one of the files."""
        left = min(self._left, MOST_CONFIG) if name == ADAPTER_CONFIG else self._left
        size = 0
        with (self._directory / name).open("wb") as target:
            while piece := source.read(_PIECE):
                size += len(piece)
                if size > left:
                    _too_large(name if left < self._left else "what it unpacks to", left)
                target.write(piece)
        self._left -= size
        self.sizes[name] = size


def _too_large(what: str, limit: int) -> NoReturn:
    raise DataError(f"the archive is too large: {what} has more than {limit / 2**20:g} MB")


# --- .tar.gz ----------------------------------------------------------------------------------------------------------------


_EXTENDED = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


class _Plain(tarfile.TarInfo):
    """Rejects sparse members and long extra headers, for which `tarfile` would read gigabytes into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED and self.size > _HEADER:
            raise tarfile.ReadError("a member's name is too long")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_holes()
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _refuse_holes(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a member is sparse; pack without --sparse")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_holes


class _Bounded(io.RawIOBase):
    """A stream with a limit on bytes read, including skipped members."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._limit, self._left = source, limit, limit

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        piece = self._source.read(size)
        self._left -= len(piece)
        if self._left < 0:
            _too_large("what it unpacks to", self._limit)
        return piece


def _untar(file: IO[bytes], directory: Path, limit: int) -> dict[str, int]:
    taken = _Taken(directory, limit)
    room = limit + MOST_MEMBERS * (2 * _HEADER)
    with (
        gzip.open(file) as plain,
        tarfile.open(fileobj=_Bounded(plain, room), mode="r|", tarinfo=_Plain) as archive,  # type: ignore[call-overload,arg-type]
    ):
        for member in archive:
            name = taken.wants(member.name)
            if member.isdir():
                continue
            if not member.isreg():
                raise DataError(f"the archive has a member {member.name!r} that is neither a file nor a directory")
            if name is not None and (source := archive.extractfile(member)) is not None:
                taken.take(name, source)
    return taken.sizes


# --- .zip -------------------------------------------------------------------------------------------------------------------


def _unzip(file: IO[bytes], directory: Path, limit: int) -> dict[str, int]:
    _look_at_directory(file)
    taken = _Taken(directory, limit)
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = taken.wants(member.filename)
            kind = member.external_attr >> 28  # file type, if packed on Unix
            if kind not in (0, 8, 4):
                raise DataError(f"the archive has a member {member.filename!r} that is neither a file nor a directory")
            if name is None or member.is_dir():
                continue
            # `zipfile` decompresses others all at once
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"the archive packs {member.filename!r} in an unsupported way; use deflate")
            with archive.open(member) as source:
                taken.take(name, source)
    return taken.sizes


def _look_at_directory(file: IO[bytes]) -> None:
    """Reject a .zip with too many members before `zipfile` reads its directory into memory."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size - 2**16 - 20))
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < _END.size:
        raise DataError("the archive is damaged: a .zip ends otherwise")
    _, _, _, _, members, length, _, _ = _END.unpack_from(tail, place)
    if members > MOST_MEMBERS or length > MOST_LIST or _END_64 in tail[max(0, place - 20) : place]:
        raise DataError(
            f"the archive has more than {MOST_MEMBERS} members, or long names; pack the files of one PEFT directory"
        )
    file.seek(0)


def _answer(given: bytes) -> bytes:
    """Runs in a separate process."""
    archive, place, limit = json.loads(given)
    directory = Path(place)
    try:
        answer: dict[str, Any] = {"size": unpack(Path(archive), directory, limit)}
        check_header(directory / ADAPTER_WEIGHTS)
        _check_config(directory / ADAPTER_CONFIG)
    except (AdapterError, DataError) as error:
        answer = {"reason": str(error).replace(f"{directory}/", "")}
    except OSError as error:
        answer = {"of_disk": [error.errno, error.strerror]}
    return json.dumps(answer).encode()
