"""The owner of a job's directory: the process that opened it last, on any host.

A host that lost contact may continue to train while another one has taken over its jobs. Before its next write, it
finds the other's mark and stops.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from motet.core.errors import RunError

_BEFORE = ".owner-"


def removed_jobs(run: Path) -> dict[Path, Path]:
    """Deleted jobs of a run: their former directories, and their marks."""
    jobs = {run / path.name.removeprefix(_BEFORE): path for path in sorted(run.glob(f"{_BEFORE}*"))}
    return {path: mark for path, mark in jobs.items() if not path.exists()}


class Ownership:
    """The ownership mark of one directory, stored beside it so that the directory itself has no random bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory.with_name(f"{_BEFORE}{directory.name}")
        self._mark: bytes | None = None

    def take(self) -> None:
        """Become the owner; the previous owner can write nothing more."""
        mark = secrets.token_hex(8).encode()
        self._file.write_bytes(mark)
        self._mark = mark

    def draft(self, final: Path) -> Path:
        """Where to write what will be renamed to `final`; a process that lost ownership uses another name."""
        return final.with_name(f".tmp-{(self._mark or b'').decode()}-{final.name}")

    def forget(self) -> None:
        """Delete the mark of a deleted directory."""
        self._file.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that no other process has become the owner. Does nothing if this process never took ownership.

        Raises:
            RunError: another process is the owner.
        """
        if self._mark is not None and self._file.read_bytes() != self._mark:
            raise RunError(
                f"{self._directory} was taken over by another process, which continues from the last commit; this process was "
                "disconnected and writes nothing more"
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Check before a block that writes, and if it fails: a process that takes over removes what is half-written."""
        self.check()
        try:
            yield
        except OSError:
            self.check()
            raise
