"""`motet push`, `adapters`, `share`, `unshare`, `shares` and `audit`: adapters of a service, and who may use them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Annotated

import typer

import motet
from motet.commands.answers import minute, print_answer, say_untrained_of, table
from motet.commands.options import AsJson, Key, Url
from motet.commands.overview import WholeSentences
from motet.core.errors import ServiceError

app = typer.Typer(rich_markup_mode=None)
Shared = Annotated[str, typer.Argument(help="A job or an uploaded adapter, by name or id.", show_default=False)]


@app.command(epilog="Example: motet push runs/jobs/sort/versions/v25 --name sort-v25")
def push(
    directory: Annotated[Path, typer.Argument(help="A PEFT LoRA directory.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="The adapter's name [default: an id from the service].")] = None,
    base: Annotated[str | None, typer.Option(help="Its base, if the service has several [default: the first].")] = None,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Upload an adapter to a service, to start jobs from or chat with. The service checks that it fits the base."""
    with motet.Client(url, key) as client:
        adapter = client.push(directory, name, base)
    print_answer(adapter, as_json, adapter.name)


adapters = typer.Typer(
    cls=WholeSentences, help="List and remove uploaded adapters.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(adapters, name="adapters", epilog="Example: motet adapters ls")


@adapters.command("ls", epilog="Example: motet adapters ls")
def list_adapters(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """List the adapters that were uploaded with `motet push`."""
    with motet.Client(url, key) as client:
        known = client.adapters()
    rows = [
        (one.name, one.id, str(one.rank), f"{one.alpha:g}", f"{one.bytes / 2**20:.1f}", minute(one.created),
         one.submitter or "–")
        for one in known
    ]  # fmt: skip
    headings = "name, id, >rank, >alpha, >MB, uploaded, by"
    print_answer(known, as_json, table(rows, headings, empty="no adapters", folds=("name", "by")))


@adapters.command("rm", epilog="Example: motet adapters rm sort-v25")
def remove_adapter(
    name: Annotated[str, typer.Argument(help="Its name or id.", show_default=False)], url: Url = None, key: Key = None
) -> None:
    """Remove an uploaded adapter. Jobs that started from it continue."""
    with motet.Client(url, key) as client:
        client.delete_adapter(name)
    typer.echo(f"{name} is removed")


@app.command(epilog="Example: motet share sort --with team-b")
def share(
    name: Shared,
    tenant: Annotated[str, typer.Option("--with", help="The other tenant's name; * for all.", show_default=False)],
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Let another tenant chat with an adapter, start from it and pull it. They see nothing else of the job."""
    with motet.Client(url, key) as client:
        made = client.share(name, tenant)
        with contextlib.suppress(ServiceError):  # an uploaded adapter, which lists no versions
            say_untrained_of(client.versions(name), "best")
    whom = "all tenants" if made.tenant == "*" else made.tenant
    print_answer(made, as_json, f"{made.id}: {whom} can use {made.owner}/{made.name}")


@app.command(epilog="Example: motet unshare share-0123456789abcdef")
def unshare(
    share_id: Annotated[str, typer.Argument(help="Its id, as `motet shares` shows it.", show_default=False)],
    url: Url = None,
    key: Key = None,
) -> None:
    """End a share. Jobs that started from it continue."""
    with motet.Client(url, key) as client:
        client.unshare(share_id)
    typer.echo(f"{share_id} has ended")


@app.command(epilog="Example: motet shares")
def shares(as_json: AsJson = False, url: Url = None, key: Key = None) -> None:
    """List what you share with others and what they share with you."""
    with motet.Client(url, key) as client:
        known = client.shares()
    by_id = {one.id: one for one in (*known.given, *known.received)}
    rows = [(f"{one.owner}/{one.name}", one.tenant, one.id, minute(one.created)) for one in by_id.values()]
    headings = "adapter, with, id, since"
    print_answer(known, as_json, table(rows, headings, empty="nothing is shared", folds=("adapter", "with")))


@app.command(epilog="Example: motet audit --tenant team-a")
def audit(
    tenant: Annotated[str | None, typer.Option(help="Only changes by this tenant.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="The number of newest changes to show; 0 shows all.")] = 50,
    as_json: AsJson = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """List who changed what, newest first. Needs an admin key."""
    with motet.Client(url, key) as client:
        changes = list(itertools.islice(client.audit(tenant), limit or None))
    rows = [
        (minute(one.time), one.tenant, one.submitter or "–", one.key_name or one.key, one.action, one.object)
        for one in changes
    ]
    headings, empty = "time, tenant, by, key, what, of", "nothing was changed yet"
    print_answer(changes, as_json, table(rows, headings, empty=empty, folds=("tenant", "by", "key", "of")))
