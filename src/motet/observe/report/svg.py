"""The curves of a run as a small SVG: mid-tones without a background, readable on white and on black."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import groupby

from motet.observe.report.read import JobRecord, RunRecord, Series
from motet.runtime.held_out import REWARD

COLOURS = tuple(
    re.findall("#[0-9a-f]{6}", (resources.files("motet.service") / "dashboard/palette.js").read_text("utf-8"))
)
"""Colours of jobs, as in all charts."""
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

_WIDTH, _TOP, _PANEL_HEIGHT = 860, 58, 220
_LEFT, _GAP, _RIGHT = 44, 56, 12
_PANEL_WIDTH = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
_TEXT, _GRID = "#7d8590", "#8b949e"
_FONT = "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\""
_LEGEND_ROW, _CHARACTER = 20, 7.0  # pixels; the width of a character is an estimate
_SMOOTH_FROM = 12  # points
_POINTS = 200  # of a curve; a longer one is averaged
_LEAST_RANGE = 0.1  # of the axis
_STROKES = ("", "6 3", "2 3", "7 3 2 3")


def printable(text: str) -> str:
    """A text without characters that HTML or XML forbids."""
    return _FORBIDDEN.sub("", text)


def escaped(text: str) -> str:
    """Escape a text for elements and quoted attributes."""
    return html.escape(printable(text))


@dataclass(frozen=True)
class Curves:
    """The curves in one colour."""

    name: str
    rewards: Series
    held_out: Series
    figure: str
    """The name of what `held_out` shows."""
    intervals: Mapping[float, float] = field(default_factory=dict)
    """Half of the 95 % intervals of points of `held_out`, by version."""


def curves_of(run: RunRecord) -> list[Curves]:
    """The curves of each job."""
    return [curve_of(job) for job in run.jobs]


def curve_of(job: JobRecord) -> Curves:
    """The curves of one job."""
    return Curves(job.name, job.columns.get("reward", Series()), job.evaluations, job.figure, job.intervals)


def draw_curves(curves: Sequence[Curves], what: str = "jobs") -> str:
    """Two panels, reward and held-out figure, with one legend below; `what` names the curves' subjects in the title."""
    legend, legend_height = _legend([curve.name for curve in curves], _TOP + _PANEL_HEIGHT + 52)
    height = _TOP + _PANEL_HEIGHT + 42 + legend_height
    rewards, held_out = [curve.rewards for curve in curves], [curve.held_out for curve in curves]
    figures = " and ".join(dict.fromkeys(curve.figure for curve in curves if curve.held_out.xs)) or REWARD
    name = escaped(f"Training reward and held-out {figures} of {len(curves)} {what}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'aria-label="{name}" {_FONT} font-size="12" fill="{_TEXT}"><title>{name}</title>'
        + _panel("Training reward", "step", rewards, _LEFT)
        + _panel(
            f"Held-out {figures}",
            "version",
            held_out,
            _LEFT + _PANEL_WIDTH + _GAP,
            [curve.intervals for curve in curves],
        )
        + legend
        + "</svg>\n"
    )


