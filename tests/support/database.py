"""The databases that the service's memory is tested on, SQLite and a real PostgreSQL; fixtures for every test."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from motet.config.service import Role
from motet.rollout.server_process import free_port
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from tests.conftest import IN_CI
from tests.support.waiting import PATIENCE


def _as_postgres(directory: Path) -> dict[str, Any]:
    """PostgreSQL refuses to run as root; its directories are then those of another user."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": directory}


def _programs() -> Path:
    """Where initdb and postgres are; skips the test where they are not."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (found := shutil.which("initdb")) is not None:
        places.append(Path(found).resolve().parent)
    for place in places:
        if (place / "postgres").is_file():
            return place
    reason = "PostgreSQL is not installed: `apt-get install postgresql`"
    if IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a cluster of its own, while the tests run."""
    with running_postgres() as url:
        yield url


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """The URL of a new cluster, while the block runs; not below pytest's directory, which other users cannot enter."""
    programs, port = _programs(), free_port()
    with tempfile.TemporaryDirectory(prefix="motet-postgres-") as place:
        directory = Path(place)
        rights = _as_postgres(directory)
        made = [str(programs / "initdb"), "-D", str(directory / "data"), "-U", "motet", "-A", "trust", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, **rights)
        line = [str(programs / "postgres"), "-D", str(directory / "data"), "-p", str(port), "-k", str(directory)]
        line += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(line, stdout=log, stderr=log, **rights)
        try:
            url = f"postgresql://motet@127.0.0.1:{port}"
            _wait_for(f"{url.replace('postgresql', 'postgresql+psycopg')}/postgres", directory / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # "fast": does not wait for clients
            server.wait(PATIENCE)


def _wait_for(url: str, log: Path) -> None:
    engine = create_engine(url)
    for _ in range(300):
        try:
            engine.connect().close()
        except OperationalError:  # not there yet
            time.sleep(0.1)
        else:
            engine.dispose()
            return
    raise AssertionError(log.read_text())


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'motet.db'}"
        return
    with new_database(request.getfixturevalue("postgres")) as name:
        yield name


@contextlib.contextmanager
def new_database(server: str) -> Iterator[str]:
    """The URL of an empty database of a cluster, which is dropped afterwards."""
    admin = create_engine(
        f"{server.replace('postgresql', 'postgresql+psycopg')}/postgres", isolation_level="AUTOCOMMIT"
    )
    name = f"t{time.time_ns()}"
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield f"{server}/{name}"
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A store on it."""
    found = Store(url)
    yield found
    found.close()


def person(store: Store, tenant: str, role: Role = "member") -> Principal:
    """Someone of a tenant, with a key."""
    _, key = store.tenants.create_key(tenant, "key", role)
    found = store.tenants.who(key)
    assert found is not None
    return found


def queued(
    store: Store,
    who: Principal,
    name: str,
    spec: Mapping[str, Any],
    steps: int,
    idempotency: str | None,
    **columns: Any,
) -> StoredJob:
    """A job that is queued, with more columns of its row."""
    row = StoredJob(name=name, spec=dict(spec), steps=steps, idempotency_key=idempotency, **columns)
    return store.submit(who, [row])[0]
