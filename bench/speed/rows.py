"""The nouns of the bench: a side does a work, a block has sides that take turns, a row compares two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.speed.ratios import Compare, Goal

RANK = 16
"""Of every adapter."""
Unit = Literal["tokens/s", "s a step", "ms", "s", "MB", "%"]
"""How the cost of a side is written; `tokens/s` is its inverse."""


@dataclass(frozen=True)
class Side:
    """One program doing one work."""

    program: str
    work: str
    args: Mapping[str, Any] = field(default_factory=dict)
    warm: Mapping[str, Any] | bool = True
    """What warms it up: a whole repeat, nothing, or arguments that make the work smaller."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    work: str
    against: str
    compare: Compare
    ours: str
    """The name of a side."""
    other: str = ""
    goal: Goal | None = None
    unit: Unit = "tokens/s"
    field: str = ""
    """A figure of the answers that is looked at instead of the cost."""


@dataclass(frozen=True)
class Block:
    """Sides that take turns."""

    name: str
    about: str
    """The work, exactly."""
    sides: Mapping[str, Side]
    rows: tuple[Row, ...]
    repeats: tuple[int, int] = (1, 5)
    """In a quick run, and in a full one."""
    quick: bool = True
    """Whether a quick run has it."""
    base: str = "smollm2"


def at_least(bound: float) -> Goal:
    """A figure that should be so high."""
    return Goal("≥", bound)


def at_most(bound: float) -> Goal:
    """A figure that should not be higher."""
    return Goal("≤", bound)


def chosen(blocks: Sequence[Block], names: Sequence[str]) -> list[Block]:
    """Blocks with the rows that are named only, and the sides that these compare; all of them where none is named.

    Raises:
        ValueError: a name that no row has.
    """
    known = [row.name for block in blocks for row in block.rows]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}; there are: {', '.join(known)}")
    found = []
    for block in blocks:
        rows = tuple(row for row in block.rows if not names or row.name in names)
        needed = {name for row in rows for name in (row.ours, row.other)}
        sides = {name: side for name, side in block.sides.items() if name in needed}
        if rows:
            found.append(replace(block, sides=sides, rows=rows))
    return found
