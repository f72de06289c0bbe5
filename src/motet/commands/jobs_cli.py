"""Commands that submit jobs to a service and look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import AsJson, JobFile, Key, Override, ServedJob, Url

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet submit jobs.yaml --set steps=100 --follow")
def submit(
    jobs: JobFile,
    overrides: Override = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show steps until all jobs have ended.")] = False,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="Start after this job has succeeded; may be given several times."),
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start at a time, e.g. 2026-12-01T08:00 (of this machine).")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py[:FUNCTION]",
            help="Score on this machine with these functions, until all jobs have ended; may be given several times.",
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Submit all jobs of a file to a service. Its data files are uploaded; the exit code is 1 where a followed job failed."""
    from motet.commands import remote

    where = remote.Where(url, key)
    raise typer.Exit(
        remote.submit(
            where,
            jobs,
            overrides or [],
            follow=follow,
            as_json=as_json,
            after=after or (),
            at=at,
            rewards=reward or (),
        )
    )


@app.command(epilog="Example: motet ls --state running")
def ls(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many of the newest; 0 shows all.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show the jobs of a service, newest first."""
    from motet.commands import remote

    remote.ls(remote.Where(url, key), state, limit, as_json=as_json)


@app.command(epilog="Example: motet show sort")
def show(job: ServedJob, as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show one job of a service and the versions of its adapter."""
    from motet.commands import remote

    remote.show(remote.Where(url, key), job, as_json=as_json)


@app.command(epilog="Example: motet logs sort -f")
def logs(
    job: ServedJob,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show what happened to a job of a service, a line each. The exit code is 1 where a followed job failed."""
    from motet.commands import remote

    raise typer.Exit(remote.logs(remote.Where(url, key), job, follow=follow, as_json=as_json))


@app.command(epilog="Example: motet delete sort")
def delete(job: ServedJob, url: Url = None, key: Key = None) -> None:
    """Forget a job that has ended, with its versions, rollouts and events. It cannot be brought back."""
    from motet.commands import remote

    remote.delete(remote.Where(url, key), job)


@app.command(epilog="Example: motet pull sort --version latest --to adapters")
def pull(
    job: Annotated[
        str, typer.Argument(help="A job, an uploaded adapter, or tenant/job of a share.", show_default=False)
    ],
    version: Annotated[str | None, typer.Option(help="Of a job: `best`, `latest` or a number [default: best].")] = None,
    to: Annotated[Path, typer.Option(help="Where to put the directory.")] = Path("."),
    url: Url = None,
    key: Key = None,
) -> None:
    """Take an adapter home: the PEFT directory <job>-v<version>, or an uploaded one under its name."""
    from motet.commands import remote

    remote.pull(remote.Where(url, key), job, version, to)
