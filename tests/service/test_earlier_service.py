"""A service's directory that an earlier Motet left when it was killed: keys, jobs, files and usage are there, and go on."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.commands.verify import verify
from motet.core.rules import NEWEST
from motet.runtime.checkpoint import JobDirectory
from motet.service.database.store import Store
from tests.support.earlier import KNOWN, unpack
from tests.support.service_run import Service, serving

KEYS = KNOWN["keys"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory."""
    return unpack("served", tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def service(left: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of today on a copy of it."""
    directory = tmp_path_factory.mktemp("served") / "served"
    shutil.copytree(left, directory)
    with serving(directory, keys=True) as found:
        yield found


def test_its_database_loses_no_row_when_its_tables_are_those_of_today(left: Path, tmp_path: Path) -> None:
    shutil.copy(left / "motet.db", tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'motet.db'}")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
        found = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in KNOWN["rows"]}
    # every tenant gets a row that lifts a limit which is new
    assert found == {**KNOWN["rows"], "starts": KNOWN["rows"]["starts"] + 1, "limits": KNOWN["rows"]["tenants"]}


def test_rows_of_tables_that_it_left_empty_stay_too(left: Path, tmp_path: Path) -> None:
    shutil.copy(left / "motet.db", tmp_path)
    empty = sorted(name for name, rows in KNOWN["rows"].items() if not rows)
    assert {"bases", "closed_tenants", "fine_tunings", "races", "scoring_units"} <= set(empty)
    with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
        columns = {name: _fill(database, name) for name in empty}
        database.execute("UPDATE jobs SET race = (SELECT id FROM races) WHERE name = 'done'")
        database.commit()
        columns["jobs"] = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        before = _contents(database, columns)
    Store(f"sqlite:///{tmp_path / 'motet.db'}").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
        assert _contents(database, columns) == before
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    assert all(before.values())


def _fill(database: sqlite3.Connection, table: str) -> list[str]:
    """Add a row with a value in each column, and return the columns."""
    parents = {row[3]: (row[2], row[4]) for row in database.execute(f"PRAGMA foreign_key_list({table})")}
    values = dict[str, Any]()
    for _, name, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
        if name in parents:
            parent, key = parents[name]
            (values[name],) = database.execute(f'SELECT "{key}" FROM "{parent}" ORDER BY 1').fetchone()
        else:
            of_kind = {"JSON": '{"a": [1, "b"]}', "INTEGER": 7, "DOUBLE": 1.5}
            values[name] = of_kind.get(kind, f"{name} of {table}")
    names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values()))
    return list(values)


def _contents(database: sqlite3.Connection, columns: dict[str, list[str]]) -> dict[str, list[Any]]:
    quoted = {table: ", ".join(f'"{name}"' for name in names) for table, names in columns.items()}
    return {table: database.execute(f"SELECT {of} FROM {table} ORDER BY 1").fetchall() for table, of in quoted.items()}


def test_its_keys_open_what_they_opened(service: Service) -> None:
    service.become(KEYS["acme"])
    assert {job["name"] for job in service.ask("GET", "/v1/jobs")["data"]} == KNOWN["jobs"].keys() - {"paused"}
    assert [one["id"] for one in service.ask("GET", "/v1/files")["data"]] == [KNOWN["file"]]
    assert [one["id"] for one in service.ask("GET", "/v1/adapters")["data"]] == [KNOWN["adapter"]]
    assert service.weights("done")
    service.become(KEYS["globex"])
    assert [job["name"] for job in service.ask("GET", "/v1/jobs")["data"]] == ["paused"]
    assert [one["name"] for one in service.ask("GET", "/v1/shares")["received"]] == ["mine"]
    assert service.ask("GET", "/v1/limits")["limits"]["tokens_per_day"] == 1_000_000
    service.become(KEYS["revoked"])
    service.refused(401, "GET", "/v1/jobs")
    service.become(KEYS["admin"])
    assert len(service.ask("GET", "/v1/audit")["data"]) >= KNOWN["rows"]["audit"]
    used, before = (
        {line["tenant"]: line["tokens_trained"] for line in lines["data"] if line["tenant"]}
        for lines in (service.ask("GET", "/v1/usage", params={"by": "tenant"}), KNOWN["usage"])
    )
    assert used.keys() == before.keys()
    assert all(used[tenant] >= before[tenant] for tenant in before)


def test_its_jobs_go_on(service: Service) -> None:
    service.become(KEYS["acme"])
    assert service.ended("half") == "succeeded", service.job("half")
    assert service.ended("queued") == "succeeded", service.job("queued")
    begun = {
        name: JobDirectory(service.directory / "run" / service.job(name)["id"]).newest() for name in ("half", "queued")
    }
    assert {name: done and done.rules for name, done in begun.items()} == {"half": 0, "queued": NEWEST}
    assert service.steps("half") == list(range(service.job("half")["steps"] + 1))
    assert {name: service.job(name)["state"] for name in ("done", "cancelled")} == {
        "done": "succeeded", "cancelled": "cancelled",
    }  # fmt: skip
    service.become(KEYS["globex"])
    step = service.job("paused")["step"]
    assert service.job("paused")["state"] == "paused"
    service.steer("paused", "resume")
    service.reaches("paused", step + 1)
    service.steer("paused", "cancel")
    assert service.ended("paused") == "cancelled"
    for job in (service.directory / "run").glob("job-*"):
        assert verify(job) == 0, job
