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
            help="Run directories, job directories, or jobs on the service. One run compares its settings.",
            show_default=False,
        ),
    ],
    svg: Annotated[Path | None, typer.Option(help="Also draw the mean curves to this file.")] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Compare runs, jobs or settings on the same held-out problems, with confidence intervals."""
    from motet.commands.compare import compare_places

    compare_places(places, svg, url, key)
