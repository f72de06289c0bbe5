"""Who writes to a job's directory: whoever took it up last, wherever that is.

A host that was cut off may train on while another one has its jobs. It finds the other's mark before it writes the next line.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from motet.errors import RunError

_BEFORE = ".owner-"


def removed_jobs(run: Path) -> dict[Path, Path]:
    """Directories of jobs that began in a run and are not there any more, and their marks."""
    jobs = {run / path.name.removeprefix(_BEFORE): path for path in sorted(run.glob(f"{_BEFORE}*"))}
    return {path: mark for path, mark in jobs.items() if not path.exists()}


class Ownership:
    """The mark of one directory, and whether it is this process's. It lies beside it: what a job leaves has no random bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory.with_name(f"{_BEFORE}{directory.name}")
        self._mark: bytes | None = None

    def take(self) -> None:
        """From now on whoever had the directory before writes nothing more."""
        mark = secrets.token_hex(8).encode()
        self._file.write_bytes(mark)
        self._mark = mark

    def forget(self) -> None:
        """The directory is gone."""
        self._file.unlink(missing_ok=True)

    def check(self) -> None:
        """Make sure that nobody has taken it since; who never took it is a reader, or writes what needs no owner.

        Raises:
            RunError: somebody has.
        """
        if self._mark is not None and self._file.read_bytes() != self._mark:
            raise RunError(
                f"{self._directory} was taken up by another process, which goes on from the last commit; this one, which was "
                "cut off, writes nothing more"
            )
