"""Candidates of a search (`examples/search.py`) or of a race, which earlier releases ran: jobs that no job file lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.config import Config, JobConfig
from motet.core.errors import RunError
from motet.core.plain_yaml import mapping_in
from motet.runtime.checkpoint import JobDirectory

_VARIED = ("adapter", "algorithm", "optimizer", "sampling", "eval")
_PLACES = ("init", "reference", "teacher", "type")
"""Fields that job.yaml has without their directories; all candidates shared those of the job file."""


def known_jobs(jobs: Sequence[JobConfig], run: Path) -> dict[str, JobConfig]:
    """Return the jobs of a file by name, and the candidates that were made of them in this run.

    Raises:
        RunError: the job.yaml of a candidate is damaged.
    """
    known = {job.name: job for job in jobs}
    for path in sorted(run.glob("*-c=*/job.yaml")):
        name = path.parent.name
        job = known.get(name.rpartition("-c=")[0])
        if job is not None and name not in known:
            known[name] = _candidate(job, name, JobDirectory(path.parent))
    return known


def _candidate(job: JobConfig, name: str, directory: JobDirectory) -> JobConfig:
    """Return a job with the settings of its candidate."""
    try:
        stored = mapping_in(directory.path / "job.yaml")["job"]
        sections = {section: _stored(getattr(job, section), stored[section]) for section in _VARIED}
        changed = {"name": name, "seed": int(stored["seed"]), **sections}
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise RunError(f"{directory.path / 'job.yaml'} is damaged ({error}); put it back") from error
    return job.model_copy(update=changed)


def _stored(section: Config, stored: Mapping[str, Any]) -> Config:
    """Return a section with its stored values."""
    kept = {name: value for name, value in stored.items() if name in type(section).model_fields and name not in _PLACES}
    confirm = {"confirm": True} if "confirm" in type(section).model_fields else {}  # of all candidates
    return type(section).model_validate({**section.model_dump(), **kept, **confirm})
