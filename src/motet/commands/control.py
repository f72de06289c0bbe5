"""`motet pause`, `resume` and `cancel`: written as a word to a job's directory, where the process that runs it reads it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from motet.core.checksums import replace_file
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.rundir import CONTROL


def send(directory: Path, job: str, word: str) -> str:
    """Ask the running process to pause, resume or cancel a job.

    Raises:
        RunError: there is no such job, no process runs it, or its state does not allow the command.
    """
    if not directory.is_dir():
        raise RunError(
            f"there is no run directory {directory}; `motet run jobs.yaml` makes runs/jobs, unless --run is given"
        )
    place = directory / job
    if not (place / "job.yaml").is_file():
        jobs = sorted(item.parent.name for item in directory.glob("*/job.yaml"))
        raise RunError(f"{directory} has no job {job!r}; there are: {', '.join(jobs) or 'none'}")
    if not _running(directory):
        raise RunError(f"no process runs {directory}; start it with `motet run`, which resumes it")
    state = JobDirectory(place).read_status().get("state")
    if state in (JobState.SUCCEEDED, JobState.CANCELLED):
        raise RunError(f"job {job!r} is {state} and stays so; give it another name or run directory to train it again")
    replace_file(place / CONTROL, word.encode())
    return f"asked {job} to {word}"


def steer(url: str | None, key: str | None, job: str, word: str) -> str:
    """Pause, resume or cancel a job of a service.

    Raises:
        ConfigError: this is not the name of a job.
    """
    from motet.client import Client

    if "/" in job or (Path(job) / "run.json").is_file():
        raise ConfigError(f"{job} is a run directory; name a job of it too: motet {word} {job} JOB")
    with Client(url, key) as client:
        getattr(client, word)(job)
    return f"asked {job} to {word}"


def _running(directory: Path) -> bool:
    with (directory / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
