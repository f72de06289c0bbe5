"""`motet keys`: make, show and end API keys."""

from __future__ import annotations

import math
import time
from typing import Annotated, Literal

import typer

import motet
from motet.commands.answers import day, print_answer, say, table
from motet.commands.options import AsJson, Key, Url
from motet.errors import ConfigError

app = typer.Typer(rich_markup_mode=None)
keys = typer.Typer(help="Make, show and end the API keys of a service.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys", epilog="Example: motet keys create team-a --name laptop")


@keys.command("create", epilog="Example: motet keys create team-a --name laptop --expires-days 90")
def create_key(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; made where there is none of the name.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    role: Annotated[
        Literal["admin", "member"], typer.Option(help="Admins see the jobs of all tenants and make keys.")
    ] = "member",
    expires_days: Annotated[float | None, typer.Option(help="Days until it ends; never unless given.")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Make a key and print it, this once; needs an admin's key."""
    if expires_days is not None and not math.isfinite(expires_days):
        raise ConfigError("--expires-days is a number of days; without it the key never ends")
    with motet.Client(url, key) as client:
        made = client.create_key(tenant, name, role, expires_days)
    print_answer(made, as_json, made.key)
    if not as_json:
        say(f"{made.id}, {role} of {made.tenant}; it is shown this once", aside=True)


@keys.command("ls", epilog="Example: motet keys ls")
def list_keys(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show all keys, without their texts; needs an admin's key."""
    with motet.Client(url, key) as client:
        known = client.keys()
    rows = []
    for one in known:
        state = "in use"
        if one.revoked is not None:
            state = "revoked"
        elif one.expires is not None:
            state = "expired" if one.expires <= time.time() else f"until {day(one.expires)}"
        rows.append((one.id, one.tenant, one.name, one.role, day(one.created), state))
    headings = "id, tenant, name, role, made, state"
    print_answer(known, as_json, table(rows, headings, empty="no keys", folds=("tenant", "name")))


@keys.command("revoke", epilog="Example: motet keys revoke key-0123456789abcdef")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `motet keys ls` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """End a key; it is refused from now on. Needs an admin's key."""
    with motet.Client(url, key) as client:
        client.revoke_key(key_id)
    typer.echo(f"{key_id} is refused from now on")
