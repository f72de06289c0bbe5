"""Directories of published versions: staged, renamed into place, named once, removed when nothing can ask for them.

A name is never used twice, so a server that keeps what it read under a name, or reads it again later, is right both times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from motet.errors import EngineError
from motet.types import AdapterRef

_GRACE = 2
"""Directories that stay a while after their version was unloaded: a server may be reading one."""


class VersionFiles:
    """The versions of one run, in a directory of its own that servers see under the same path."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._retired: deque[Path] = deque()
        self._owned: list[Path] = []
        try:
            shutil.rmtree(directory, ignore_errors=True)  # what an attempt that was killed has left
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"{directory} (rollout.directory) cannot be made: {error.strerror}") from error

    def path(self, ref: AdapterRef) -> Path:
        """Where a version lies."""
        return self.directory / ref.served_name

    @contextlib.contextmanager
    def write_draft(self, ref: AdapterRef) -> Iterator[Path]:
        """An empty directory to write a version into; it gets its name when the block ends well.

        Raises:
            EngineError: the name was used before.
        """
        final = self.path(ref)
        if final.exists():
            raise EngineError(f"{final} is there already; a version's name is never used twice")
        draft = Path(tempfile.mkdtemp(prefix=".staged-", dir=self.directory))
        try:
            yield draft
            draft.chmod(0o755)  # another user's server has to read it
            os.rename(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def retire(self, ref: AdapterRef) -> None:
        """Nothing can ask for a version any more: its directory goes after a few others have come to this point."""
        self._retired.append(self.path(ref))
        while len(self._retired) > _GRACE:
            shutil.rmtree(self._retired.popleft(), ignore_errors=True)

    def own(self, path: Path) -> None:
        """Remove this directory too in the end."""
        self._owned.append(path)

    def close(self) -> None:
        """Remove what waits to be removed, and the directory where that leaves it empty (versions may be kept)."""
        for path in (*self._retired, *self._owned):
            shutil.rmtree(path, ignore_errors=True)
        self._retired.clear()
        self._owned.clear()
        with contextlib.suppress(OSError):
            self.directory.rmdir()
