"""The results of a run and its jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from motet.core.types import JobState
from motet.observe.names import ranks, task_of
from motet.observe.text import UNICODE, held_out_text
from motet.runtime.settings import OVER_SEEDS, Setting, settings

_SETTING = ("place", "setting", "seeds", "held-out")
_COLUMNS = ("job", "state", "steps", "reward", "held-out", "best version", "")


@dataclass(frozen=True)
class JobResult:
    """The result of one job."""

    name: str
    state: JobState
    adapter: Path
    """The last version, a PEFT directory."""
    best: Path
    """The best trained version by evaluation; the last if no trained version was evaluated."""
    rewards: tuple[float, ...]
    """Mean reward of each step."""
    evaluations: tuple[tuple[int, float], ...]
    """(version, held-out figure); higher is better."""
    message: str
    inexact: tuple[str, ...] = ()
    """Why the job's bytes may depend on more than the job; empty if they do not."""
    spent: bool = False
    """Whether the job is paused because its budget is spent."""
    setting: str = ""
    """Equal for jobs that differ only in their seed; empty if unknown."""

    @property
    def held_out(self) -> tuple[int, float] | None:
        """The number of the version `best`, and its held-out figure, NaN if it was not evaluated; None before a version."""
        number = self.best.name.removeprefix("v")
        return (int(number), dict(self.evaluations).get(int(number), math.nan)) if number.isdecimal() else None


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    directory: Path
    jobs: dict[str, JobResult]
    report: Path | None
    """The HTML report; None if the disk was full."""
    notes: tuple[str, ...] = ()
    """Notes about the base, rows that were left out, and sampling processes that did not take part."""

    @property
    def ok(self) -> bool:
        """Whether every job succeeded."""
        return all(job.state is JobState.SUCCEEDED for job in self.jobs.values())

    @property
    def settings(self) -> list[Setting]:
        """The jobs by setting: those that differ only in their seed are one, with a mean and its interval."""
        return settings((job.name, job.setting, job.evaluations) for job in self.jobs.values())

    def __repr__(self) -> str:
        """A line for each job, for Python's prompt; then one for each setting, if any has several seeds."""
        lines = []
        for title, rows in self._tables():
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
        return "\n".join([f"RunResult: {lines[0]}", *lines[1:]])

    def _repr_html_(self) -> str:
        """The same as tables, for a notebook."""
        return "".join(_html_table(title, *rows) for title, rows in self._tables())

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """The title and rows of each table, headings first."""
        groups, where = self.settings, f"{self.directory}, report: {self.report or 'not written'}"
        of_jobs = (where, [_COLUMNS, *(_cells(job) for job in self.jobs.values())])
        if all(len(group.jobs) < 2 for group in groups):
            return [of_jobs]
        places = ranks((group.name, group.held_out.mean if group.held_out else None) for group in groups)
        ordered = sorted(groups, key=lambda group: (task_of(group.name), places.get(group.name, len(groups))))
        rows = [(f"{places[group.name]}." if group.name in places else "", *_setting_cells(group)) for group in ordered]
        return [of_jobs, (f"Settings: {OVER_SEEDS}", [_SETTING, *rows])]


def _html_table(title: str, columns: tuple[str, ...], *rows: tuple[str, ...]) -> str:
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _setting_cells(setting: Setting) -> tuple[str, ...]:
    """A setting's row under the headings `_SETTING`, without its place."""
    if setting.before is None or setting.held_out is None:
        return setting.name, f"0 of {len(setting.jobs)}", ""
    change = _change([setting.before.mean, setting.held_out.mean])
    seeds, n = setting.held_out.n, len(setting.jobs)
    half = "" if math.isnan(setting.held_out.half) else f" ± {setting.held_out.half:.2f}"
    return setting.name, str(n) if seeds == n else f"{seeds} of {n}", change + half


def _cells(job: JobResult) -> tuple[str, ...]:
    """A job's row under the headings `_COLUMNS`."""
    held_out = held_out_text(job.evaluations, job.held_out, UNICODE, gap=" ")
    place = str(job.best) if job.best.is_dir() else ""
    return job.name, job.state.value, str(len(job.rewards)), _change(job.rewards), held_out, place, job.message


def _change(values: Sequence[float]) -> str:
    """The first and the last value."""
    known = [f"{value:.2f}" for value in values if math.isfinite(value)]
    return " → ".join([known[0], known[-1]] if len(known) > 1 else known)
