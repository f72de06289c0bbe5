"""Directories of published versions: staged, renamed into place, named once, removed when nothing can ask for them.

A name is never used twice, so a server that keeps what it read under a name, or reads it again later, is right both times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from motet.errors import EngineError

_GRACE = 2
"""Directories that stay a while after their version was unloaded: a server may be reading one."""


class VersionFiles:
    """The versions of one run, in a directory of its own that servers see under the same path."""

    def __init__(self, directory: Path, keep: Callable[[str], bool] = lambda name: False) -> None:
        """What lies in the directory and is not to be kept goes: an attempt that was killed has left it."""
        self.directory = directory
        self._retired: deque[Path] = deque()
        self._owned: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                if not keep(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            raise EngineError(f"{directory} (rollout.directory) cannot be made: {error.strerror}") from error

    def path(self, name: str) -> Path:
        """Where a version lies; `name` is the one that servers know it by."""
        return self.directory / name

    def names(self) -> list[str]:
        """The versions that lie here and are not about to go."""
        going = {path.name for path in self._retired}
        return sorted(
            path.name for path in self.directory.iterdir() if path.name not in going and not path.name.startswith(".")
        )

    @contextlib.contextmanager
    def write_draft(self, name: str) -> Iterator[Path]:
        """An empty directory to write a version into; it gets its name when the block ends well.

        Raises:
            EngineError: the name was used before.
        """
        final = self.path(name)
        if final.exists():
            raise EngineError(f"{final} is there already; a version's name is never used twice")
        draft = Path(tempfile.mkdtemp(prefix=".staged-", dir=self.directory))
        try:
            yield draft
            draft.chmod(0o755)  # another user's server has to read it
            os.rename(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def retire(self, name: str) -> None:
        """Nothing can ask for a version any more: its directory goes after a few others have come to this point."""
        self._retired.append(self.path(name))
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
