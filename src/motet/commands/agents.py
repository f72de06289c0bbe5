"""`motet agent`: running the agent of jobs of a service on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import motet
from motet.commands.answers import same_command, say
from motet.commands.options import Key, Override, Url
from motet.errors import ConfigError

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet agent jobs.yaml --agent agent.py:run")
def agent(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|JOB", help="A job file, or jobs of the service by name or id.", show_default=False
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your agent; a job file's `environment` may name it too.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="How many episodes of a job run at once.")] = 32,
    overrides: Override = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Run your agent on this machine for jobs of a service until they have ended.

    Jobs of a file are submitted where the service has none of their name. After Ctrl-C they wait for the same command again.
    """
    from motet.commands import agent_jobs, served_jobs

    with motet.Client(url, key) as client:
        if len(jobs) == 1 and Path(jobs[0]).suffix in (".yaml", ".yml", ".json"):
            wanted, function = agent_jobs.of_file(client, Path(jobs[0]), overrides or [], agent)
        elif agent is None:
            raise ConfigError("name the function with your agent: --agent agent.py:run")
        else:
            wanted, function = [client.job(name) for name in jobs], agent
    say(f"running {function} for {', '.join(f'{job.name} ({job.state})' for job in wanted)} here; Ctrl-C ends it")
    raise typer.Exit(served_jobs.follow(url, key, wanted, agent_jobs.Work(function, concurrency, same_command())))
