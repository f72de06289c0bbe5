"""Jobs as tables, while they run and at the end. A narrow console leaves out some columns."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from motet.core.types import JobState
from motet.observe.names import ranks, short_value, take_apart
from motet.observe.text import (
    RECENT,
    STATE_STYLES,
    UNICODE,
    Glyphs,
    count_text,
    duration_text,
    evaluation_text,
    finite,
    held_out_text,
    phase_text,
    recent_reward,
    reward_text,
    sparkline,
    trend,
)
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.evaluations import CHANCE
from motet.runtime.held_out import named_best, newest_commit, recommended, rule_text
from motet.runtime.progress import JobProgress
from motet.runtime.settings import OVER_SEEDS, Setting, settings

Row = dict[str, Text]
"""Content of each column."""
_LONGEST_NAME, _GOOD_NAME, _LEAST_NAME = 24, 12, 8
_LONGEST_BAR, _BAR = 24, 6
_SPARK = 6
_HEADINGS = {"mark": "", "bar": "", "spark": "", "short": "doing"}
_RIGHT = ("steps", "reward", "tokens", "left", "gain", "time")
_NO_ROOM = ("tokens", "doing", "spark", "bar", "left", "short", "held-out")
"""The columns to leave out of a running job's line, in this order; `short` replaces `doing`."""
_NO_ROOM_AT_THE_END = ("tokens", "reward", "steps", "time", "state", "gain")


def _fitting(
    rows: Sequence[Row], dispensable: Sequence[str], width: int, gap: int, jobs: Sequence[JobProgress]
) -> tuple[list[str], int]:
    """The columns that fit, and the remaining width; negative if even these do not fit."""
    columns = list(rows[0])
    for name in ("", *dispensable):
        columns = [column for column in columns if column != name]
        shown = [column for column in columns if column != "short" or "doing" not in columns]
        room = width
        for column in shown:
            room -= gap + max(cell_len(_heading(column, jobs)), *(row[column].cell_len for row in rows))
        if room >= 0:
            break
    return shown, room


def _heading(column: str, jobs: Sequence[JobProgress]) -> str:
    if column == "reward":
        figures = {job.figure for job in jobs if job.rewards}
        return figures.pop() if len(figures) == 1 else "score" if figures else column
    return _HEADINGS.get(column, column.removeprefix("="))


def _swept(fields: Sequence[str], values: Sequence[str], glyphs: Glyphs) -> Row:
    """The values that a sweep varies, in separate columns."""
    return {f"={field}": Text(short_value(value, glyphs)) for field, value in zip(fields, values, strict=True)}


# --- while they run ----------------------------------------------------------------------------------------------


def running_table(jobs: Sequence[JobProgress], width: int, glyphs: Glyphs) -> Table:
    """The headings and a line for each job; remaining width goes to names, then to the bars."""
    names = take_apart([job.name for job in jobs])
    longest = min(max(cell_len(glyphs.plain(stem)) for stem in names.stems.values()), _LONGEST_NAME)
    least = Text(" " * min(longest, _GOOD_NAME))
    rows = [
        {"mark": Text(glyphs.states[job.state], style=STATE_STYLES[job.state]), "job": least}
        | _swept(names.fields, names.values[job.name], glyphs)
        | _running_cells(job, glyphs)
        for job in jobs
    ]
    columns, room = _fitting(rows, _NO_ROOM, width + 1, 1, jobs)  # the last column needs no separator
    name_width = min(longest, max(least.cell_len + room, _LEAST_NAME))
    bar_width = min(_LONGEST_BAR, _BAR + max(room - (name_width - least.cell_len), 0))
    shown = names.shown(name_width, glyphs)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    for column in columns:
        table.add_column(_heading(column, jobs), justify="right" if column in _RIGHT else "left", no_wrap=True)
    for job, row in zip(jobs, rows, strict=True):
        style = STATE_STYLES[job.state]
        bar = ProgressBar(job.steps or 1, job.step, bar_width, complete_style=style, finished_style=style)
        cells: dict[str, RenderableType] = {**row, "job": Text(shown[job.name], style="bold"), "bar": bar}
        table.add_row(*(cells[column] for column in columns))
    return table


def _running_cells(job: JobProgress, glyphs: Glyphs) -> Row:
    running = job.state is JobState.RUNNING
    style = STATE_STYLES[job.state]
    rate = f"{count_text(job.tokens_per_second)}/s" if running and job.tokens else ""
    return {
        "bar": Text(" " * _BAR),
        "steps": Text(f"{job.step}/{job.steps}"),
        "doing": Text(phase_text(job), style=style),
        "short": Text(phase_text(job, short=True), style=style),
        "reward": _reward_now(job, glyphs),
        "spark": Text(sparkline(job.rewards, _SPARK, glyphs), style="cyan" if running else "bright_black"),
        "held-out": Text(evaluation_text(job.evaluations, glyphs), style="bold" if len(job.evaluations) > 1 else ""),
        "tokens": Text(rate),
        "left": Text(duration_text(job.seconds_left) if running else ""),
    }


