"""`motet usage`, `limits`, `tenants` and `keys`: usage of a service, limits of tenants, and keys."""

from __future__ import annotations

import math
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import motet
from motet.commands.answers import day, print_answer, say, table
from motet.commands.options import AsJson, Key, Url
from motet.commands.overview import WholeSentences
from motet.core.errors import ConfigError

if TYPE_CHECKING:
    from motet.service.schemas.usage import By, TenantInfo, UsageLine

app = typer.Typer(rich_markup_mode=None)
key_app = typer.Typer(rich_markup_mode=None)


class _By(StrEnum):
    """`schemas.usage.By`, in a form for repeated options of typer."""

    JOB = "job"
    DAY = "day"
    TENANT = "tenant"
    BASE = "base"
    KEY = "key"


class _Right(StrEnum):
    """The values of a key's scope."""

    READ = "read"
    JOBS = "jobs"
    COMPLETIONS = "completions"
    FILES = "files"


@app.command(epilog="Example: motet usage --by day --since 2026-03-01 --csv > usage.csv")
def usage(
    by: Annotated[
        list[_By] | None,
        typer.Option(help="How to group the lines; you can repeat the option.", show_default="job"),
    ] = None,
    since: Annotated[str | None, typer.Option(metavar="DAY", help="The first day, e.g. 2026-03-01 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(metavar="DAY", help="The last day (UTC).")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant [default for admins: all].")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show the tokens and device time that a service used, by job unless you set --by; --by key is by person or key."""
    groups: list[By] = [one.value for one in by or [_By.JOB]]
    with motet.Client(url, key) as client:
        if as_csv:
            typer.echo(client.usage_csv(groups, since, until, tenant), nl=False)
            return
        lines = client.usage(groups, since, until, tenant)
    days, based = any(line.day for line in lines), any(line.base for line in lines)
    named = "key" in groups
    rows = [
        ([line.day or ""] if days else [])
        + _usage_cells(line)
        + ([line.base or ""] if based else [])
        + ([line.submitter or "–"] if named else [])
        for line in lines
    ]
    headings = ("day, " if days else "") + "tenant, job, >prompts, >sampled, >trained, >device, >cpu"
    headings += ", base" * based + ", by" * named
    folds = ("job", "tenant", "base", "by")
    print_answer(lines, as_json, table(rows, headings, empty="nothing was used", folds=folds))


def _usage_cells(line: UsageLine) -> list[str]:
    from motet.observe.text import duration_text

    what = line.name or {"completions": "(completions)", "idle": "(idle)"}.get(line.kind, "")
    tokens = (line.tokens_prompt, line.tokens_sampled, line.tokens_trained)
    return [
        line.tenant or "",
        what,
        *(f"{n:,}" for n in tokens),
        *map(duration_text, (line.device_seconds, line.cpu_seconds)),
    ]


@app.command(epilog="Example: motet limits")
def limits(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show the limits of your tenant on a service, and what is left of them."""
    with motet.Client(url, key) as client:
        info = client.limits()
    rows = [
        (name, "none" if most is None else _number(most), _number(info.left.get(name)))
        for name, most in info.limits.model_dump().items()
    ]
    print_answer(info, as_json, table(rows, "limit, >most, >left", empty=""))


def _number(value: str | float | None) -> str:
    return f"{value:,.1f}".removesuffix(".0") if isinstance(value, int | float) else value or ""


tenants = typer.Typer(
    cls=WholeSentences, help="List tenants and set their limits.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(tenants, name="tenants", epilog="Example: motet tenants limit team-a --tokens-per-day 50000000")


@tenants.command("ls", epilog="Example: motet tenants ls")
def list_tenants(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """List all tenants with their limits and usage. Needs an admin key."""
    with motet.Client(url, key) as client:
        known = client.tenants()
    headings = "tenant, >running, >waiting, >tokens today, >MB, >rank, >steps, priority, >share"
    print_answer(known, as_json, table(map(_tenant_cells, known), headings, empty="no tenants", folds=("tenant",)))


def _tenant_cells(one: TenantInfo) -> list[str]:
    limits = one.limits

    def of(used: str, most: object) -> str:
        return used if most is None else f"{used}/{most}"

    return [
        one.name,
        of(str(one.running), limits.running_jobs),
        of(str(one.waiting), limits.queued_jobs),
        of(f"{one.tokens_today:,}", None if limits.tokens_per_day is None else f"{limits.tokens_per_day:,}"),
        of(f"{one.stored_bytes / 2**20:.1f}", None if limits.storage_mb is None else f"{limits.storage_mb:g}"),
        "" if limits.rank is None else str(limits.rank),
        "" if limits.steps is None else str(limits.steps),
        limits.priority or "",
        f"{limits.share:g}",
    ]


@tenants.command("limit", epilog="Example: motet tenants limit team-a --running-jobs 2 --tokens-per-day none")
def set_limits(
    ctx: typer.Context,
    tenant: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)],
    running_jobs: Annotated[str | None, typer.Option(metavar="N", help="Jobs that run at once; more wait.")] = None,
    queued_jobs: Annotated[str | None, typer.Option(metavar="N", help="Jobs that may wait in addition.")] = None,
    client_models: Annotated[str | None, typer.Option(metavar="N", help="Open models of Tinker clients.")] = None,
    open_samples: Annotated[str | None, typer.Option(metavar="N", help="Open completions of Tinker samples.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="N", help="The largest rank.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="The largest number of steps of a job.")] = None,
    step_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="The most tokens of a step, or `auto`: what the base does in ten minutes."),
    ] = None,
    tokens_per_day: Annotated[str | None, typer.Option(metavar="N", help="Tokens per day (UTC).")] = None,
    storage_mb: Annotated[str | None, typer.Option(metavar="MB", help="Everything stored for the tenant.")] = None,
    cpu_seconds: Annotated[str | None, typer.Option(metavar="S", help="The largest cpu_seconds of a reward.")] = None,
    wall_seconds: Annotated[
        str | None, typer.Option(metavar="S", help="The largest wall_seconds of a reward or an agent's episode.")
    ] = None,
    memory_mb: Annotated[str | None, typer.Option(metavar="MB", help="The largest memory_mb of a reward.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="CLASS", help="The highest priority: low, normal or high.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(metavar="WEIGHT", help="The weight: twice the share gets twice the tokens.")
    ] = None,
    device_seconds_per_day: Annotated[
        str | None, typer.Option(metavar="S", help="Device seconds per day (UTC).")
    ] = None,
    cpu_seconds_per_day: Annotated[
        str | None, typer.Option(metavar="S", help="CPU seconds of rewards per day (UTC).")
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Set limits of a tenant: a value, `none` for no limit, or `default` for the service's. Needs an admin key."""
    from motet.config.service import LimitsConfig

    # each limit is an option of the same name
    changes = {name: value for name in LimitsConfig.model_fields if (value := ctx.params[name]) is not None}
    if not changes:
        raise ConfigError(f"say what to change, such as: motet tenants limit {tenant} --running-jobs 2")
    with motet.Client(url, key) as client:
        known = next((one for one in client.tenants() if one.name == tenant), None)
        if known is None:
            raise ConfigError(f"there is no tenant {tenant!r}; motet keys create {tenant} makes one")
        own = {name: getattr(known.limits, name) for name in known.own if changes.get(name) != "default"}
        own |= {name: _limit(name, value) for name, value in changes.items() if value != "default"}
        changed = client.set_limits(tenant, own)
    limits = {name: getattr(changed.limits, name) for name in LimitsConfig.model_fields}
    text = ", ".join(f"{name} {'none' if most is None else most}" for name, most in limits.items())
    print_answer(changed, as_json, f"{tenant}: {text}")


@tenants.command("erase", epilog="Example: motet tenants erase team-a --yes")
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Delete a tenant with its keys, jobs, adapters and files. This cannot be undone. Needs an admin key."""
    if not yes:
        typer.confirm(f"delete {tenant!r} with all its keys, jobs, adapters and files?", abort=True)
    with motet.Client(url, key) as client:
        while not (state := client.erase_tenant(tenant)).erased:
            say(f"{state.open_jobs} jobs have not ended yet …", aside=True)
            time.sleep(1.0)
    typer.echo(f"{tenant} is erased")


_FRACTIONS = ("share", "storage_mb", "cpu_seconds", "wall_seconds", "device_seconds_per_day", "cpu_seconds_per_day")


def _limit(name: str, text: str) -> str | float | int | None:
    if text == "none":
        return None
    if name == "priority" or (name, text) == ("step_tokens", "auto"):
        return text
    try:
        number: float = int(text) if name not in _FRACTIONS else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--{name.replace('_', '-')} {text!r} must be a number, `none` or `default`")
    return number


keys = typer.Typer(
    cls=WholeSentences,
    help="Create, list and revoke the API keys of a service.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
key_app.add_typer(keys, name="keys", epilog="Example: motet keys create team-a --name laptop")


@keys.command("create", epilog="Example: motet keys create team-a --name laptop --expires-days 90")
def create_key(
    tenant: Annotated[
        str | None, typer.Argument(help="The key's tenant [default: yours]. Only an admin may name another.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    role: Annotated[
        Literal["reader", "member", "tenant-admin", "admin"],
        typer.Option(
            help="What the key may do. `tenant-admin` manages the tenant's keys; `admin` manages all tenants."
        ),
    ] = "member",
    scope: Annotated[
        list[_Right] | None,
        typer.Option(help="Restrict the key; you can repeat the option [default: everything its role may do]."),
    ] = None,
    expires_days: Annotated[float | None, typer.Option(help="Days until the key expires [default: never].")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Create a key and print it; it is shown only once. It ends with your key, unless yours is an admin key."""
    if expires_days is not None and not math.isfinite(expires_days):
        raise ConfigError(
            f"--expires-days {expires_days}: give a number of days, or leave it out for a key without end"
        )
    with motet.Client(url, key) as client:
        made = client.create_key(tenant, name, role, expires_days, [one.value for one in scope] if scope else None)
    print_answer(made, as_json, made.key)
    if not as_json:
        say(f"{made.id}, {role} of {made.tenant}; it is shown only once", aside=True)


@keys.command("ls", epilog="Example: motet keys ls")
def list_keys(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """List your key and the keys that you made with it. An admin sees all."""
    with motet.Client(url, key) as client:
        known = client.keys()
    rows = []
    for one in known:
        state = "in use"
        if one.revoked is not None:
            state = "revoked"
        elif one.expires is not None:
            state = "expired" if one.expires <= time.time() else f"until {day(one.expires)}"
        role = one.role if one.scope is None else f"{one.role}: {' '.join(one.scope)}"
        role += " (sign-in)" if one.signed_in else ""
        name = one.name if one.submitter in (None, one.name, one.id) else f"{one.name} (of {one.submitter})"
        rows.append((one.id, one.tenant, name, role, day(one.created), state))
    headings = "id, tenant, name, role, made, state"
    print_answer(known, as_json, table(rows, headings, empty="no keys", folds=("tenant", "name", "role")))


@keys.command("revoke", epilog="Example: motet keys revoke key-0123456789abcdef")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `motet keys ls` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """Revoke a key and the keys made with it."""
    with motet.Client(url, key) as client:
        client.revoke_key(key_id)
    typer.echo(f"{key_id} is refused from now on")


@keys.command("rotate", epilog="Example: motet keys rotate key-0123456789abcdef")
def rotate_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `motet keys ls` shows it.", show_default=False)],
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Replace a key by a new one with the same name and rights, and print it; it is shown only once."""
    with motet.Client(url, key) as client:
        made = client.rotate_key(key_id)
    print_answer(made, as_json, made.key)
    if not as_json:
        say(f"{made.id} takes the place of {key_id}", aside=True)
