"""`motet demo`: the first run, from a job file that ships with Motet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import Override

app = typer.Typer(rich_markup_mode=None)
FILE = Path(__file__).resolve().parents[1] / "assets" / "demo.yaml"


@app.command(epilog="Example: motet demo --print > jobs.yaml; motet run jobs.yaml")
def demo(
    overrides: Override = None,
    directory: Annotated[Path, typer.Option("--run", help="Run directory.")] = Path("runs/demo"),
    show: Annotated[bool, typer.Option("--print", help="Print the job file and train nothing.")] = False,
) -> None:
    """Train four adapters at once on the small base that ships with Motet. Takes a minute on two cores, without network."""
    from motet.commands.run import run_file

    if show:
        typer.echo(FILE.read_text(), nl=False)
        raise typer.Exit
    raise typer.Exit(run_file(FILE, overrides or [], directory=directory))
