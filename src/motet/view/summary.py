"""The table at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from motet.runtime.checkpoint import JobDirectory
from motet.runtime.progress import JobProgress
from motet.types import JobState
from motet.view.text import RECENT, STATE_STYLES, UNICODE, Glyphs, count_text, duration_text, finite, reward_text


def summary_table(
    jobs: Sequence[JobProgress],
    run: Path | None = None,
    seconds: Mapping[str, float] | None = None,
    glyphs: Glyphs = UNICODE,
    width: int = 120,
) -> Table:
    """What became of each job.

    Args:
        jobs: how they stand.
        run: the run directory; with it the table says where each adapter is.
        seconds: how long each job ran (`View.seconds`); otherwise until now.
        glyphs: what the console can write (`glyphs_of(console)`).
        width: of the console; a narrow one goes without tokens, then without time.
    """
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left"
    )
    left_out = {heading for heading, room in (("tokens", 96), ("time", 88)) if width < room}
    headings = [
        heading for heading in ("steps", "reward", "held-out", "gain", "tokens", "time") if heading not in left_out
    ]
    table.add_column("job", overflow="fold", min_width=min(max((len(job.name) for job in jobs), default=1), 12))
    table.add_column("state", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if run is not None:
        table.title = Text(f"Adapters: {run}/<job>/versions/<version>", style="bold", overflow="fold")
        table.add_column("version", no_wrap=True)
    for job in jobs:
        cells = _cells(job, seconds or {}, glyphs)
        where = [] if run is None else [Text(_version(job, run))]
        table.add_row(cells["job"], cells["state"], *(cells[heading] for heading in headings), *where)
    failed = [job for job in jobs if job.state is JobState.FAILED and job.message]
    if failed:
        lines = [Text.assemble((f"{job.name} failed: ", "bold red"), glyphs.plain(job.message)) for job in failed]
        table.caption = Text("\n").join(lines)
        table.caption.style = "not italic not dim"
    return table


def _cells(job: JobProgress, seconds: Mapping[str, float], glyphs: Glyphs) -> dict[str, Text]:
    """What each column says of a job."""
    taken = seconds.get(job.name, time.monotonic() - job.started if job.started else None)
    evaluations = [value for _, value in job.evaluations]
    return {
        "job": Text(glyphs.plain(job.name), style="bold"),
        "state": Text(job.state.value, style=STATE_STYLES[job.state]),
        "steps": Text(f"{job.step}/{job.steps}"),
        "reward": _change(_ends(job.rewards), glyphs),
        "held-out": _change(evaluations, glyphs),
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
