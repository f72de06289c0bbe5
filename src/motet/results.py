"""What became of a run and its jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from motet.types import JobState

_COLUMNS = ("job", "state", "steps", "reward", "held-out", "best version", "")


@dataclass(frozen=True)
class JobResult:
    """What became of one job."""

    name: str
    state: JobState
    adapter: Path
    """The last version, a PEFT directory."""
    best: Path
    """The best version by evaluation; the last where nothing was evaluated."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    evaluations: tuple[tuple[int, float], ...]
    """(version, held-out reward)."""
    message: str
    inexact: tuple[str, ...] = ()
    """Why the job's bytes may depend on more than itself; empty when they do not."""
    spent: bool = False
    """Whether the job is paused because its budget is spent."""


@dataclass(frozen=True)
class RunResult:
    """What became of a run."""

    directory: Path
    jobs: dict[str, JobResult]
    report: Path | None
    """The HTML page; None where the disk was too full for it."""
    notes: tuple[str, ...] = ()
    """What a person should know of the base, of rows that were left out, and of sampling processes that did not take part."""

    @property
    def ok(self) -> bool:
        """Whether every job succeeded."""
        return all(job.state is JobState.SUCCEEDED for job in self.jobs.values())

    def __repr__(self) -> str:
        """A line for each job, as a prompt of Python shows it."""
        rows = [_COLUMNS, *(_cells(job) for job in self.jobs.values())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"RunResult: {self._where}", *lines])

    def _repr_html_(self) -> str:
        """The same as a table, as a notebook shows it."""
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(job))}</tr>" for job in self.jobs.values()
        )
        caption = escape(self._where)
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    @property
    def _where(self) -> str:
        return f"{self.directory}, report: {self.report or 'not written'}"


def _cells(job: JobResult) -> tuple[str, ...]:
    """A job's row, below `_COLUMNS`."""
    held_out = [value for _, value in job.evaluations]
    place = str(job.best) if job.best.is_dir() else ""
    return job.name, job.state.value, str(len(job.rewards)), _change(job.rewards), _change(held_out), place, job.message


def _change(values: Sequence[float]) -> str:
    """The first value and the last."""
    known = [f"{value:.2f}" for value in values if math.isfinite(value)]
    return " → ".join([known[0], known[-1]] if len(known) > 1 else known)
