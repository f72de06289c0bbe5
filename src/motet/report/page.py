"""The HTML page: one file, plotly.js inside, no network. Text from users and models is escaped wherever it enters."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motet.report.escape import shown
from motet.report.figures import (
    DEVICE_COLOURS,
    Chart,
    colour,
    dash,
    device_charts,
    health_charts,
    learning_charts,
    symbol,
)
from motet.report.read import JobRecord, RunRecord
from motet.report.samples import configurations, samples, swatch
from motet.report.script import SCRIPT
from motet.report.style import CSS

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_MARKS = {
    "succeeded": ("✓", "good"),
    "failed": ("✗", "bad"),
    "running": ("●", ""),
    "paused": ("‖", "warm"),
    "cancelled": ("–", "soft"),
    "queued": ("○", "soft"),
}


def page(run: RunRecord, picture: str) -> str:
    """The whole file.

    Args:
        run: what is on disk.
        picture: the static curves, shown where scripts are off.
    """
    from plotly.offline import get_plotlyjs

    learning, health, device = learning_charts(run), health_charts(run), device_charts(run)
    body = [
        _header(run),
        _summary(run),
        _legend(run.jobs),
        _section("Learning", "", learning, "two"),
        f'<noscript><p class="about">Interactive charts need JavaScript.</p><div class="static">{picture}</div></noscript>',
        _section("Health of the training", "What should stay calm while the reward rises.", health, "three"),
        _section("Device", "One device serves all jobs of the run.", device, "three"),
        samples(run),
        configurations(run),
        "<footer>Made by Motet from the files of the run. This page loads nothing from the network.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(run.name)} · Motet</title><style>{CSS}</style></head>\n<body><main>"
        + "\n".join(body)
        + f'</main>\n<script type="application/json" id="report-data">{_data(run, learning, [*health, *device])}</script>\n'
        + f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script></body></html>\n"
    )


# --- head --------------------------------------------------------------------------------------------------------


def _header(run: RunRecord) -> str:
    count = len(run.jobs)
    states = Counter(job.state for job in run.jobs)
    bases = sorted({Path(job.base).name if Path(job.base).is_absolute() else job.base for job in run.jobs if job.base})
    facts = [
        f"{count} job{'' if count == 1 else 's'}" + (f" on {', '.join(bases)}" if bases else ""),
        ", ".join(
            f"{states[state]} {state}" for state in [*_MARKS, *sorted(set(states) - set(_MARKS))] if states[state]
        ),
        f"{sum(job.done for job in run.jobs):,} steps",
        f"{sum(job.tokens for job in run.jobs):,} tokens",
    ]
    lead = shown(" · ".join(fact for fact in facts if fact))
    return f'<header><p class="eyebrow">Motet run</p><h1>{shown(run.name)}</h1><p class="lead">{lead}</p></header>'


def _legend(jobs: Sequence[JobRecord]) -> str:
    chips = "".join(
        f'<button class="chip" type="button" data-job="{index}" aria-pressed="true" title="Show or hide {shown(job.name)} '
        f'in all charts; with Shift, show it alone">{swatch(index)}<span>{shown(job.name)}</span></button>'
        for index, job in enumerate(jobs)
    )
    return f'<nav class="legend" aria-label="Jobs shown in the charts">{chips}</nav>'


# --- summary -----------------------------------------------------------------------------------------------------


def _summary(run: RunRecord) -> str:
    values = [value for job in run.jobs for value in job.evaluations.ys]
    low, high = min([0.0, *values]), max([0.0, *values])
    high = 1.0 if low == 0 and high <= 1 else high
    rows = "".join(_row(index, job, low, high) for index, job in enumerate(run.jobs))
    headings = ("job", "state", "steps", "held-out before → after", "", "best version", "newest adapter")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<section><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"


def _row(index: int, job: JobRecord, low: float, high: float) -> str:
    mark, style = _MARKS.get(job.state, ("?", "soft"))
    steps = f"{job.done}/{job.planned}" if job.planned is not None else str(job.done)
    best = job.best_version
    adapter = f"{job.name}/versions/v{job.versions[-1]}" if job.versions else "none yet"
    row = (
        f'<tr data-job="{index}"><td class="job">{swatch(index)}{shown(job.name)}</td>'
        f'<td data-label="state"><span class="state {style}">{mark} {shown(job.state)}</span></td>'
        f'<td data-label="steps" class="number">{steps}</td>'
        f'<td data-label="held-out" class="number"><span>{_change(job)}</span></td>'
        f'<td class="wide">{_range(index, job, low, high)}</td>'
        f'<td data-label="best version" class="number">{"–" if best is None else f"v{best}"}</td>'
        f'<td data-label="adapter" class="path mono">{shown(adapter)}</td></tr>'
    )
    if job.message:
        row += f'<tr class="reason" data-job="{index}"><td colspan="7" class="{style}">{shown(job.message)}</td></tr>'
    if job.inexact:
        told = shown("not exact: " + "; ".join(job.inexact))
        row += f'<tr class="reason" data-job="{index}"><td colspan="7" class="warm">{told}</td></tr>'
    return row


def _change(job: JobRecord) -> str:
    values = job.evaluations.ys
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    gain = values[-1] - values[0]
    style = "good" if gain > 0 else "bad" if gain < 0 else "soft"
    return f'{values[0]:.3f} → <b>{values[-1]:.3f}</b> <span class="{style}">{f"{gain:+.3f}".replace("-", "−")}</span>'


def _range(index: int, job: JobRecord, low: float, high: float) -> str:
    """A line from before (hollow) to after (filled) on a scale that all jobs share."""
    values = job.evaluations.ys
    if not values or high <= low:
        return ""
    first, last = (8 + 124 * (value - low) / (high - low) for value in (values[0], values[-1]))
    tint = colour(index)
    return (
        '<svg class="range" width="140" height="16" aria-hidden="true"><line class="track" x1="8" x2="132" y1="8" y2="8"/>'
        f'<line x1="{first:.1f}" x2="{last:.1f}" y1="8" y2="8" stroke="{tint}" stroke-width="4"/>'
        f'<circle class="hollow" cx="{first:.1f}" cy="8" r="4.5" stroke="{tint}"/>'
        f'<circle cx="{last:.1f}" cy="8" r="5.5" fill="{tint}"/></svg>'
    )


# --- charts ------------------------------------------------------------------------------------------------------


def _section(title: str, about: str, charts: Sequence[Chart], columns: str) -> str:
    figures = "".join(_figure(chart) for chart in charts)
    told = f'<p class="about">{about}</p>' if about else ""
    return f'<section><h2>{title}</h2>{told}<div class="charts {columns}">{figures}</div></section>'


def _figure(chart: Chart) -> str:
    note = f"{chart.flat} · {chart.note}" if chart.flat else chart.note
    areas = [curve.label for curve in chart.curves if curve.kind == "area"]
    keys = "".join(f'<span><i style="background:{DEVICE_COLOURS[label]}"></i>{label}</span>' for label in areas)
    told = f"<p>{shown(note)}</p>{f'<p class=keys>{keys}</p>' if keys else ''}"
    plot = f'<div class="plot" id="plot-{chart.key}"></div>' if chart.curves else '<div class="empty">no data yet</div>'
    return f"<figure><figcaption><h3>{shown(chart.title)}</h3>{told}</figcaption>{plot}</figure>"


def _data(run: RunRecord, large: Sequence[Chart], small: Sequence[Chart]) -> str:
    """What the script draws, safe inside a script element."""
    data = {
        "jobs": [
            {"name": job.name, "colour": colour(index), "dash": dash(index), "symbol": symbol(index)}
            for index, job in enumerate(run.jobs)
        ],
        "device": DEVICE_COLOURS,
        "charts": [_chart(chart, chart in large) for chart in [*large, *small]],
    }
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: also no line separators
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart(chart: Chart, large: bool) -> dict[str, Any]:
    curves = [
        {
            "label": curve.label,
            "job": curve.job,
            "kind": curve.kind,
            "x": [_short(x) for x in curve.points.xs],
            "y": [_short(y) for y in curve.points.ys],
        }
        for curve in chart.curves
    ]
    flat = chart.curves[0].points.known.ys[0] if chart.flat else None
    return {
        "key": chart.key,
        "x_title": chart.x_title,
        "share": chart.share,
        "large": large,
        "flat": flat,
        "curves": curves,
    }


def _short(value: float) -> float | None:
    """Five significant digits are enough for a picture; whole numbers stay whole, and a gap is null."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")
