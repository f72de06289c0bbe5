"""`motet backup` and `restore`: for those who run services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from motet.service.backup import Copied, Progress

app = typer.Typer(rich_markup_mode=None)
Database = Annotated[str | None, typer.Option(help="postgresql://… [default: the SQLite file in the directory].")]


@app.command(epilog="Example: motet backup backups/monday --directory served")
def backup(
    target: Annotated[Path, typer.Argument(help="A new directory for the backup.", show_default=False)],
    directory: Annotated[Path, typer.Option(help="The service's directory.")] = Path("served"),
    database: Database = None,
) -> None:
    """Back up a service's database, jobs and files. The service can keep running."""
    from motet.service.backup import back_up

    _with_progress(lambda progress: back_up(directory, target, database or "", progress), f"copied to {target}")


@app.command(epilog="Example: motet restore backups/monday --directory served-again")
def restore(
    backup: Annotated[Path, typer.Argument(help="A directory that `motet backup` wrote.", show_default=False)],
    directory: Annotated[Path, typer.Option(help="The service's new directory.", show_default=False)],
    database: Database = None,
) -> None:
    """Restore a backup to a new directory. Start `motet serve` on it to continue the jobs that had not ended."""
    from motet.service import backup as copies

    start = f"motet serve --directory {directory}{' --database …' if database else ''}"
    done = f"restored; put the service's secret.key into {directory}, then start it: {start}"
    _with_progress(lambda progress: copies.restore(backup, directory, database or "", progress), done)


def _with_progress(work: Callable[[Progress], Copied], done: str) -> None:
    from motet.observe.text import plain_console

    with plain_console(stderr=True).status("copying …") as status:
        copied = work(lambda place: status.update(f"copying {place} …"))
    typer.echo(f"{len(copied.files)} files, {copied.jobs} jobs, {copied.bytes / 2**20:.1f} MB {done}")
