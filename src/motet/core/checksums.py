"""Checksums of saved files: sha256 of everything that a commit names, and detection of damage.

A commit's state.json holds the sums of its own files, of the committed part of the job's logs, and of itself. Sums of
rollout files are in checksums.jsonl, one of these logs; a version's sums are beside its files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from motet.core.errors import AdapterError, DiskFull, RunError

SUMS = "sha256.json"
"""Beside a version's files: their sums."""
_PIECE = 1 << 20
_BROKEN = (errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE)
_DRAFT_SECONDS = 3600.0
"""Longer than any draft takes."""


@dataclass(frozen=True)
class Damage:
    """A file that differs from what was saved."""

    path: Path
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}: {self.remedy}"


def hash_of(path: Path, length: int | None = None) -> hashlib._Hash:
    """The hash of a file or of its first bytes; it can be updated with appended bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE if length is None else min(_PIECE, length)):
            digest.update(piece)
            length = None if length is None else length - len(piece)
    return digest


def sync(path: Path) -> None:
    """Make a written file, or a rename in a directory, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sums_of(directory: Path) -> dict[str, str]:
    """sha256 of each file of a directory and below it, by name."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): hash_of(path).hexdigest() for path in files}


def is_inside(name: str) -> bool:
    """Whether a name in a list of files is a plain relative path, which stays inside its directory."""
    return name == PurePosixPath(name).as_posix() and not {"", ".", ".."} & {*name.split("/")} and "\0" not in name


def sealed(record: Mapping[str, Any]) -> bytes:
    """A line of JSON that holds its own sum."""
    return _line({**record, "sha256": hashlib.sha256(_line(record)).hexdigest()})


def unsealed(line: bytes) -> dict[str, Any]:
    """The sealed values. Raises ValueError if it is not what was written."""
    record: Any = json.loads(line)
    if not isinstance(record, dict) or "sha256" not in record:
        raise ValueError("it has no checksum")
    values: dict[str, Any] = record
    wanted = values.pop("sha256")
    if hashlib.sha256(_line(values)).hexdigest() != wanted:
        raise ValueError("it is not what was saved")
    return values


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def compare(directory: Path, sums: Mapping[str, str], remedy: str) -> Iterator[Damage]:
    """Files of a directory that are missing or have another sum."""
    for name, wanted in sums.items():
        path = directory / name
        if not is_inside(name) or not path.is_file():
            yield Damage(path, "is missing", remedy)
        elif hash_of(path).hexdigest() != wanted:
            yield Damage(path, "is not what was saved", remedy)


def write_sums(directory: Path, sums: Mapping[str, str]) -> None:
    """Write a version's sums. The directory of each role, which is made here, also has its own, without the others'."""
    for folder in {name.rpartition("/")[0] for name in sums} - {""}:
        below = {
            name.removeprefix(f"{folder}/"): value for name, value in sums.items() if name.startswith(f"{folder}/")
        }
        (directory / folder).mkdir()
        replace_file(directory / folder / SUMS, sealed(below))
    replace_file(directory / SUMS, sealed(sums))


def check_version(directory: Path) -> None:
    """Raise AdapterError if a version's files differ from their sums; one without sums passes: Motet did not make it."""
    for damage in version_damage(directory):
        raise AdapterError(str(damage))


def version_damage(directory: Path) -> Iterator[Damage]:
    """Files of a version that differ from what was saved."""
    path, remedy = directory / SUMS, f"take another version, or remove its {SUMS} if you changed it yourself"
    if not path.exists():
        return
    try:
        sums = unsealed(path.read_bytes())
    except ValueError as error:
        yield Damage(path, f"is damaged ({error})", remedy)
    else:
        yield from compare(directory, sums, remedy)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises DiskFull if the disk is full."""
    draft = path.with_name(f".tmp-{secrets.token_hex(4)}-{path.name}")  # another thread may write the same file
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def remove_old_drafts(directory: Path) -> None:
    """Delete what processes that were killed left half-written; a younger draft may still be written."""
    for draft in directory.glob(".tmp-*"):
        with contextlib.suppress(OSError):  # another process deletes it too
            if time.time() - draft.lstat().st_mtime > _DRAFT_SECONDS:
                shutil.rmtree(draft) if draft.is_dir() and not draft.is_symlink() else draft.unlink()


def link(there: Path, here: Path) -> None:
    """Hard-link a file under another name, or copy it if the file system has no links."""
    here.unlink(missing_ok=True)
    try:
        os.link(there, here)
    except OSError:
        replace_file(here, there.read_bytes())


def disk_error(error: OSError, path: Path | None) -> Exception:
    """Convert the error of a full disk to `DiskFull`, of a broken one to `RunError`; return other errors unchanged."""
    if error.errno in _BROKEN:
        return RunError(
            f"the disk of {error.filename or path} cannot be used ({error.strerror}). Nothing committed is lost; look at the "
            "system's log, mend the disk, and run the same command again"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk is full: {path} could not be written. Nothing committed is lost; free some space and run the same "
            "command again"
        )
    return error
