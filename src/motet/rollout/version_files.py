"""Directories of published versions: staged, renamed into place, and deleted when no request can need them.

A name is never reused, so a server may cache a version by name, or read it again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from motet.core.errors import EngineError

_GRACE = 2
"""Number of unloaded versions whose directories are kept, because a server may still read them."""


class VersionFiles:
    """The versions of one run, in a directory that servers see under the same path."""

    def __init__(self, directory: Path) -> None:
        """What a killed attempt has left in the directory is deleted."""
        self.directory = directory
        self._retired: deque[Path] = deque()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise EngineError(f"{directory} (rollout.directory) cannot be created: {error.strerror}") from error

    def path(self, name: str) -> Path:
        """The directory of a version, by its served name."""
        return self.directory / name

    @contextlib.contextmanager
    def write_draft(self, name: str) -> Iterator[Path]:
        """Yield an empty directory to write a version into; it is renamed if the block succeeds.

        Raises:
            EngineError: the name was used before.
        """
        final = self.path(name)
        if final.exists():
            raise EngineError(f"{final} exists already; a version's name is never used twice")
        draft = Path(tempfile.mkdtemp(prefix=".staged-", dir=self.directory))
        try:
            yield draft
            draft.chmod(0o755)  # a server that another user runs must read it
            os.rename(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def retire(self, name: str) -> None:
        """Schedule a version's directory for deletion; it is deleted after the next few retirements."""
        self._retired.append(self.path(name))
        while len(self._retired) > _GRACE:
            shutil.rmtree(self._retired.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Delete retired directories, and then the main directory if it is empty."""
        for path in self._retired:
            shutil.rmtree(path, ignore_errors=True)
        self._retired.clear()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
