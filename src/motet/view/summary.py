"""The table at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from motet.runtime.checkpoint import JobDirectory
from motet.runtime.progress import JobProgress
from motet.types import JobState
from motet.view.names import ranks, short_value, take_apart
from motet.view.text import RECENT, STATE_STYLES, UNICODE, Glyphs, count_text, duration_text, finite, reward_text

_FIGURES = ("steps", "reward", "held-out", "gain", "tokens", "time")
_DISPENSABLE = ("tokens", "reward", "steps", "time", "state", "gain")
"""What a narrow console goes without, in this order."""


def summary_table(
    jobs: Sequence[JobProgress],
    run: Path | None = None,
    seconds: Mapping[str, float] | None = None,
    glyphs: Glyphs = UNICODE,
    width: int = 120,
) -> Table:
    """What became of each job; variants of a sweep in the order of their last evaluation.

    Args:
        jobs: how they stand.
        run: the run directory; with it the table says where each adapter is.
        seconds: how long each job ran (`View.seconds`); otherwise until now.
        glyphs: what the console can write (`glyphs_of(console)`).
        width: of the console; a narrow one goes without some columns.
    """
    names = take_apart([job.name for job in jobs])
    name_width = 20 if width >= 100 else 12
    shown = names.shown(name_width, glyphs) if names.fields else {job.name: glyphs.plain(job.name) for job in jobs}
    places = ranks((job.name, job.evaluations[-1][1] if job.evaluations else None) for job in jobs)
    stems = list(dict.fromkeys(names.stems.values()))
    ordered = sorted(jobs, key=lambda job: (stems.index(names.stems[job.name]), places.get(job.name, len(jobs))))
    rows = []
    for job in ordered:
        swept = (Text(short_value(value, glyphs)) for value in names.values[job.name])
        place = {"place": Text(f"{places[job.name]}." if job.name in places else "")} if places else {}
        name = Text(shown[job.name], style="bold")
        where = {} if run is None else {"version": Text(_version(job, run))}
        figures = _cells(job, seconds or {}, glyphs)
        rows.append({**place, "job": name, **dict(zip(names.fields, swept, strict=True)), **figures, **where})
    for heading in _DISPENSABLE:
        if _least_width(rows, name_width) > width:
            rows = [{name: cell for name, cell in row.items() if name != heading} for row in rows]
    table = _table(rows, name_width)
    if run is not None:
        table.title = Text(f"Adapters: {run}/<job>/versions/<version>", style="bold", overflow="fold")
    table.caption = _caption(jobs, glyphs)
    return table


def _table(rows: Sequence[Mapping[str, Text]], name_width: int) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left"
    )
    for heading in rows[0] if rows else ():
        if heading == "job":
            longest = max(cell_len(row[heading].plain) for row in rows)
            table.add_column(heading, overflow="fold", min_width=min(longest, name_width))
        else:
            table.add_column(heading, justify="right" if heading in _FIGURES else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _least_width(rows: Sequence[Mapping[str, Text]], name_width: int) -> int:
    widths = {
        heading: max(cell_len(text) for text in (heading, *(row[heading].plain for row in rows)))
        for heading in (rows[0] if rows else ())
    }
    return sum(min(size, name_width) if heading == "job" else size for heading, size in widths.items()) + 2 * len(
        widths
    )


def _caption(jobs: Sequence[JobProgress], glyphs: Glyphs) -> Text | None:
    """Why jobs failed, and what the metrics of others warn of."""
    lines = [
        Text.assemble((f"{job.name} failed: ", "bold red"), glyphs.plain(job.message))
        for job in jobs
        if job.state is JobState.FAILED and job.message
    ]
    lines += [
        Text.assemble((f"{job.name}: ", "bold yellow"), glyphs.plain(warning))
        for job in jobs
        for warning in job.signs.warnings.values()
    ]
    if not lines:
        return None
    caption = Text("\n").join(lines)
    caption.style = "not italic not dim"
    return caption


def _cells(job: JobProgress, seconds: Mapping[str, float], glyphs: Glyphs) -> dict[str, Text]:
    """What each column says of a job."""
    taken = seconds.get(job.name, time.monotonic() - job.started if job.started else None)
    evaluations = [value for _, value in job.evaluations]
    held_out = _change(evaluations, glyphs)
    if finite(job.errors[-1:]):
        held_out.append(f" {glyphs.plus_minus}{job.errors[-1]:.2f}", style="bright_black")
    return {
        "state": Text(job.state.value, style=STATE_STYLES[job.state]),
        "steps": Text(f"{job.step}/{job.steps}"),
        "reward": _change(_ends(job.rewards), glyphs),
        "held-out": held_out,
        "gain": _gain(evaluations),
        "tokens": Text(count_text(job.tokens)),
        "time": Text(duration_text(taken)),
    }


def _ends(rewards: Sequence[float]) -> list[float]:
    """Mean of the first and of the last few steps."""
    known = finite(rewards)
    width = max(min(RECENT, len(known) // 2), 1)
    parts = [known[:width], known[-width:]] if len(known) > 1 else [known] if known else []
    return [sum(part) / len(part) for part in parts]


def _change(values: Sequence[float], glyphs: Glyphs) -> Text:
    if len(values) < 2:
        return Text(reward_text(values[0]) if values else "")
    return Text(f"{reward_text(values[0])}{glyphs.to}{reward_text(values[-1])}")


def _gain(values: Sequence[float]) -> Text:
    if len(values) < 2 or len(finite([values[0], values[-1]])) < 2:
        return Text()
    gain = values[-1] - values[0]
    return Text(f"{gain:+.2f}", style="bold green" if gain > 0 else "red" if gain < 0 else "")


def _version(job: JobProgress, run: Path) -> str:
    """The newest version on disk; says which one is the best by evaluation if it is another."""
    found = JobDirectory(run / job.name).versions()
    if not found:
        return ""
    known = [(value, version) for version, value in job.evaluations if version in found and finite([value])]
    best = max(known, key=lambda item: (item[0], -item[1]))[1] if known else max(found)
    return f"v{max(found)}" if best == max(found) else f"v{max(found)} (best v{best})"