def _reward_now(job: JobProgress, glyphs: Glyphs) -> Text:
    value = recent_reward(job.rewards)
    if value is None:
        return Text("n/a" if job.rewards else "")
    arrow = trend(job.rewards, glyphs)
    style = {glyphs.arrows[2]: "green", glyphs.arrows[0]: "red"}.get(arrow, "")
    return Text(f"{reward_text(value)} ").append(arrow, style=style)


# --- at the end --------------------------------------------------------------------------------------------------


def _titled() -> Table:
    return Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left"
    )


def summary_table(
    jobs: Sequence[JobProgress],
    run: Path | None = None,
    seconds: Mapping[str, float] | None = None,
    glyphs: Glyphs = UNICODE,
    width: int = 120,
) -> Table:
    """The result of each job; variants of a sweep are ranked by the figure of their best version, unless they are seeds.

    With the `run` directory, the table has each adapter's path. `seconds` is how long each job ran (`View.seconds`);
    otherwise until now. A narrow `width` leaves out some columns.
    """
    names = take_apart([job.name for job in jobs])
    name_width = 20 if width >= 100 else 12
    shown = names.shown(name_width, glyphs) if names.fields else {job.name: glyphs.plain(job.name) for job in jobs}
    seeds = any(len(group.jobs) > 1 for group in _settings(jobs))
    taken = {job.name: _taken(job, run) for job in jobs}
    best = ((job.name, figure[1] if (figure := taken[job.name]) else None) for job in jobs)
    places = {} if seeds else ranks(best)  # settings have ranks, seeds have none
    stems = list(dict.fromkeys(names.stems.values()))
    ordered = sorted(jobs, key=lambda job: (stems.index(names.stems[job.name]), places.get(job.name, len(jobs))))
    least = min(max((cell_len(name) for name in shown.values()), default=0), name_width)
    table = _titled()
    rows: list[Row] = []
    for job in ordered:
        place = {"place": Text(f"{places[job.name]}." if job.name in places else "")} if places else {}
        where = {} if run is None else {"version": Text(_version(job, run, taken[job.name]))}
        swept = _swept(names.fields, names.values[job.name], glyphs)
        figures = _ended_cells(job, seconds or {}, glyphs, taken[job.name])
        rows.append({**place, "job": Text(" " * least), **swept, **figures, **where})
    columns = _fitting(rows, _NO_ROOM_AT_THE_END, width, 2, jobs)[0] if rows else []
    for column in columns:
        right = column in _RIGHT or column == "held-out"
        fold = {"overflow": "fold", "min_width": least} if column == "job" else {"no_wrap": True}
        table.add_column(_heading(column, jobs), justify="right" if right else "left", **fold)
    for job, row in zip(ordered, rows, strict=True):
        row["job"] = Text(shown[job.name], style="bold")
        table.add_row(*(row[column] for column in columns))
    if run is not None:
        table.title = Text(f"Adapters: {run}/<job>/versions/<version>", style="bold", overflow="fold")
    table.caption = _caption(jobs, glyphs)
    return table


def settings_table(jobs: Sequence[JobProgress], glyphs: Glyphs = UNICODE, width: int = 120) -> Table | None:
    """The results of each setting over its seeds, the best of a task first; None if no setting has several seeds."""
    groups = _settings(jobs)
    if all(len(group.jobs) < 2 for group in groups):
        return None
    names = take_apart([group.name for group in groups])
    places = ranks((group.name, group.held_out.mean if group.held_out else None) for group in groups)
    stems = list(dict.fromkeys(names.stems.values()))
    rows = sorted(groups, key=lambda group: (stems.index(names.stems[group.name]), places.get(group.name, len(groups))))
    shown = names.shown(20 if width >= 100 else 12, glyphs)
    table = _titled()
    for heading in (*(["place"] if places else []), "setting", *names.fields, "seeds", "held-out", "gain"):
        table.add_column(
            heading, justify="right" if heading in ("seeds", *_RIGHT, "held-out") else "left", no_wrap=True
        )
    for group in rows:
        place = [f"{places[group.name]}." if group.name in places else ""] if places else []
        values = [short_value(value, glyphs) for value in names.values[group.name]]
        stem = Text(shown[group.name], style="bold")
        table.add_row(*place, stem, *values, *_over_seeds(group, glyphs))
    table.title = Text("Settings: jobs that differ only in their seed", style="bold")
    what = glyphs.plain(OVER_SEEDS.replace("±", glyphs.plus_minus))
    table.caption = Text(f"held-out: {what}", style="not italic bright_black")
    return table


def _over_seeds(setting: Setting, glyphs: Glyphs) -> tuple[str | Text, ...]:
    """The number of seeds, their held-out figure and its gain."""
    n = len(setting.jobs)
    if setting.before is None or setting.held_out is None:
        return f"0 of {n}", "", ""
    ends, counted, half = [setting.before.mean, setting.held_out.mean], setting.held_out.n, setting.held_out.half
    held_out = _change(ends, glyphs).append(f" {glyphs.plus_minus}{half:.2f}" if finite([half]) else "")
    return str(n) if counted == n else f"{counted} of {n}", held_out, _gain(ends)


