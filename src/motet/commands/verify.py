"""`motet verify`: does a run directory hold what was saved, and all of it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from motet.checksums import Damage
from motet.config.candidates import known_jobs
from motet.errors import RunError
from motet.jobfile import load_jobs
from motet.preparing import Sources
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import of_config
from motet.runtime.manifest import MANIFEST
from motet.runtime.opening import damages
from motet.runtime.ownership import removed_jobs
from motet.runtime.receipts import RECEIPT, Materials, read_receipt, receipt_damages

_OF_A_JOB = ("state", "job.yaml", MANIFEST)


def verify(directory: Path, jobs_file: Path | None = None) -> int:
    """Check every commit, version, receipt, log and rollout of a run, or of one job; returns 0 where all is whole, else 1.

    With a job file, also whether base, data, code and configuration are what the receipts name.

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
        if wrong := [str(damage) for damage in damages(job) or _of_receipts(job)]:
            lines += wrong
            continue
        early = "" if job.manifest.path.exists() or not steps else _NO_MANIFEST
        n_receipts = len(list(job.receipts.glob("v*.json")))
        counted = (
            f"{len(steps)} commits, {len(job.versions())} versions{f', {n_receipts} receipts' if n_receipts else ''}"
        )
        console.print(f"{path.name}: {counted}, all as they were saved{early}", soft_wrap=True)
    if jobs_file is not None:
        lines += _not_the_same(jobs_file, jobs)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return 1 if lines else 0


def _of_receipts(job: JobDirectory) -> Iterator[Damage]:
    newest = job.newest() if job.steps() else None
    if newest is not None and RECEIPT in newest.sums:
        yield from receipt_damages(job.receipts, newest.step, newest.sums[RECEIPT])


_NO_MANIFEST = "; an earlier version of Motet wrote them, so removed files cannot be noticed"


def _not_the_same(jobs_file: Path, directories: Sequence[Path]) -> Iterator[str]:
    """What the newest receipts name that is not so here."""
    config, sources = load_jobs(jobs_file), Sources()
    known = {job.name: job for job in known_jobs(config.jobs)}
    for path in directories:
        newest = max((int(one.stem[1:]) for one in (path / "receipts").glob("v*.json")), default=None)
        if newest is None or path.name not in known:
            yield f"{path}: {'it has no receipt' if newest is None else f'{jobs_file} has no job of this name'}"
            continue
        receipt, job = read_receipt(path / "receipts" / f"v{newest}.json"), known[path.name]
        now = Materials(of_config(job), config.base, sources.split(job.data))
        # which rows stay only the tokenizer knows
        skipped = "data/" if job.data.max_prompt_tokens is not None else None
        for line in now.changes(receipt, without=skipped):
            yield f"{path.name}: {line}"
        if skipped:
            yield f"{path.name}: its rows were not compared, as data.max_prompt_tokens needs the base; `motet replay` does"


def _is_job(path: Path) -> bool:
    return any((path / name).exists() for name in _OF_A_JOB)
