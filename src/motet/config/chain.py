"""Jobs of one file that start from each other's adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet.config.job import JobConfig


@dataclass(frozen=True)
class ChainStart:
    """A version of another job's adapter that a job starts from."""

    job: str
    version: str
    """`best`, `latest`, or its number."""

    @classmethod
    def of(cls, init: str | None, jobs: Sequence[JobConfig]) -> ChainStart | None:
        """The version of one of these jobs that `adapter.init` names: `job`, `job@best`, `job@latest`, `job@12`."""
        if init is None:
            return None
        names = {job.name for job in jobs}
        if init in names:
            return cls(init, "best")
        name, _, version = init.rpartition("@")
        known = name in names and (version in ("best", "latest") or version.isdecimal())
        return cls(name, version) if known else None


def chains(jobs: Sequence[JobConfig]) -> Mapping[str, ChainStart]:
    """Jobs that start from an earlier one in the file, by name."""
    starts = {job.name: ChainStart.of(job.adapter.init, jobs[:place]) for place, job in enumerate(jobs)}
    return {name: start for name, start in starts.items() if start is not None}


def check_chains(jobs: Sequence[JobConfig]) -> None:
    """Raise ValueError for a job that starts from another's adapter but comes before it, or has another shape."""
    by_name, starts = {job.name: job for job in jobs}, chains(jobs)
    for job in jobs:
        start = starts.get(job.name)
        if start is None:
            if (below := ChainStart.of(job.adapter.init, jobs)) is not None:
                raise ValueError(
                    f"job {job.name}: adapter.init names {below.job!r}, which must come before it in the file"
                )
            continue
        if by_name[start.job].team:
            raise ValueError(
                f"job {job.name}: adapter.init names {start.job!r}, which is a team: give the directory of one role, "
                f"such as runs/RUN/{start.job}/versions/v5/{next(iter(by_name[start.job].team))}, in another run"
            )
        for field in ("rank", "alpha", "target_modules"):
            own, wanted = (getattr(one.adapter, field) for one in (job, by_name[start.job]))
            if own != wanted:
                raise ValueError(
                    f"job {job.name}: adapter.{field} is {own}, but {start.job!r}, from which it starts, has {wanted}; set "
                    "it to the same, because an adapter keeps its shape"
                )
