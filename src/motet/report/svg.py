"""The curves of a run as a small hand-written SVG: mid-tones on nothing, so that it reads on white and on black."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from motet.report.escape import shown
from motet.report.figures import Chart, Curve, colour, learning_charts
from motet.report.read import RunRecord

_WIDTH, _TOP, _PANEL_HEIGHT = 860, 58, 220
_LEFT, _GAP, _RIGHT = 44, 56, 12
_PANEL_WIDTH = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
_TEXT, _GRID = "#7d8590", "#8b949e"
_FONT = "font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\""
_LEGEND_ROW, _CHARACTER = 20, 7.0  # pixels; the width of a character is an estimate
_STROKES = ("", "6 3", "2 3", "7 3 2 3")


def draw_curves(run: RunRecord) -> str:
    """Two panels, reward and held-out evaluation, with one legend below."""
    legend, legend_height = _legend([job.name for job in run.jobs], _TOP + _PANEL_HEIGHT + 52)
    height = _TOP + _PANEL_HEIGHT + 42 + legend_height
    panels = [_panel(chart, _LEFT + place * (_PANEL_WIDTH + _GAP)) for place, chart in enumerate(learning_charts(run))]
    name = shown(f"Training reward and held-out reward of {len(run.jobs)} jobs")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'aria-label="{name}" {_FONT} font-size="12" fill="{_TEXT}"><title>{name}</title>'
        + "".join(panels)
        + legend
        + "</svg>\n"
    )


def _panel(chart: Chart, left: float) -> str:
    """Title, axes and curves; `left` is where the axis stands."""
    smooth = [curve for curve in chart.curves if curve.kind != "raw"]
    ys = [y for curve in smooth for y in curve.points.known.ys]
    xs = [x for curve in smooth for x in curve.points.xs]
    parts = [
        f'<text x="{left}" y="22" font-size="15" font-weight="600">{shown(chart.title)}</text>',
        f'<text x="{left}" y="40" font-size="11.5">by {chart.x_title}</text>',
    ]
    if not ys:
        middle = f'x="{left + _PANEL_WIDTH / 2:.0f}" y="{_TOP + _PANEL_HEIGHT / 2:.0f}" text-anchor="middle"'
        return "".join([*parts, f"<text {middle}>no data yet</text>"])
    y_ticks = ticks(min(ys), max(ys), 5)
    x_ticks = [x for x in ticks(0, max(xs), 5) if x <= max(xs) and x == round(x)]
    low, high = y_ticks[0], y_ticks[-1]
    right = max(*xs, 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / right * _PANEL_WIDTH, _TOP + (high - y) / (high - low) * _PANEL_HEIGHT

    for value in y_ticks:
        y = place(0, value)[1]
        line = f'x1="{left}" x2="{left + _PANEL_WIDTH:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {line} stroke="{_GRID}" stroke-opacity=".28"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{value:g}</text>')
    for value in x_ticks:
        x, bottom = place(value, low)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" font-size="11">{value:g}</text>')
    for curve in chart.curves:
        parts.append(_curve(curve, [[place(x, min(max(y, low), high)) for x, y in part] for part in _stretches(curve)]))
    return "".join(parts)


def _stretches(curve: Curve) -> list[list[tuple[float, float]]]:
    """The points between gaps."""
    points = curve.points.thinned(200)
    parts = groupby(zip(points.xs, points.ys, strict=True), key=lambda point: math.isfinite(point[1]))
    return [list(part) for known, part in parts if known]


def _curve(curve: Curve, stretches: Sequence[Sequence[tuple[float, float]]]) -> str:
    job = curve.job or 0
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in part) for part in stretches)
    raw = curve.kind == "raw"
    stroke = 'stroke-width="1" stroke-opacity=".3"' if raw else f'stroke-width="2.2"{_dashes(job)}'
    drawn = f'<path d="{path}" fill="none" stroke="{colour(job)}" stroke-linejoin="round" {stroke}/>'
    marked = [point for part in stretches if curve.kind == "markers" or len(part) == 1 for point in part]
    return drawn + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{colour(job)}"/>' for x, y in marked)


def _dashes(job: int) -> str:
    stroke = _STROKES[job // 6 % len(_STROKES)]
    return f' stroke-dasharray="{stroke}"' if stroke else ""


def _legend(names: Sequence[str], top: float) -> tuple[str, int]:
    """A row of names, broken where it is full; also its height."""
    parts, x, row = [], float(_LEFT), 0
    for job, name in enumerate(names):
        label = name if len(name) <= 40 else name[:26] + "…" + name[-13:]
        width = 34 + len(label) * _CHARACTER
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            x, row = float(_LEFT), row + 1
        y = top + row * _LEGEND_ROW
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y}" y2="{y}" stroke="{colour(job)}" stroke-width="3" '
            f'stroke-linecap="round"{_dashes(job)}/><text x="{x + 25:.0f}" y="{y + 4}">{shown(label)}</text>'
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
