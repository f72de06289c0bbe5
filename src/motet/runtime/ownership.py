"""Who writes to a job's directory: whoever took it up last, wherever that is.

A host that was cut off may train on while another one has its jobs. It finds the other's mark before it writes the next line.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from motet.errors import RunError

_MARK = ".owner"


class Ownership:
    """The mark in one directory, and whether it is this process's."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._file = directory, directory / _MARK
        self._mark: bytes | None = None

    def take(self) -> None:
        """From now on whoever had the directory before writes nothing more."""
        mark = secrets.token_hex(8).encode()
        draft = self._file.with_name(f".tmp-{mark.decode()}")
        draft.write_bytes(mark)
        os.replace(draft, self._file)
        self._mark = mark

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