def _panel(
    title: str, x_title: str, jobs: Sequence[Series], left: float, intervals: Sequence[Mapping[float, float]] = ()
) -> str:
    """Title, axes and a curve for each job; `left` is the position of the axis. With `intervals`, each point has a dot."""
    marked, bars = bool(intervals), "; bars: 95 % intervals" if any(intervals) else ""
    parts = [
        f'<text x="{left}" y="22" font-size="15" font-weight="600">{title}</text>',
        f'<text x="{left}" y="40" font-size="11.5">by {x_title}{bars}</text>',
    ]
    curves = [job.thinned(_POINTS) for job in jobs]
    smooth = [curve if marked or len(curve.xs) < _SMOOTH_FROM else _smoothed(curve) for curve in curves]
    ys = [y for curve in curves for y in curve.known.ys]
    spans = [
        [(x, y - half[x], y + half[x]) for x, y in curve.known.points if x in half]
        for curve, half in zip(curves, intervals, strict=False)
    ]
    if not ys:
        middle = f'x="{left + _PANEL_WIDTH / 2:.0f}" y="{_TOP + _PANEL_HEIGHT / 2:.0f}" text-anchor="middle"'
        return "".join([*parts, f"<text {middle}>no data yet</text>"])
    ys += [y for job in spans for _, *ends in job for y in ends]
    y_ticks = ticks(min(0.0, *ys), max(_LEAST_RANGE, *ys), 5)  # one that follows its curve would show noise as a rise
    low, high = y_ticks[0], y_ticks[-1]
    right = max(1.0, *(x for job in jobs for x in job.xs))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / right * _PANEL_WIDTH, _TOP + (high - y) / (high - low) * _PANEL_HEIGHT

    for value in y_ticks:
        y = place(0, value)[1]
        line = f'x1="{left}" x2="{left + _PANEL_WIDTH:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {line} stroke="{_GRID}" stroke-opacity=".28"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{value:g}</text>')
    for value in ticks(0, right, 5):
        if value <= right and value == round(value):
            x, bottom = place(value, low)
            parts.append(
                f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" font-size="11">{value:g}</text>'
            )
    for job, (curve, thick) in enumerate(zip(curves, smooth, strict=True)):
        for drawn in (curve, thick) if thick is not curve else (curve,):
            known = groupby(drawn.points, key=lambda point: math.isfinite(point[1]))
            stretches = [[place(*point) for point in part] for is_known, part in known if is_known]
            parts.append(_curve(job, stretches, marked=marked, faint=drawn is not thick))
    for job, ends in enumerate(spans):
        for (x, bottom), (_, top) in [(place(x, least), place(x, most)) for x, least, most in ends]:
            line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{top:.1f}"'
            parts.append(f'<line {line} stroke="{COLOURS[job % len(COLOURS)]}"/>')
    return "".join(parts)


def _smoothed(curve: Series) -> Series:
    """An exponential mean as in the charts: it starts at the first value and spans about a tenth of the curve; gaps remain."""
    weight = max(2 / (len(curve.ys) / 5 + 1), 0.04)
    mean, ys = next((y for y in curve.ys if math.isfinite(y)), 0.0), []
    for y in curve.ys:
        mean += min(weight, 1.0) * (y - mean) if math.isfinite(y) else 0.0
        ys.append(mean if math.isfinite(y) else math.nan)
    return Series(curve.xs, tuple(ys))


def _curve(job: int, stretches: Sequence[Sequence[tuple[float, float]]], *, marked: bool, faint: bool) -> str:
    """A line through each part between gaps, and dots."""
    if not stretches:
        return ""
    colour = COLOURS[job % len(COLOURS)]
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in part) for part in stretches)
    stroke = 'stroke-width="1" stroke-opacity=".3"' if faint else f'stroke-width="2.2"{_dashes(job)}'
    line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-linejoin="round" {stroke}/>'
    dots = [point for part in stretches if marked or len(part) == 1 for point in part]
    return line + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{colour}"/>' for x, y in dots)


def _dashes(job: int) -> str:
    stroke = _STROKES[job // len(COLOURS) % len(_STROKES)]
    return f' stroke-dasharray="{stroke}"' if stroke else ""


def _legend(names: Sequence[str], top: float) -> tuple[str, int]:
    """The legend: names in rows of limited width; also returns its height."""
    parts, x, row = [], float(_LEFT), 0
    for job, name in enumerate(names):
        label = name if len(name) <= 40 else name[:26] + "…" + name[-13:]
        width = 34 + len(label) * _CHARACTER
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            x, row = float(_LEFT), row + 1
        y = top + row * _LEGEND_ROW
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y}" y2="{y}" stroke="{COLOURS[job % len(COLOURS)]}" stroke-width="3" '
            f'stroke-linecap="round"{_dashes(job)}/><text x="{x + 25:.0f}" y="{y + 4}">{escaped(label)}</text>'
        )
        x += width + 12
    return "".join(parts), (row + 1) * _LEGEND_ROW


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers that cover low to high, about `count` of them, at least two."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
