"""The commands usage and tenants, for `motet.cli` to take in."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from motet.commands.options import AsJson, Key, Url

app = typer.Typer(rich_markup_mode=None)


class _By(StrEnum):
    """`schemas.usage.By`, in a form that typer takes several of."""

    JOB = "job"
    DAY = "day"
    TENANT = "tenant"


@app.command(epilog="Example: motet usage --by day --since 2026-03-01 --csv > usage.csv")
def usage(
    by: Annotated[
        list[_By] | None,
        typer.Option(help="What gets lines of its own; may be given several times.", show_default="job"),
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="DAY", help="The first day, e.g. 2026-03-01 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="The last day.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose; admins see all tenants without it.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show tokens and device time of a service, by job unless told otherwise."""
    from motet.commands import remote
    from motet.commands import usage as commands

    form: Literal["table", "csv", "json"] = "csv" if as_csv else "json" if as_json else "table"
    commands.show(remote.Where(url, key), [one.value for one in by or [_By.JOB]], since, until, tenant, form)


tenants = typer.Typer(help="Show tenants and set their limits.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tenants, name="tenants", epilog="Example: motet tenants limit team-a --tokens-per-day 50000000")


@tenants.command("ls", epilog="Example: motet tenants ls")
def list_tenants(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show all tenants with their limits and what they use of them; needs an admin's key."""
    from motet.commands import remote
    from motet.commands import usage as commands

    commands.list_tenants(remote.Where(url, key), as_json=as_json)


@tenants.command("limit", epilog="Example: motet tenants limit team-a --running-jobs 2 --tokens-per-day none")
def set_limits(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)],
    running_jobs: Annotated[str | None, typer.Option(metavar="N", help="Jobs that run at once; more wait.")] = None,
    queued_jobs: Annotated[str | None, typer.Option(metavar="N", help="Jobs that wait besides those.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="N", help="The largest rank.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="The most steps of a job.")] = None,
    tokens_per_day: Annotated[str | None, typer.Option(metavar="N", help="Tokens on one day (UTC).")] = None,
    storage_mb: Annotated[str | None, typer.Option(metavar="MB", help="Files and saved versions.")] = None,
    cpu_seconds: Annotated[str | None, typer.Option(metavar="S", help="The most cpu_seconds of a reward.")] = None,
    wall_seconds: Annotated[str | None, typer.Option(metavar="S", help="The most wall_seconds of a reward.")] = None,
    memory_mb: Annotated[str | None, typer.Option(metavar="MB", help="The most memory_mb of a reward.")] = None,
    priority: Annotated[str | None, typer.Option(metavar="CLASS", help="The highest: low, normal or high.")] = None,
    share: Annotated[str | None, typer.Option(metavar="WEIGHT", help="With twice the share, twice the tokens.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Set some limits of a tenant; `none` is no limit, `default` the service's. Needs an admin's key."""
    from motet.commands import remote
    from motet.commands import usage as commands

    given = {
        "running_jobs": running_jobs, "queued_jobs": queued_jobs, "rank": rank, "steps": steps,
        "tokens_per_day": tokens_per_day, "storage_mb": storage_mb, "priority": priority, "share": share,
        "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "memory_mb": memory_mb,
    }  # fmt: skip
    commands.set_limits(remote.Where(url, key), tenant, given, as_json=as_json)
