"""`motet verify`: does a run directory hold what was saved, and all of it?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from motet.errors import RunError
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.manifest import MANIFEST
from motet.runtime.opening import damages
from motet.runtime.ownership import removed_jobs

_OF_A_JOB = ("state", "job.yaml", MANIFEST)


def verify(directory: Path) -> int:
    """Check every commit, version, log and rollout of a run, or of one job; returns 0 where all is whole, 1 otherwise.

    Raises:
        RunError: there is no run in the directory.
    """
    console = Console(emoji=False)
    jobs = [directory] if _is_job(directory) else sorted(path for path in directory.glob("[!.]*") if _is_job(path))
    removed = removed_jobs(directory)
    if not jobs and not removed:
        raise RunError(f"{directory} holds no job's directory; give runs/<run>, or runs/<run>/<job>")
    lines = [
        f"{path} is missing: put it back, or train the job from the start with `motet run`; if you removed it for good, "
        f"remove {mark} too"
        for path, mark in removed.items()
    ]
    for path in jobs:
        job = JobDirectory(path)
        steps = job.steps()
        if wrong := [str(damage) for damage in damages(job)]:
            lines += wrong
            continue
        early = "" if job.manifest.path.exists() or not steps else _NO_MANIFEST
        console.print(
            f"{path.name}: {len(steps)} commits, {len(job.versions())} versions, all as they were saved{early}",
            soft_wrap=True,
        )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return 1 if lines else 0


_NO_MANIFEST = "; an earlier version of Motet wrote them, so removed files cannot be noticed"


def _is_job(path: Path) -> bool:
    return any((path / name).exists() for name in _OF_A_JOB)
