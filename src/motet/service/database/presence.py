"""Detects that the database was replaced: a file can be removed under an open connection."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Engine, select
from sqlalchemy.exc import DatabaseError, InternalError, OperationalError
from sqlalchemy.orm import Session

from motet.service.database.tables import ServiceStart, new_id

_LOOK_SECONDS = 1.0
_FREE_PAGES, _PAGES = 4096, 1000
"""Free pages that an SQLite file keeps, and how many are given back at once."""
_MESSAGE = (
    "the database of this service was removed or replaced while the service ran, so nothing can be kept: stop the service, put "
    "the database back from a backup, and start the service again"
)


class DatabaseReplaced(OperationalError):
    """The service's database is missing or was replaced."""

    def __init__(self) -> None:
        super().__init__(None, None, RuntimeError(_MESSAGE))


class Presence:
    """Recognises a database: SQLite's files by their inodes, every database by a row that this start wrote."""

    def __init__(self, engine: Engine) -> None:
        """The tables must exist."""
        place = engine.url.database if engine.dialect.name == "sqlite" else None
        self._engine = engine
        self._files: dict[Path, tuple[int, int]] = {}
        self._anchor: sqlite3.Connection | None = None
        self.token, self._looked = new_id("start"), time.monotonic()
        if place and Path(place).is_file():  # without an open connection SQLite would delete its log file
            self._anchor = sqlite3.connect(place, check_same_thread=False)
            with closing(self._anchor.execute("SELECT count(*) FROM sqlite_master")) as cursor:
                cursor.fetchone()
        with Session(engine) as session, session.begin():
            session.add(ServiceStart(token=self.token))
        if self._anchor is not None:
            paths = (Path(str(place)), Path(f"{place}-wal"))
            self._files = {path: one for path in paths if (one := _identity(path)) is not None}

    def check_files(self) -> None:
        """Check the files before a transaction. Raises DatabaseReplaced if a file is not the one that was opened."""
        for path, known in self._files.items():
            if _identity(path) != known:
                raise DatabaseReplaced

    def check_row(self, session: Session) -> None:
        """Check the row, at most once a second. Raises DatabaseReplaced if the row of this start is missing."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        try:
            there = session.scalar(select(ServiceStart.token).where(ServiceStart.token == self.token))
        except DatabaseError as error:  # no such table, or not a database
            if isinstance(error, OperationalError | InternalError) and "no such table" not in str(error.orig):
                raise
            there = None
        if there is None:
            raise DatabaseReplaced
        self._looked = time.monotonic()

    def shrink(self) -> None:
        """Give some free pages of an SQLite file back to the disk, if there are many."""
        if self._anchor is None:
            return
        self.check_files()
        with closing(self._engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA freelist_count")
            if cursor.fetchall()[0][0] > _FREE_PAGES:
                cursor.executescript(f"PRAGMA incremental_vacuum({_PAGES})")  # `execute` would give one page back

    def close(self) -> None:
        """Close the file."""
        if self._anchor is not None:
            self._anchor.close()


def make_private(place: str) -> None:
    """Make SQLite's file readable for its owner only; SQLite gives its log files the same mode."""
    if not place or place == ":memory:" or place.startswith("file:"):
        return
    with suppress(OSError):  # errors are reported where it is opened
        os.close(os.open(place, os.O_RDWR | os.O_CREAT, 0o600))
        for path in (place, f"{place}-wal", f"{place}-shm"):
            if os.path.exists(path) and os.stat(path).st_mode & 0o077:
                os.chmod(path, 0o600)


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None
