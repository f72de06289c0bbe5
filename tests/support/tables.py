"""Tables of inputs and what they lead to: TOML with cells of YAML, whose tags make values that are too large to be written."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


class Reader(yaml.SafeLoader):
    """`!many [x, 65]` is a list of 65, `!text [a, [x, 65]]` a text, `!deep 33` lists in each other."""


def _many(loader: Any, node: Any) -> list[Any]:
    value, number = loader.construct_sequence(node, deep=True)
    return [value] * number


def _text(loader: Any, node: Any) -> str:
    parts = loader.construct_sequence(node, deep=True)
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)


def deep(depth: int) -> Any:
    """Put so many lists into each other."""
    found: Any = []
    for _ in range(depth - 1):
        found = [found]
    return found


TAGS: dict[str, Callable[[Any, Any], Any]] = {
    "!many": _many,
    "!text": _text,
    "!deep": lambda loader, node: deep(int(node.value)),
    "!fields": lambda loader, node: {f"x{number}": 1 for number in range(int(node.value))},
}
for tag, make in TAGS.items():
    Reader.add_constructor(tag, make)


def read(cell: str) -> Any:
    """Read a cell of YAML."""
    return yaml.load(cell, Reader)  # noqa: S506 (a safe loader, with these tags)


def written(cell: str) -> str:
    """Read a cell that is a text as it stands, or one that a tag makes."""
    return str(read(cell)) if cell.startswith("!text") else cell


def table(name: str) -> dict[str, list[list[Any]]]:
    """Read a table of `tests/`, by sections."""
    return tomllib.loads((Path(__file__).parents[1] / f"{name}.toml").read_text(encoding="utf-8"))
