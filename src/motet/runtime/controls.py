"""Words for a job that another process leaves in the job's directory: `pause`, `resume` or `cancel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from motet.runtime.job import Job
from motet.types import JobState

CONTROL = "control"
"""The file with the word; it is removed when it is read."""
_WORDS = ("pause", "resume", "cancel")


def words(jobs: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """The words that lie there now, each with its job's name; one that the job's state has no use for is dropped."""
    for job in jobs:
        path = job.directory.path / CONTROL
        if not path.exists():
            continue
        word = path.read_text(errors="replace").strip()
        path.unlink()
        if word in _WORDS and (not job.state.final or job.state is JobState.FAILED):
            yield job.name, word
