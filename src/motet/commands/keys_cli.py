"""`motet keys`: make, show and end API keys."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from motet.commands.options import AsJson, Key, Url

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
    from motet.commands import remote

    remote.create_key(remote.Where(url, key), tenant, name, role, expires_days, as_json=as_json)


@keys.command("ls", epilog="Example: motet keys ls")
def list_keys(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show all keys, without their texts; needs an admin's key."""
    from motet.commands import remote

    remote.list_keys(remote.Where(url, key), as_json=as_json)


@keys.command("revoke", epilog="Example: motet keys revoke key-0123456789abcdef")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `motet keys ls` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """End a key; it is refused from now on. Needs an admin's key."""
    from motet.commands import remote

    remote.revoke_key(remote.Where(url, key), key_id)
