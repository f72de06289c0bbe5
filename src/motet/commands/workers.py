"""`motet score`, `motet rewards` and `motet agent`: work on this machine for jobs of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import motet
from motet.commands.answers import print_answer, same_command, say, table
from motet.commands.options import AsJson, Key, Override, Url
from motet.core.errors import ConfigError

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet score sort --reward rewards.py")
def score(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="Jobs, by name or id.", show_default=False)],
    reward: Annotated[
        list[str],
        typer.Option(metavar="FILE.py[:FUNCTION]", help="Your reward functions; you can repeat the option."),
    ],
    processes: Annotated[int, typer.Option(min=1, help="Processes that score.")] = 2,
    url: Url = None,
    key: Key = None,
) -> None:
    """Score jobs of a service on this machine until they end. After Ctrl-C, run the same command to continue."""
    from motet.commands import served_jobs

    with motet.Client(url, key) as client:
        asked = [client.job(job) for job in jobs]
    say(f"scoring {', '.join(f'{job.name} ({job.state})' for job in asked)} here{shown_sum(*reward)}; Ctrl-C stops it")
    raise typer.Exit(served_jobs.follow(url, key, asked, served_jobs.scoring(reward, processes), same_command()))


def shown_sum(*names: str) -> str:
    """A checksum of the code: a service cannot see the code, so a person compares it with that of the last start."""
    from motet.runtime.code_sums import CodeSums
    from motet.runtime.statements import short_sum, sums_in

    own = CodeSums()
    for name in names:
        own.add(name if ":" in name else f"{name}:")
    parts = [(label, sums_in(entry, reached=True) or entry.get("sha256")) for label, entry in own.entries().items()]
    return f" (code {short_sum(repr(parts))[:8]})" if parts else ""


@app.command(epilog="Example: motet rewards")
def rewards(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """List the rewards that jobs on a service may use."""
    with motet.Client(url, key) as client:
        known = client.rewards()
    rows = []
    for one in known:
        args = (name + (f"={value}" if value else " (required)") for name, value in one.parameters.items())
        rows.append((one.name, one.kind, ", ".join(args), one.summary))
    print_answer(known, as_json, table(rows, "reward, kind, args, about", empty="no rewards", folds=("args", "about")))


@app.command(epilog="Example: motet agent jobs.yaml --agent agent.py:run")
def agent(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|JOB", help="A job file, or jobs on the service by name or id.", show_default=False
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your agent [default: the `environment` of the job file].",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Episodes of a job that run at once.")] = 32,
    overrides: Override = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Run your agent on this machine for jobs of a service until they end.

    Submits the jobs of a file that the service does not have yet. After Ctrl-C, run the same command to continue.
    """
    from motet.commands import agent_jobs, served_jobs

    with motet.Client(url, key) as client:
        if len(jobs) == 1 and Path(jobs[0]).suffix in (".yaml", ".yml", ".json"):
            wanted, function = agent_jobs.of_file(client, Path(jobs[0]), overrides or [], agent)
        elif agent is None:
            raise ConfigError("name your agent function: --agent agent.py:run")
        else:
            wanted, function = [client.job(job) for job in jobs], agent
    jobs_here = ", ".join(f"{job.name} ({job.state})" for job in wanted)
    say(f"running {function}{shown_sum(function)} for {jobs_here} here; Ctrl-C stops it")
    work = agent_jobs.running(function, concurrency)
    raise typer.Exit(served_jobs.follow(url, key, wanted, work, same_command()))
