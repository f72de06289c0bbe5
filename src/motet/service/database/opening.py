"""Opens a database and migrates its tables."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from motet.core.errors import StoreError
from motet.core.json_text import json_text
from motet.service.database.presence import make_private
from motet.service.database.tables import Table

_SHRINKS = "auto_vacuum=INCREMENTAL"
"""Lets a file of SQLite give pages back; it has to be set before the first table is made."""
_LOG_BYTES = 64 * 2**20
"""Largest log file that SQLite keeps when it has written the log to the database."""
_SMALL_BYTES = 256 * 2**20
"""Files of an earlier release up to this size are written once more, so that they can give pages back."""
_LOCKED = "55P03"
"""PostgreSQL's error code for a lock timeout."""


def open_engine(url: str) -> Engine:
    """Create the connection pool of a database. Raises StoreError if the URL cannot be used."""
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        # only a server can close a connection; PostgreSQL refuses JSON with a number that is not finite
        pinged, jsons = not url.startswith("sqlite"), {"json_serializer": json_text, "json_deserializer": _read}
        engine = create_engine(url, pool_pre_ping=pinged, **jsons)
    except Exception as error:  # a malformed URL, or a missing driver
        raise StoreError(f"the database URL {public(url)} cannot be used: {type(error).__name__}") from None
    if engine.dialect.name == "sqlite":
        make_private(engine.url.database or "")

        @event.listens_for(engine, "connect")
        def _careful(connection: Any, _: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout=10000")
            if cursor.execute("PRAGMA page_count").fetchone() == (0,):  # it writes, so others do not wait for it
                cursor.execute(f"PRAGMA {_SHRINKS}")
            for line in (f"journal_size_limit={_LOG_BYTES}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                cursor.execute(f"PRAGMA {line}")
            cursor.close()

    return engine


def _read(text: str | bytes) -> Any:
    """A value of JSON; `{}` for damaged text, which then fails its own job, and no query over others."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _prepare_to_shrink(engine: Engine) -> None:
    """Let a small SQLite file of an earlier release give pages back from now on; larger ones reuse theirs."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        mode, pages, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0
            for name in ("auto_vacuum", "page_count", "page_size")
        )
        if mode == 0 and pages * size <= _SMALL_BYTES:
            with contextlib.suppress(OperationalError):  # a full disk; the next start tries again
                connection.exec_driver_sql(f"PRAGMA {_SHRINKS}")
                connection.exec_driver_sql("VACUUM")


def public(url: str) -> str:
    """A URL without its password, for messages."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except Exception:  # not a URL at all
        return "that was given"


MIGRATING, EVENTS = 0x6D6F746574, 0x6D6F746575
"""Keys of PostgreSQL advisory locks."""


def lock(transaction: Session | Connection, number: int, seconds: float) -> None:
    """Hold a PostgreSQL lock until the transaction ends. Raises OperationalError if it was not free in time."""
    transaction.execute(text(f"SET LOCAL lock_timeout = {round(1000 * seconds)}"))
    try:
        transaction.execute(select(func.pg_advisory_xact_lock(number)))
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCKED:
            raise
        reason = TimeoutError(
            f"another program has held a lock on it for {seconds:g} s: wait if another service is migrating it, or "
            "end the one that hangs (pg_stat_activity lists connections)"
        )
        raise OperationalError(error.statement, error.params, reason) from error
    transaction.execute(text("SET LOCAL lock_timeout = DEFAULT"))


class UnknownShape(Exception):
    """The database has an unknown schema."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. Another release of Motet made it: serve with that release, or start a new service with an empty "
            "--directory and --database; adapters of the old one are in its directory, run/JOB/versions"
        )


_MIGRATIONS = Path(__file__).with_name("migrations")


def migrate(engine: Engine, lock_seconds: float) -> None:
    """Create all tables in a new database, or migrate those of an older release."""
    newest = max(path.stem.partition("_")[0] for path in (_MIGRATIONS / "versions").glob("[0-9]*.py"))
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":  # another process may start on the same empty database
            lock(connection, MIGRATING, lock_seconds)
        else:  # Python's SQLite starts no transaction before DDL: a failure would leave half of the change
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        known = inspect(connection).has_table("alembic_version")
        if not known or connection.scalar(text("SELECT version_num FROM alembic_version")) != newest:
            _bring_up(connection, new=not known)
        if known:
            _check_columns(connection)
    if engine.dialect.name == "sqlite":
        _prepare_to_shrink(engine)


def _check_columns(connection: Connection) -> None:
    """Raise for a database with a known number whose tables come from a development version."""
    there = {
        table: {one["name"] for one in columns}
        for (_, table), columns in inspect(connection).get_multi_columns().items()
    }
    for table in Table.metadata.sorted_tables:
        lacking = {column.name for column in table.columns} - there.get(table.name, set())
        if lacking:
            raise UnknownShape(f"its table `{table.name}` has no {', '.join(sorted(lacking))}")


def _bring_up(connection: Connection, *, new: bool) -> None:
    from alembic import command  # slow to import, and rarely needed
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        if new:
            Table.metadata.create_all(connection)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
    except CommandError as error:
        number = connection.scalar(text("SELECT version_num FROM alembic_version"))
        raise UnknownShape(f"its tables have the number {number}, which is unknown here") from error
