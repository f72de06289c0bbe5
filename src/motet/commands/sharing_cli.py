"""The commands push, adapters, share, unshare, shares and audit, for `motet.cli` to take in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motet.commands.options import AsJson, Key, Url

app = typer.Typer(rich_markup_mode=None)
Shared = Annotated[str, typer.Argument(help="A job or an uploaded adapter, by name or id.", show_default=False)]


@app.command(epilog="Example: motet push runs/jobs/sort/versions/v25 --name sort-v25")
def push(
    directory: Annotated[Path, typer.Argument(help="A PEFT LoRA directory.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="What to call it [default: an id that the service makes].")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Bring an adapter to a service, to start jobs from and to talk to; it is checked there against the base."""
    from motet.commands import remote, sharing

    sharing.push(remote.Where(url, key), directory, name, as_json=as_json)


adapters = typer.Typer(help="Show and remove uploaded adapters.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(adapters, name="adapters", epilog="Example: motet adapters ls")


@adapters.command("ls", epilog="Example: motet adapters ls")
def list_adapters(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show the adapters that were uploaded with `motet push`."""
    from motet.commands import remote, sharing

    sharing.list_adapters(remote.Where(url, key), as_json=as_json)


@adapters.command("rm", epilog="Example: motet adapters rm sort-v25")
def remove_adapter(
    name: Annotated[str, typer.Argument(help="Its name or id.", show_default=False)], url: Url = None, key: Key = None
) -> None:
    """Remove an uploaded adapter; jobs that started from it go on."""
    from motet.commands import remote, sharing

    sharing.remove_adapter(remote.Where(url, key), name)


@app.command(epilog="Example: motet share sort --with team-b")
def share(
    name: Shared,
    tenant: Annotated[str, typer.Option("--with", help="The other tenant's name; * for all.", show_default=False)],
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Let another tenant chat with an adapter, start from it and pull it. Nothing else of the job is seen."""
    from motet.commands import remote, sharing

    sharing.share(remote.Where(url, key), name, tenant, as_json=as_json)


@app.command(epilog="Example: motet unshare share-0123456789abcdef")
def unshare(
    share_id: Annotated[str, typer.Argument(help="Its id, as `motet shares` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """End a share; jobs that started from it go on."""
    from motet.commands import remote, sharing

    sharing.unshare(remote.Where(url, key), share_id)


@app.command(epilog="Example: motet shares")
def shares(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """Show what you share with others, and what others share with you."""
    from motet.commands import remote, sharing

    sharing.shares(remote.Where(url, key), as_json=as_json)


@app.command(epilog="Example: motet audit --tenant team-a")
def audit(
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant did.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="How many of the newest; 0 shows all.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show who changed what, newest first; needs an admin's key."""
    from motet.commands import remote, sharing

    sharing.audit(remote.Where(url, key), tenant, limit, as_json=as_json)
