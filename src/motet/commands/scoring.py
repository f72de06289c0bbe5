"""`motet score` and `motet rewards`: being the reward worker of jobs of a service, and the rewards that it has."""

from __future__ import annotations

from typing import Annotated

import typer

import motet
from motet.commands.answers import print_answer, same_command, say, table
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
    from motet.commands import served_jobs

    with motet.Client(url, key) as client:
        asked = [client.job(name) for name in jobs]
    say(f"scoring {', '.join(f'{job.name} ({job.state})' for job in asked)} here; Ctrl-C ends it")
    raise typer.Exit(served_jobs.follow(url, key, asked, served_jobs.ScoringWork(reward, same_command(), processes)))


@app.command(epilog="Example: motet rewards")
def rewards(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show the rewards that jobs of a service may use: built in, installed there, and scored elsewhere."""
    with motet.Client(url, key) as client:
        known = client.rewards()
    rows = []
    for one in known:
        args = (name + (f"={value}" if value else " (required)") for name, value in one.parameters.items())
        rows.append((one.name, one.kind, ", ".join(args), one.summary))
    print_answer(known, as_json, table(rows, "reward, kind, args, about", empty="no rewards", folds=("args", "about")))
