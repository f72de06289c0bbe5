"""`motet compare` as a command; `compare.py` does what it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import Key, Url

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog="Example: motet compare runs/sweep; motet compare runs/before runs/after; motet compare sort sort-2"
)
def compare(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PLACE…",
            help="Run directories, directories of jobs in them, or jobs of the service; one run compares its settings.",
            show_default=False,
        ),
    ],
    svg: Annotated[Path | None, typer.Option(help="Draw the mean curves of what is compared into this file.")] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Compare runs, jobs or settings on the same held-out problems; says where it cannot tell which is better."""
    from motet.commands.compare import compare_places

    compare_places(places, svg, url, key)
