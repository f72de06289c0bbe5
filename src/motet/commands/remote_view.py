"""Jobs, events and keys of a service as a person sees them in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import datetime

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from motet.runtime.progress import JobProgress
from motet.service.schemas import ApiKey, Job, JobEvent, Version
from motet.types import JobState
from motet.view import LogView, glyphs_of
from motet.view.text import STATE_STYLES, count_text, duration_text, evaluation_text, reward_text


def take_in(progress: JobProgress, event: JobEvent) -> None:
    """Bring what is known of a job up to an event."""
    data = event.data
    if event.kind == "state":
        progress.state, progress.message = JobState(data["state"]), str(data.get("message") or "")
        return
    if "loss" in data:  # the last line has an evaluation only
        progress.step = int(data["step"]) + 1
        reward = data.get("reward")
        progress.rewards.append(math.nan if reward is None else float(reward))
    if evaluation := data.get("eval"):
        reward = evaluation.get("reward")
        progress.evaluations.append((int(data["version"]), math.nan if reward is None else float(reward)))


def progress_of(job: Job, events: Sequence[JobEvent]) -> JobProgress:
    """A job as its events tell it."""
    progress = JobProgress(job.name, job.steps)
    for event in events:
        take_in(progress, event)
    return progress


class JobLines:
    """The lines that `motet run` writes to a log, made from events."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self._view = LogView(console)
        self._progress = {job.id: JobProgress(job.name, job.steps) for job in jobs}

    def see(self, job: Job, event: JobEvent) -> None:
        """Write what is new."""
        take_in(self._progress[job.id], event)
        self._view.update(list(self._progress.values()))


def table(*headings: str, folds: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table; `folds` are the columns that take several lines where there is no room."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        justify: JustifyMethod = "right" if heading in right else "left"
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=heading not in folds)
    return made


def job_table(jobs: Sequence[Job], console: Console) -> Table:
    """Jobs, a line each, for this console."""
    found = table("job", "state", "steps", "reward", "age", folds=("job",), right=("steps", "reward", "age"))
    for job in jobs:
        found.add_row(
            Text(glyphs_of(console).plain(job.name), style="bold"),
            Text(job.state, style=STATE_STYLES[JobState(job.state)]),
            f"{job.step}/{job.steps}",
            "" if job.reward is None else reward_text(job.reward),
            duration_text(time.time() - job.created),
        )
    return found


def details(job: Job, versions: Sequence[Version], events: Sequence[JobEvent], console: Console) -> Text:
    """Everything about one job, a line for each thing."""
    glyphs, told = glyphs_of(console), progress_of(job, events)
    state = f"{job.state}: {job.message}" if job.message else job.state
    spent = duration_text((job.ended or time.time()) - job.created)
    lines = {
        "id": job.id,
        "state": state,
        "steps": f"{job.step}/{job.steps}",
        "now": _now(job),
        "reward": glyphs.to.join(reward_text(value) for value in (told.rewards[:1] + told.rewards[1:][-1:])),
        "held-out": evaluation_text(told.evaluations, glyphs, gap=""),
        "data": str(job.spec["data"]["source"]),
        "rewards": ", ".join(str(reward["name"]) for reward in job.spec["rewards"]),
        "budget": f"{job.spec['budget']:,} tokens" if job.spec.get("budget") else "",
        "submitted": f"{_day(job.created, '%Y-%m-%d %H:%M')}, {'took' if job.ended else 'since'} {spent}",
        "versions": ", ".join(_version(version) for version in versions),
    }
    found = Text(glyphs.plain(job.name), style="bold")
    for name, value in lines.items():
        if value:
            style = STATE_STYLES[JobState(job.state)] if name == "state" else ""
            found.append(f"\n{name:<10}", style="not bold bright_black")
            found.append(glyphs.plain(value), style=f"not bold {style}" if style != "bold red" else style)
    return found


def _now(job: Job) -> str:
    if job.progress is None or job.state != JobState.RUNNING:
        return ""
    phase, rate = str(job.progress.get("phase") or "starting"), float(job.progress.get("tokens_per_second") or 0)
    left = duration_text(job.progress.get("seconds_left"))
    return ", ".join(filter(None, [phase, f"{count_text(rate)} tok/s" if rate else "", f"{left} left" if left else ""]))


def _version(version: Version) -> str:
    marks = [mark for mark, holds in (("best", version.best), ("latest", version.latest)) if holds]
    return version.model + (f" ({', '.join(marks)})" if marks else "")


def key_table(keys: Sequence[ApiKey], now: float) -> Table:
    """Keys, a line each."""
    found = table("id", "tenant", "name", "role", "made", "state", folds=("tenant", "name"))
    for key in keys:
        state = "in use"
        if key.revoked is not None:
            state = "revoked"
        elif key.expires is not None:
            state = "expired" if key.expires <= now else f"until {_day(key.expires)}"
        found.add_row(*map(Text, (key.id, key.tenant, key.name, key.role, _day(key.created), state)))
    return found


def _day(seconds: float, form: str = "%Y-%m-%d") -> str:
    return datetime.fromtimestamp(seconds).strftime(form)
