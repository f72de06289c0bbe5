"""The commands score and rewards, for `motet.cli` to take in."""

from __future__ import annotations

from typing import Annotated

import typer

from motet.commands.options import AsJson, Key, Url

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet score sort --reward rewards.py")
def score(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="Jobs, by name or id.", show_default=False)],
    reward: Annotated[
        list[str],
        typer.Option(metavar="FILE.py[:FUNCTION]", help="Your reward functions; may be given several times."),
    ],
    processes: Annotated[int, typer.Option(min=1, help="How many score at a time.")] = 2,
    url: Url = None,
    key: Key = None,
) -> None:
    """Score jobs of a service on this machine until they have ended. After Ctrl-C they wait for the same command again."""
    from motet.commands import remote, scoring

    raise typer.Exit(scoring.score(remote.Where(url, key), jobs, reward, processes))


@app.command(epilog="Example: motet rewards")
def rewards(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show the rewards that jobs of a service may use: built in, installed there, and scored elsewhere."""
    from motet.commands import remote, scoring

    scoring.list_rewards(remote.Where(url, key), as_json=as_json)
