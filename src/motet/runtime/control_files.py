"""Commands to a job that another process leaves as a file in the job's directory: `pause`, `resume` or `cancel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from motet.runtime.job import Job
from motet.types import JobState

CONTROL = "control"
"""The file with the command; it is removed when it is read."""
_COMMANDS = ("pause", "resume", "cancel")


def read_commands(jobs: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """(job's name, command) for each file that lies there now; a command that the job's state has no use for is dropped."""
    for job in jobs:
        path = job.directory.path / CONTROL
        if not path.exists():
            continue
        command = path.read_text(errors="replace").strip()
        path.unlink()
        if command in _COMMANDS and (not job.state.final or job.state is JobState.FAILED):
            yield job.name, command
