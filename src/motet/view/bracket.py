"""The bracket of a race on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from motet.view.text import UNICODE, Glyphs


def bracket_table(
    name: str, headings: Iterable[str], rows: Iterable[Sequence[str]], verdict: str, glyphs: Glyphs = UNICODE
) -> Table:
    """The bracket with the verdict below."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left"
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "bold green" if row[-2] == "winner" else "bright_black" if "dropped" in row[-2] else ""
        table.add_row(*(Text(glyphs.plain(cell), style=style) for cell in row))
    table.title = Text(f"Race {glyphs.plain(name)}", style="bold")
    table.caption = Text(glyphs.plain(verdict), style="not italic not dim")
    return table
