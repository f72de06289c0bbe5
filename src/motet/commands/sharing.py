"""What push, adapters, share, unshare, shares and audit do."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from motet.client import Client
from motet.commands.remote import Where, show_json
from motet.commands.remote_view import table
from motet.service.schemas.adapters import Share


def push(where: Where, directory: Path, name: str | None, *, as_json: bool) -> None:
    """Upload an adapter and print its name."""
    with Client(where.url, where.key) as client:
        found = client.push(directory, name)
    if as_json:
        show_json(found)
    else:
        print(found.name)


def list_adapters(where: Where, *, as_json: bool) -> None:
    """A table of uploaded adapters."""
    with Client(where.url, where.key) as client:
        found = client.adapters()
    if as_json:
        show_json(found)
        return
    right = ("rank", "alpha", "MB")
    rows = table("name", "id", "rank", "alpha", "MB", "uploaded", folds=("name",), right=right)
    for one in found:
        cells = (one.name, one.id, str(one.rank), f"{one.alpha:g}", f"{one.bytes / 2**20:.1f}", _time(one.created))
        rows.add_row(*map(Text, cells))
    Console(emoji=False).print(rows if found else "no adapters")


def remove_adapter(where: Where, name: str) -> None:
    """Remove an uploaded adapter."""
    with Client(where.url, where.key) as client:
        client.delete_adapter(name)
    print(f"{name} is removed")


def share(where: Where, name: str, tenant: str, *, as_json: bool) -> None:
    """Share an adapter and say how the other tenant names it."""
    with Client(where.url, where.key) as client:
        found = client.share(name, tenant)
    if as_json:
        show_json(found)
        return
    whom = "all tenants" if found.tenant == "*" else found.tenant
    print(f"{found.id}: {whom} can use {found.owner}/{found.name}")


def unshare(where: Where, share_id: str) -> None:
    """End a share."""
    with Client(where.url, where.key) as client:
        client.unshare(share_id)
    print(f"{share_id} has ended")


def shares(where: Where, *, as_json: bool) -> None:
    """A table of what is shared."""
    with Client(where.url, where.key) as client:
        found = client.shares()
    if as_json:
        show_json(found)
        return
    rows = table("adapter", "with", "id", "since", folds=("adapter", "with"))
    known: dict[str, Share] = {one.id: one for one in (*found.given, *found.received)}
    for one in known.values():
        rows.add_row(*map(Text, (f"{one.owner}/{one.name}", one.tenant, one.id, _time(one.created))))
    Console(emoji=False).print(rows if known else "nothing is shared")


def audit(where: Where, tenant: str | None, limit: int, *, as_json: bool) -> None:
    """A table of changes, newest first."""
    with Client(where.url, where.key) as client:
        found = list(itertools.islice(client.audit(tenant), limit or None))
    if as_json:
        show_json(found)
        return
    rows = table("time", "tenant", "key", "what", "of", folds=("tenant", "key", "of"))
    for one in found:
        rows.add_row(*map(Text, (_time(one.time), one.tenant, one.key_name or one.key, one.action, one.object)))
    Console(emoji=False).print(rows if found else "nothing was changed yet")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
