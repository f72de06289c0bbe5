"""`docs/benchmarks-gpu.md`: a column for each card. A run replaces what it measured in its own column, and nothing else.

The figures are in `docs/benchmarks-gpu.json`; the page has their tables between two marks, and keeps the text around them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.figures import GROUPS
from bench.gpu.schedule import Result
from bench.speed.table import markdown

BEGIN, END = "<!-- tables: written by `make gpu-quarter` -->\n", "<!-- end of tables -->\n"
HEADINGS = {
    "bits": "## Bits",
    "speed": "## Speed of Motet",
    "peers": "## Peers on the same card",
    "card": "## What the card can do",
}
Column = dict[str, Any]
"""`about`: facts of the card and its software; `figures`: by group and row; `parts`: what became of them."""


def merged(
    cards: Mapping[str, Column], card: str, about: Mapping[str, str], results: Sequence[Result]
) -> dict[str, Column]:
    """All columns, with the results of a run on this card. Each figure remembers the commit that it was measured at."""
    before = cards.get(card, {})
    figures: dict[str, dict[str, Any]] = {group: dict(before.get("figures", {}).get(group, {})) for group in GROUPS}
    parts = dict(before.get("parts", {}))
    for result in results:
        if result.state == "not run":
            continue
        why = "" if result.state == "passed" else result.said
        parts[result.name] = {"state": result.state, "why": why, "commit": about["commit"]}
        for figure in result.figures:
            cell = {"text": figure.text, "executor": figure.executor, "commit": about["commit"]}
            figures[figure.group][figure.row] = cell
    return {**cards, card: {"about": dict(about), "figures": figures, "parts": parts}}


def tables(cards: Mapping[str, Column]) -> str:
    """The part of the page between the marks."""
    names = list(cards)
    parts = [_about(cards)]
    for group in GROUPS:
        rows = list(dict.fromkeys(row for name in names for row in cards[name]["figures"].get(group, {})))
        if not rows:
            continue
        lines = [(row, *(_cell(cards[name], cards[name]["figures"][group].get(row)) for name in names)) for row in rows]
        parts += [f"{HEADINGS[group]}\n", markdown(("what", *names), lines)]
    states = list(dict.fromkeys(part for name in names for part in cards[name]["parts"]))
    lines = [(f"`{part}`", *(_state(cards[name]["parts"].get(part)) for name in names)) for part in states]
    if lines:
        parts += ["## Parts of the run\n", markdown(("part", *names), lines)]
    return "\n".join(parts)


def _about(cards: Mapping[str, Column]) -> str:
    facts = list(dict.fromkeys(fact for column in cards.values() for fact in column["about"]))
    lines = [(fact, *(column["about"].get(fact, "–") for column in cards.values())) for fact in facts]
    return markdown(("card", *cards), lines)


def _cell(column: Column, cell: Mapping[str, str] | None) -> str:
    """A figure, with what computed it, and its commit if that is not the column's."""
    if cell is None:
        return "–"
    notes = [cell.get("executor", "")]
    if cell["commit"] != column["about"]["commit"]:
        notes.append(f"at {cell['commit']}")
    said = "; ".join(note for note in notes if note)
    return f"{cell['text']} ({said})" if said else cell["text"]


def _state(part: Mapping[str, str] | None) -> str:
    if part is None:
        return "–"
    return f"{part['state']}: {part['why']}" if part["why"] else part["state"]


def read(file: Path) -> dict[str, Column]:
    """The columns that are known."""
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def write(page: Path, cards: Mapping[str, Column]) -> None:
    """Write the columns, and the page; the text around the tables stays as it is."""
    page.with_suffix(".json").write_text(json.dumps(cards, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = page.read_text(encoding="utf-8") if page.is_file() else f"# Motet on GPUs\n\n{BEGIN}{END}"
    before, _, rest = text.partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{tables(cards)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def summary(results: Sequence[Result]) -> str:
    """The last lines of a run: every figure, then the count of parts by state."""
    figures = [(figure.row, figure.text, figure.executor) for result in results for figure in result.figures]
    width = max((len(row) for row, _, _ in figures), default=0)
    lines = [f"{row:{width}}  {text}  {executor}".rstrip() for row, text, executor in figures]
    states = [result.state for result in results]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return "\n".join([*lines, counts])
