"""`motet submit`, `ls`, `show`, `logs`, `delete` and `pull`: jobs of a service."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Annotated

import typer

import motet
from motet.commands.answers import INTERRUPTED, command_for, print_answer, say, say_untrained_of, table
from motet.commands.options import AsJson, JobFile, Key, Override, ServedJob, Url
from motet.core.errors import ConfigError, ServiceError

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet submit jobs.yaml --set steps=100 --follow")
def submit(
    jobs: JobFile,
    overrides: Override = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Show steps until all jobs end. Ctrl-C stops following; the jobs keep running."
        ),
    ] = False,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", help="Start after this job has succeeded; you can repeat the option."),
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Start at this local time, e.g. 2026-12-01T08:00.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py[:FUNCTION]",
            help="Score on this machine with these functions until all jobs end; you can repeat the option.",
        ),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Submit all jobs of a file to a service and upload their data. The exit code is 1 if a followed job fails."""
    from motet.client.reward_files import RewardFiles
    from motet.commands import served_jobs
    from motet.config.jobfile import load_jobs

    config = load_jobs(jobs, overrides or [])
    to_submit = RewardFiles(reward).for_service(config.jobs) if reward else config.jobs
    with motet.Client(url, key) as client:
        base = served_jobs.base_meant(config, client.health(), jobs)
        submitted = served_jobs.submit(client, to_submit, after=after or (), at=at, base=base, quiet=as_json)
        try:
            if reward:
                given = [word for file in reward for word in ("--reward", file)]
                again = command_for(url, "score", *(job.name for job in submitted), *given)
                work = served_jobs.scoring(reward)
                raise typer.Exit(served_jobs.follow(url, key, submitted, work, again, aside=as_json))
            if follow:
                raise typer.Exit(served_jobs.follow(url, key, submitted, aside=as_json))
        finally:
            if as_json:
                print_answer([client.job(job.id) for job in submitted] if follow or reward else submitted, True, "")


@app.command(epilog="Example: motet ls --state running")
def ls(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="The number of newest jobs to show; 0 shows all.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """List the jobs of a service, newest first."""
    from motet.commands.served_jobs import job_cells, owner_of
    from motet.core.types import JobState

    if state is not None and state not in list(JobState):
        raise ConfigError(f"there is no state {state!r}; there are {', '.join(JobState)}")
    with motet.Client(url, key) as client:
        newest = client.jobs(state)
        listed = list(itertools.islice(newest, limit or None))
        more = bool(limit) and next(newest, None) is not None
    based, named = any(job.base for job in listed), any(job.submitter for job in listed)
    owned = any(map(owner_of, listed))
    rows = [job_cells(job, based=based, named=named, owned=owned) for job in listed]
    headings = "job, state, >steps, >reward, best, >age" + ", base" * based + ", by" * named + ", tenant" * owned
    print_answer(listed, as_json, table(rows, headings, empty="no jobs", folds=("job", "by")))
    if more and not as_json:
        say(f"the newest {limit}; --limit 0 shows all")


@app.command(epilog="Example: motet show sort")
def show(job: ServedJob, as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show one job of a service and the versions of its adapter."""
    from motet.commands.served_jobs import details

    with motet.Client(url, key) as client:
        asked = client.job(job)
        versions = client.versions(job)
        answer = {
            **asked.model_dump(mode="json"),
            "versions": [version.model_dump(mode="json") for version in versions],
        }
        print_answer(answer, as_json, "" if as_json else details(asked, versions, list(client.events(asked.id))))


@app.command(epilog="Example: motet logs sort -f")
def logs(
    job: ServedJob,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show the events of a job on a service. The exit code is 1 if a followed job fails."""
    from motet.commands.served_jobs import JobLines
    from motet.core.types import JobState

    with motet.Client(url, key) as client:
        asked = client.job(job)
        lines = JobLines([asked], history=True)
        try:
            for event in client.events(asked.id, follow=follow):
                if as_json:
                    print(event.model_dump_json(), flush=True)
                else:
                    lines.see(asked, event)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(1 if follow and client.job(asked.id).state == JobState.FAILED else 0)


@app.command(epilog="Example: motet delete sort")
def delete(job: ServedJob, url: Url = None, key: Key = None) -> None:
    """Delete an ended job with its versions, rollouts and events. This cannot be undone."""
    with motet.Client(url, key) as client:
        client.delete(job)
    typer.echo(f"{job} is forgotten, with its files")


@app.command(epilog="Example: motet pull sort --version latest --to adapters")
def pull(
    job: Annotated[
        str, typer.Argument(help="A job, an uploaded adapter, or a shared one (tenant/job).", show_default=False)
    ],
    version: Annotated[
        str | None, typer.Option(help="`best`, `latest` or a number [default: best]; for jobs only.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Where to write the directory.")] = Path("."),
    url: Url = None,
    key: Key = None,
) -> None:
    """Download an adapter as the PEFT directory <job>-v<version>, or an uploaded one under its name."""
    with motet.Client(url, key) as client:
        typer.echo(client.pull(job, version, to))
        with contextlib.suppress(ServiceError):  # a share or an uploaded adapter, which list no versions
            say_untrained_of(client.versions(job), version or "best")
