"""`motet score` and `motet rewards`: being the reward worker of jobs of a service, and the rewards that it has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

import motet
from motet.commands.answers import INTERRUPTED, print_answer, say, table
from motet.commands.options import AsJson, Key, Url

if TYPE_CHECKING:
    from motet.service.schemas import Job

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
    from motet.types import JobState

    async def work() -> list[Job]:
        async with motet.AsyncClient(url, key) as client:
            asked = [await client.job(name) for name in jobs]
            say(f"scoring {', '.join(f'{job.name} ({job.state})' for job in asked)} here; Ctrl-C ends it")
            await client.score(*(job.id for job in asked), reward=reward, processes=processes)
            return [await client.job(job.id) for job in asked]

    try:
        ended = asyncio.run(work())
    except KeyboardInterrupt:
        again = " ".join(["motet score", *jobs, *(f"--reward {one}" for one in reward)])
        say(f"the service goes on when somebody scores: `{again}`")
        raise typer.Exit(INTERRUPTED) from None
    for job in ended:
        say(f"{job.name} {job.state}{f': {job.message}' if job.message else ''}")
    raise typer.Exit(1 if any(job.state == JobState.FAILED for job in ended) else 0)


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
