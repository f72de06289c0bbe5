"""Prints a service's answers as tables or lines for people, or as JSON for programs; and commands to type next.

`motet --help` imports this module, so rich and pydantic are imported only when something is printed.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from motet.service.schemas import Version

INTERRUPTED = 130
_LOG_WIDTH = 160
"""Width of a table that is written to a file or a pipe."""


def same_command() -> str:
    """The command as it was typed, without its key."""
    typed = itertools.pairwise(["motet", *sys.argv[1:]])
    words = [word for before, word in typed if "--key" not in (before, word) and not word.startswith("--key=")]
    return shlex.join(["motet", *words])


def command_for(url: str | None, *words: str) -> str:
    """A command for the same service, to type next."""
    known = url is None or url == os.environ.get("MOTET_URL")
    return shlex.join(["motet", *words, *([] if known else ["--url", str(url)])])


def say_untrained(adapter: Path) -> None:
    """Warn a person who takes an adapter that no training has changed."""
    from motet.runtime.held_out import untrained

    if why := untrained(adapter):
        say(f"warning: {why}", aside=True)


def say_untrained_of(versions: Iterable[Version], wanted: str) -> None:
    """The same for a version of a service's job: a number, `best` or `latest`."""
    from motet.runtime.held_out import IS_UNTRAINED

    for one in versions:
        if one.untrained and wanted in (str(one.version), "best" * one.best, "latest" * one.latest):
            say(f"warning: {one.model} {IS_UNTRAINED}", aside=True)


def check_place(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written, before the work for it.

    Raises:
        ConfigError: its directory is not there or cannot be written to, or it is one itself.
    """
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: make the directory {file.parent} first")
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a directory: give the name of a file")
    if not os.access(file.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {file}: you may not write in {file.parent}; give another path")


def say(text: str | Text | Table, *, aside: bool = False) -> None:
    """Print text without wrapping, or a table; on standard error if `aside`."""
    from rich.table import Table

    from motet.observe.text import plain_console, safe

    console = plain_console(stderr=aside)
    if isinstance(text, Table):
        print_table(console, text)
    else:
        shown = safe(text) if isinstance(text, str) else text
        console.print(shown, highlight=False, soft_wrap=True)


def width_of(console: Console) -> int:
    """The width available to a table."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else _LOG_WIDTH


def print_table(console: Console, table: Table) -> None:
    """Print a table; in a file or a pipe with all columns, and without trailing spaces."""
    if console.is_terminal:
        console.print(table)
        return
    own = console.width
    with console.capture() as captured:
        console.width = width_of(console)
        console.print(table)
    console.width = own
    lines = [line.rstrip() for line in captured.get().splitlines()]
    console.file.write("\n".join(lines).strip("\n") + "\n")


def print_answer(
    answer: BaseModel | Mapping[str, Any] | Iterable[BaseModel], as_json: bool, text: str | Text | Table
) -> None:
    """Print JSON, or a form for people."""
    from pydantic import BaseModel

    if not as_json:
        say(text)
    elif isinstance(answer, BaseModel):
        print(answer.model_dump_json(indent=2))
    else:
        items = answer if isinstance(answer, Mapping) else [one.model_dump(mode="json") for one in answer]
        print(json.dumps(items, indent=2))


def table(rows: Iterable[Sequence[str | Text]], headings: str, *, empty: str, folds: Sequence[str] = ()) -> str | Table:
    """A table of rows, or `empty` without rows.

    Headings are separated by commas; `>` before one aligns its column to the right. Columns in `folds` wrap if there is
    no room.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from motet.observe.text import safe

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings.split(","):
        name = heading.strip().removeprefix(">")
        right = heading.strip().startswith(">")
        made.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name not in folds)
    for row in rows:
        made.add_row(*(Text(safe(cell)) if isinstance(cell, str) else cell for cell in row))
    return made if made.row_count else empty


def day(seconds: float) -> str:
    """Of a Unix time, here."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d")


def minute(seconds: float) -> str:
    """Of a Unix time, here."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
