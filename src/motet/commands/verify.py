"""`motet verify`: is what lies in a run directory what was saved?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from motet.errors import RunError
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.opening import damages


def verify(directory: Path) -> int:
    """Check every commit, version, log and rollout of a run, or of one job; returns 0 where all is whole, 1 otherwise.

    Raises:
        RunError: there is no run in the directory.
    """
    console = Console(emoji=False)
    jobs = [path.parent for path in sorted(directory.glob("*/state"))] or [
        path.parent for path in directory.glob("state")
    ]
    if not jobs:
        raise RunError(f"{directory} holds no job's directory; give runs/<run>, or runs/<run>/<job>")
    damaged = 0
    for path in jobs:
        job = JobDirectory(path)
        wrong = list(damages(job, job.steps()))
        damaged += len(wrong)
        for damage in wrong:
            console.print(str(damage), soft_wrap=True, highlight=False)
        if not wrong:
            console.print(
                f"{path.name}: {len(job.steps())} commits, {len(job.versions())} versions, all as they were saved"
            )
    return 1 if damaged else 0
