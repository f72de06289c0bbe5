"""A line for each job, with the columns that fit. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from motet.runtime.progress import JobProgress
from motet.types import JobState
from motet.view.names import short_value, take_apart
from motet.view.text import (
    STATE_STYLES,
    Glyphs,
    count_text,
    duration_text,
    evaluation_text,
    phase_text,
    recent_reward,
    reward_text,
    sparkline,
    trend,
)

_MAX_NAME, _GOOD_NAME, _MIN_NAME = 24, 12, 8
_MAX_BAR = 24
_COLUMNS = ("bar", "steps", "phase", "short phase", "reward", "spark", "eval", "rate", "left")
_HEADINGS = {
    "name": Text("job"),
    "steps": Text("steps", justify="right"),
    "phase": Text("doing"),
    "short phase": Text("doing"),
    "reward": Text("reward", justify="right"),
    "eval": Text("held-out"),
    "rate": Text("tokens", justify="right"),
    "left": Text("left", justify="right"),
}

Row = Mapping[str, Text]
"""What stands in each column."""


@dataclass(frozen=True)
class Plan:
    """Which columns a line has, and how wide those are that can shrink; 0 leaves them out."""

    columns: tuple[str, ...] = ("steps", "phase", "reward", "eval", "rate", "left")
    bar: int = 10
    spark: int = 10


PLANS = (  # from everything to almost nothing; the first that fits is taken
    Plan(),
    Plan(("steps", "phase", "reward", "eval", "left")),
    Plan(("steps", "phase", "reward", "eval", "left"), 6, 6),
    Plan(("steps", "short phase", "reward", "eval", "left"), 6, 6),
    Plan(("steps", "short phase", "reward", "eval", "left"), 6, 0),
    Plan(("steps", "short phase", "reward", "eval", "left"), 0, 0),
    Plan(("steps", "short phase", "reward", "eval"), 0, 0),
    Plan(("steps", "reward", "eval"), 0, 0),
    Plan(("steps", "reward"), 0, 0),
)
"""Layouts of a job's line."""


def job_lines(jobs: Sequence[JobProgress], width: int, glyphs: Glyphs) -> list[Text]:
    """The headings, then a line for each job, with the widest plan that fits; what is left over goes to the bar.

    What a sweep varies stands in columns of its own, after the name.
    """
    if not jobs:
        return []
    names = take_apart([job.name for job in jobs])
    rows = [_cells(job, glyphs) | _swept(names.fields, names.values[job.name], glyphs) for job in jobs]
    headings = _HEADINGS | _swept(names.fields, names.fields, glyphs)
    longest = min(max(cell_len(glyphs.plain(stem)) for stem in names.stems.values()), _MAX_NAME)
    history = max(len(job.rewards) for job in jobs)
    for plan in PLANS:
        texts = (*(f"={field}" for field in names.fields), *plan.columns)
        widths = {name: max(cell_len(row[name].plain) for row in (headings, *rows)) for name in texts}
        widths |= {"bar": plan.bar, "spark": min(plan.spark, history)}
        fixed = sum(size + 1 for size in widths.values() if size) + 2
        widths["name"] = min(longest, max(width - fixed, _MIN_NAME))
        if fixed + widths["name"] <= width and widths["name"] >= min(longest, _GOOD_NAME):
            break
    if widths["bar"]:
        widths["bar"] += max(min(width - fixed - widths["name"], _MAX_BAR - plan.bar), 0)
    shown = names.shown(widths["name"], glyphs)
    columns = [name for name in ("name", *(f"={field}" for field in names.fields), *_COLUMNS) if widths.get(name)]
    lines = [_line(Text("  "), headings, columns, widths, width)]
    lines[0].stylize("bright_black")
    for job, row in zip(jobs, rows, strict=True):
        mark = Text(f"{glyphs.states[job.state]} ", style=STATE_STYLES[job.state])
        drawn = {
            "name": Text(shown[job.name], style="bold"),
            "bar": _bar(job, widths["bar"], glyphs),
            "spark": _spark(job, widths["spark"], glyphs),
        }
        lines.append(_line(mark, row | drawn, columns, widths, width))
    return lines


def _line(mark: Text, row: Row, columns: Sequence[str], widths: Mapping[str, int], width: int) -> Text:
    line = Text(no_wrap=True).append_text(mark)
    for name in columns:
        cell = row.get(name, Text())
        space = " " * (widths[name] - cell_len(cell.plain))
        line.append_text(Text.assemble(space, cell) if cell.justify == "right" else Text.assemble(cell, space))
        line.append(" ")
    line.rstrip()
    line.truncate(width)
    return line


def _swept(fields: Sequence[str], values: Sequence[str], glyphs: Glyphs) -> dict[str, Text]:
    return {f"={field}": Text(short_value(value, glyphs)) for field, value in zip(fields, values, strict=True)}


def _cells(job: JobProgress, glyphs: Glyphs) -> dict[str, Text]:
    """Everything that does not depend on the plan."""
    running = job.state is JobState.RUNNING
    style = STATE_STYLES[job.state]
    rate = f"{count_text(job.tokens_per_second)}/s" if running and job.tokens else ""
    return {
        "steps": Text(f"{job.step}/{job.steps}", justify="right"),
        "phase": Text(phase_text(job), style=style),
        "short phase": Text(phase_text(job, short=True), style=style),
        "reward": _reward(job, glyphs),
        "eval": Text(evaluation_text(job.evaluations, glyphs), style="bold" if len(job.evaluations) > 1 else ""),
        "rate": Text(rate, justify="right"),
        "left": Text(duration_text(job.seconds_left) if running else "", justify="right"),
    }


def _bar(job: JobProgress, width: int, glyphs: Glyphs) -> Text:
    done = round(width * min(job.step / job.steps, 1.0)) if job.steps else 0
    bar = Text(glyphs.bar[0] * done, style=STATE_STYLES[job.state])
    return bar.append(glyphs.bar[1] * (width - done), style="bright_black")


def _spark(job: JobProgress, width: int, glyphs: Glyphs) -> Text:
    return Text(
        sparkline(job.rewards, width, glyphs), style="cyan" if job.state is JobState.RUNNING else "bright_black"
    )


def _reward(job: JobProgress, glyphs: Glyphs) -> Text:
    value = recent_reward(job.rewards)
    if value is None:
        return Text("n/a" if job.rewards else "", justify="right")
    arrow = trend(job.rewards, glyphs)
    style = {glyphs.arrows[2]: "green", glyphs.arrows[0]: "red"}.get(arrow, "")
    return Text(f"{reward_text(value)} ", justify="right").append(arrow, style=style)
