"""Results as lines of Markdown tables and of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.speed.measure import Measured
from bench.speed.ratios import Goal
from bench.speed.rows import Unit

HEAD = ("work", "against", "Motet", "other", "ratio (least–greatest of neighbours)", "goal", "share of limit")
PASSED = "limit passed"
_SCALES: Mapping[Unit, tuple[float, str]] = {
    "s a step": (1.0, " s a step"),
    "ms": (1e3, " ms"),
    "s": (1.0, " s"),
    "MB": (1 / 2**20, " MB"),
    "%": (100.0, " %"),
}


def number(value: float) -> str:
    """Three figures, and a comma for thousands."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.095 else f"{value:.2g}"


def cost_text(cost: float, unit: Unit) -> str:
    """A cost in the unit of its row."""
    if not math.isfinite(cost):
        return "–"
    if unit == "tokens/s":
        return f"{number(1 / cost)} tokens/s"
    scale, words = _SCALES[unit]
    return f"{number(cost * scale)}{words}"


def ratio_text(measured: Measured) -> str:
    """The ratio and how far it spreads; for a figure that stands alone, its spread."""
    ratio, row = measured.ratio, measured.row
    if ratio is None:
        return "not measured"
    if row.compare == "value":
        return (
            f"{cost_text(ratio.low, row.unit)} – {cost_text(ratio.high, row.unit)}" if ratio.low < ratio.high else "–"
        )
    spread = f" ({ratio.low:.2f}–{ratio.high:.2f})" if measured.repeats > 1 else ""
    return f"**{ratio.middle:.2f}×**{spread}"


def goal_text(goal: Goal | None, unit: Unit, *, alone: bool, met: bool | None) -> str:
    """The goal, and whether it is reached."""
    if goal is None:
        return "–"
    bound = cost_text(goal.bound, unit) if alone else f"{goal.bound:.2f}×"
    told = "" if met is None else ", reached" if met else ", **not reached**"
    return f"{goal.sign} {bound}{told}"


def cells(measured: Measured) -> tuple[str, ...]:
    """A line of the table."""
    row = measured.row
    goal = goal_text(row.goal, row.unit, alone=row.compare == "value", met=measured.met)
    if measured.ratio is None:
        return (row.work, row.against or "–", "–", "–", f"not measured: {measured.reason}", goal, "–")
    against = row.against + (f"; {', '.join(measured.notes)}" if measured.notes and row.against else "")
    return (
        row.work,
        against or "–",
        cost_text(measured.ours, row.unit),
        cost_text(measured.other, row.unit),
        ratio_text(measured),
        goal,
        share_text(measured.limit),
    )


def share_text(share: float) -> str:
    """The share of the machine's limit; a limit that is passed is none. NaN where a work has no limit of this kind."""
    if not math.isfinite(share):
        return "–"
    return f"{100 * share:.0f} %" if share <= 1 else PASSED


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(_flat(cell) for cell in row) + " |\n" for row in rows)


def _flat(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def text(results: Sequence[Measured]) -> str:
    """The table for a terminal: two lines for each row."""
    lines = []
    for measured in results:
        work, against, ours, other, ratio, goal, share = cells(measured)
        lines.append(f"{work}  [{measured.row.name}]")
        parts = [ratio.replace("**", "")]
        if measured.ratio is not None:
            parts += [f"Motet {ours}", *([f"{against}: {other}"] if measured.row.other else [])]
            parts += [] if share == "–" else [share if share == PASSED else f"{share} of the limit"]
        lines.append("    " + " · ".join([*parts, f"goal {goal.replace('**', '')}"]))
    return "\n".join(lines)
