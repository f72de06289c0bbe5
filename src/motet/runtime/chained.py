"""Jobs that go on with another job's adapter: when they may begin, and what becomes of them where it is never there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from motet.runtime.job import Job
from motet.types import JobState


def may_begin(job: Job) -> bool:
    """Whether what it goes on with is there; a job that has begun needs it no more."""
    return job.before is None or job.before.state is JobState.SUCCEEDED or bool(job.directory.steps())


def fail_chained(jobs: Iterable[Job], move: Callable[[Job, JobState, str], None]) -> None:
    """Fail jobs that wait for one that ended without success."""
    for job in jobs:
        before = job.before
        if before is None or job.state is not JobState.QUEUED or may_begin(job):
            continue
        spent = before.progress.spent
        if spent or before.state in (JobState.FAILED, JobState.CANCELLED):
            state = "has spent its budget" if spent else f"is {before.state}"
            move(job, JobState.FAILED, f"starts from job {before.name}, which {state}; resume both")
