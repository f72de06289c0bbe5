"""The directory of a run: a lock, an identity shared by all attempts, and commands from other processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from motet.core.checksums import remove_old_drafts, replace_file
from motet.core.errors import RunError
from motet.core.types import JobState, Wanted
from motet.process import importable
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import Job

CONTROL = "control"
"""File in a job's directory with the command `pause`, `resume` or `cancel`; deleted once read."""
_COMMANDS = {wanted.word: wanted for wanted in Wanted}
_AT_ONCE = 40
"""Jobs that are looked at for commands at a time, on a disk that may be slow."""


class RunDirectory:
    """A run directory, locked while open. Its `run_id`, and `attempt`, which counts openings, are in engine-side names."""

    def __init__(self, path: Path, part: str = "") -> None:
        """Lock it for this process alone or, with `part`, beside processes that have other parts of the run."""
        self.path, self.part = path, part
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        with contextlib.ExitStack() as locks:
            try:
                path.mkdir(parents=True, exist_ok=True)
                locks.enter_context(self._locked(".lock", shared=bool(part)))
                if part:
                    locks.enter_context(self._locked(f".lock.{part}"))
                self.run_id, self.attempt = self._identify()
                remove_old_drafts(path)
            except OSError as error:
                raise RunError(
                    f"{path} cannot be a run directory: {error.strerror}; give another one with --run"
                ) from error
            self._locks = locks.pop_all()

    def job(self, name: str) -> JobDirectory:
        """The directory of one job."""
        return JobDirectory(self.path / name)

    def close(self) -> None:
        """Release the locks."""
        self._locks.close()

    def discard(self) -> None:
        """Close it, and remove the directories that opening created, unless something else was written."""
        own = {".lock", ".lock.count", "run.json", *([f".lock.{self.part}"] if self.part else [])}
        with contextlib.suppress(OSError):
            if self._made and {path.name for path in self.path.iterdir()} <= own:
                for name in own:
                    (self.path / name).unlink()
                for folder in self._made:
                    folder.rmdir()
        self.close()

    @contextlib.contextmanager
    def _locked(self, name: str, *, shared: bool = False) -> Iterator[None]:
        with (self.path / name).open("a+") as file:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip()
                raise RunError(
                    f"{self.path} is in use by another process{f' (pid {owner})' if owner else ''}; wait for it, stop it, or "
                    "give another directory with --run"
                ) from None
            file.truncate(0)
            file.write("" if shared else str(os.getpid()))
            file.flush()
            yield

    def _identify(self) -> tuple[str, int]:
        path = self.path / "run.json"
        with (self.path / ".lock.count").open("a") as counting:  # parts of a run open it at the same time
            fcntl.flock(counting, fcntl.LOCK_EX)
            try:
                values = json.loads(path.read_text("utf-8"))
                run_id, attempt = str(values["run_id"]), int(values["attempt"]) + 1
            except (OSError, ValueError, TypeError, KeyError):
                run_id, attempt = secrets.token_hex(4), 0
            replace_file(path, json.dumps({"attempt": attempt, "run_id": run_id}, sort_keys=True).encode())
            return run_id, attempt


@contextlib.contextmanager
def opened(path: Path, part: str = "") -> Iterator[RunDirectory]:
    """Open a run directory for the block; if the block raises before writing anything, remove what opening created."""
    directory = RunDirectory(path, part)
    try:
        with importable.withheld(path):
            yield directory
    except BaseException:
        directory.discard()
        raise
    finally:
        directory.close()


def read_commands(jobs: Sequence[Job], turn: int = 0) -> Iterator[tuple[str, Wanted]]:
    """Yield (job name, what it shall do) for each command file; commands that the job's state does not allow are dropped.

    Of many jobs it looks at a part, at another one in each `turn`.
    A file that cannot be read or removed, such as another user's, adds a note to the job.
    """
    rounds = max(1, -(-len(jobs) // _AT_ONCE))
    for job in jobs[turn % rounds :: rounds]:
        path, obeys = job.directory.path / CONTROL, not job.state.final or job.state is JobState.FAILED
        try:
            command = path.read_text("utf-8", "replace").strip()
            path.unlink()
        except FileNotFoundError:  # mostly
            continue
        except OSError as error:
            if obeys:
                job.note(
                    f"a command in {path} is ignored: {error.strerror}; remove the file, and send the command as the "
                    "user who started the run"
                )
            continue
        if command in _COMMANDS and obeys:
            yield job.name, _COMMANDS[command]
