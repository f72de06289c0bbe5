"""What a part finds out: one line of JSON on its standard output for each figure, so that a part that is cut keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

GROUPS = ("bits", "speed", "peers", "card")
Group = Literal["bits", "speed", "peers", "card"]


@dataclass(frozen=True)
class Figure:
    """A cell of the page."""

    group: Group
    row: str
    value: float | str
    unit: str = ""
    executor: str = ""
    """What computed it, such as `torch, tile 256`; empty for peers and ceilings."""

    @property
    def text(self) -> str:
        """The value with its unit: no decimals from 100 on, otherwise three figures."""
        if isinstance(self.value, str):
            return self.value
        number = f"{self.value:,.0f}" if abs(self.value) >= 100 else f"{self.value:.3g}"
        return f"{number} {self.unit}".rstrip()


def say(figure: Figure) -> None:
    """Print a figure at once."""
    print(json.dumps(asdict(figure)), flush=True)


def unequal(row: str, count: int, compared: int, executor: str = "") -> Figure:
    """How many rows, or logprobs, have other bits than they should."""
    return Figure("bits", row, f"{count:,} of {compared:,} unequal", executor=executor)


def figures_in(log: str) -> list[Figure]:
    """The figures in a part's output; of two with one name the later counts."""
    found: dict[tuple[str, str], Figure] = {}
    for line in log.splitlines():
        if not line.startswith('{"group"'):
            continue
        try:
            figure = Figure(**json.loads(line))
        except (ValueError, TypeError):  # the part was cut in the middle of it
            continue
        found[figure.group, figure.row] = figure
    return list(found.values())