def _settings(jobs: Sequence[JobProgress]) -> list[Setting]:
    return settings((job.name, job.setting, job.evaluations) for job in jobs)


def _caption(jobs: Sequence[JobProgress], glyphs: Glyphs) -> Text | None:
    """Why jobs failed, and the warnings from other jobs' metrics."""
    lines = [
        Text.assemble((f"{job.name} failed: ", "bold red"), glyphs.plain(job.message))
        for job in jobs
        if job.state is JobState.FAILED and job.message
    ]
    lines += [Text.assemble((f"{job.name} ", "bold"), glyphs.plain(job.message)) for job in jobs if job.stopped_early]
    lines += [Text.assemble((f"{job.name}: ", "bold"), rule) for job in jobs if (rule := _rule(job))]
    lines += [
        Text.assemble((f"{job.name}: ", "bold yellow"), glyphs.plain(warning))
        for job in jobs
        for warning in job.diagnoses.warnings.values()
    ]
    if not lines:
        return None
    caption = Text("\n").join(lines)
    caption.style = "not italic not dim"
    return caption


def _rule(job: JobProgress) -> str:
    """Which figure chose the best version, if it is not the one shown."""
    return f"v{job.best_version} was {rule}" if (rule := rule_text(job.best_by, job.diagnoses.held_out.name)) else ""


def _ended_cells(
    job: JobProgress, seconds: Mapping[str, float], glyphs: Glyphs, taken: tuple[int, float] | None
) -> Row:
    ran = seconds.get(job.name, time.monotonic() - job.started if job.started else None)
    errors = {version: error for (version, _), error in zip(job.evaluations, job.errors, strict=False)}
    error = errors.get(taken[0], math.nan) if taken else math.nan
    half = f" {glyphs.plus_minus}{error:.2f}" if math.isfinite(error) else ""
    chance = CHANCE * math.hypot(error, *job.errors[:1])
    return {
        "state": Text(job.state.value, style=STATE_STYLES[job.state]),
        "steps": Text(f"{job.step}/{job.steps}"),
        "reward": _change(_ends(job.rewards), glyphs),
        "held-out": Text(held_out_text(job.evaluations, taken, glyphs, half)),
        "gain": _gain([job.evaluations[0][1], taken[1]] if job.evaluations and taken and taken[0] else [], chance),
        "tokens": Text(count_text(job.tokens)),
        "time": Text(duration_text(ran)),
    }


def _ends(rewards: Sequence[float]) -> list[float]:
    """Means of the first and of the last few steps."""
    known = finite(rewards)
    width = max(min(RECENT, len(known) // 2), 1)
    parts = [known[:width], known[-width:]] if len(known) > 1 else [known] if known else []
    return [sum(part) / len(part) for part in parts]


def _change(values: Sequence[float], glyphs: Glyphs) -> Text:
    if len(values) < 2:
        return Text(reward_text(values[0]) if values else "")
    return Text(f"{reward_text(values[0])}{glyphs.to}{reward_text(values[-1])}")


def _gain(values: Sequence[float], chance: float = 0.0) -> Text:
    """From the first to the last value; without a colour where chance explains it."""
    if len(values) < 2 or len(finite([values[0], values[-1]])) < 2:
        return Text()
    gain = round(values[-1] - values[0], 2) + 0.0
    return Text(f"{gain:+.2f}", style="" if abs(gain) <= chance else "bold green" if gain > 0 else "red")


def _taken(job: JobProgress, run: Path | None) -> tuple[int, float] | None:
    """The version to take of those on disk, and its held-out figure; without a directory, of all."""
    if run is None:
        newest = max([job.step, *(version for version, _ in job.evaluations)])
        best = newest if job.best_version is None else job.best_version
        return recommended(job.evaluations, best, [best])
    directory = JobDirectory(run / job.name)
    return recommended(job.evaluations, named_best(newest_commit(directory)), directory.versions())


def _version(job: JobProgress, run: Path, taken: tuple[int, float] | None) -> str:
    """The version to take; also the newest, and a better one that was not kept, if they differ."""
    if taken is None:
        return ""
    directory, known = (
        JobDirectory(run / job.name),
        [(value, -version) for version, value in job.evaluations if version],
    )
    saved, best = directory.versions(), named_best(newest_commit(directory))
    if best is None and (figures := [figure for figure in known if math.isfinite(figure[0])]):
        best = -max(figures)[1]
    newest = f"newest v{max(saved)}" if taken[0] != max(saved) else ""
    gone = f"v{best} was best, not kept" if best not in (None, taken[0]) else ""
    return f"v{taken[0]} ({', '.join(filter(None, (newest, gone)))})" if newest or gone else f"v{taken[0]}"
