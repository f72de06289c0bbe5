"""The directory of a run: one process at a time, an identity that every attempt shares, and commands from other processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from motet.errors import RunError
from motet.runtime.checkpoint import JobDirectory, replace_file
from motet.runtime.job import Job
from motet.types import JobState

CONTROL = "control"
"""The file in a job's directory with a command: `pause`, `resume` or `cancel`; it is removed when it is read."""
_COMMANDS = ("pause", "resume", "cancel")


class RunDirectory:
    """Locked while open. `run_id` stays, `attempt` counts openings: together they keep engine-side names unique."""

    def __init__(self, path: Path, part: str = "") -> None:
        """Open it for this process alone, or, with `part`, beside others that are other parts of one run."""
        self.path, self.part = path, part
        self._locks = contextlib.ExitStack()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._take_lock(".lock", shared=bool(part))
            if part:
                self._take_lock(f".lock.{part}")
        except OSError as error:
            raise RunError(
                f"{path} cannot be a run directory: {error.strerror}; give another one with --run"
            ) from error
        except RunError:
            self._locks.close()
            raise
        self.run_id, self.attempt = self._identify()

    def job(self, name: str) -> JobDirectory:
        """The directory of one job."""
        return JobDirectory(self.path / name)

    def close(self) -> None:
        """Release the locks."""
        self._locks.close()

    def _take_lock(self, name: str, *, shared: bool = False) -> None:
        file = self._locks.enter_context((self.path / name).open("a+"))
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            raise RunError(
                f"{self.path} is in use by another process{f' (pid {owner})' if owner else ''}; wait for it, stop it, or give "
                "another directory with --run"
            ) from None
        file.truncate(0)
        file.write("" if shared else str(os.getpid()))
        file.flush()

    def _identify(self) -> tuple[str, int]:
        path = self.path / "run.json"
        with (self.path / ".lock.count").open("a") as counting:  # parts of a run open it at the same time
            fcntl.flock(counting, fcntl.LOCK_EX)
            return self._count(path)

    def _count(self, path: Path) -> tuple[str, int]:
        try:
            values = json.loads(path.read_text())
            run_id, attempt = str(values["run_id"]), int(values["attempt"]) + 1
        except (OSError, ValueError, TypeError, KeyError):
            run_id, attempt = secrets.token_hex(4), 0
        replace_file(path, json.dumps({"attempt": attempt, "run_id": run_id}, sort_keys=True).encode())
        return run_id, attempt


def read_commands(jobs: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """(job's name, command) for each file that lies there now; a command that the job's state has no use for is dropped."""
    for job in jobs:
        path = job.directory.path / CONTROL
        try:
            command = path.read_text(errors="replace").strip()
            path.unlink()
        except OSError:  # mostly it is not there; what another user wrote may be no business of this one's
            continue
        if command in _COMMANDS and (not job.state.final or job.state is JobState.FAILED):
            yield job.name, command
