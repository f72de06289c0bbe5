"""A service's directory that an earlier Motet left when it was killed: keys, jobs, files and usage are there.

Jobs of today's rules go on; others pause, and their owners continue them as `inexact` or cancel them.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from motet.commands.verify import verify
from motet.runtime.directory_checks import RULES
from motet.service.database.store import Store
from motet.service.database.tables import StoredRace
from motet.service.jobs.handover import in_turn
from tests.support.database import person, queued
from tests.support.earlier import COMMITS, FIRST, KNOWN, OTHER_RULES, SAME_RULES, unpack
from tests.support.service_run import Service, serving

pytestmark = pytest.mark.bits


@pytest.fixture(params=COMMITS)
def commit(request: pytest.FixtureRequest) -> str:
    """The one that left it."""
    return str(request.param)


@pytest.fixture
def left(commit: str, tmp_path: Path) -> Path:
    """Its directory."""
    return unpack(commit, "served", tmp_path / "earlier")


@pytest.fixture
def service(left: Path) -> Iterator[Service]:
    """A service of today on it."""
    with serving(left, keys=True) as found:
        yield found


def test_its_database_loses_no_row_when_its_tables_are_those_of_today(commit: str, left: Path, tmp_path: Path) -> None:
    shutil.copy(left / "motet.db", tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'motet.db'}")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
        rows = KNOWN[commit]["rows"]
        found = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in rows}
    if commit == FIRST:  # every tenant gets a row that lifts a limit which was new then
        rows = {**rows, "limits": rows["tenants"]}
    assert found == {**rows, "starts": rows["starts"] + 1}


def test_rows_of_tables_that_it_left_empty_stay_too(commit: str, left: Path, tmp_path: Path) -> None:
    shutil.copy(left / "motet.db", tmp_path)
    empty = sorted(name for name, rows in KNOWN[commit]["rows"].items() if not rows)
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


def test_its_keys_open_what_they_opened(commit: str, service: Service) -> None:
    known = KNOWN[commit]
    keys = known["keys"]
    service.become(keys["acme"])
    assert {job["name"] for job in service.ask("GET", "/v1/jobs")["data"]} == known["jobs"].keys() - {"paused"}
    assert [one["id"] for one in service.ask("GET", "/v1/files")["data"]] == [known["file"]]
    assert [one["id"] for one in service.ask("GET", "/v1/adapters")["data"]] == [known["adapter"]]
    assert service.weights("done")
    service.become(keys["globex"])
    assert [job["name"] for job in service.ask("GET", "/v1/jobs")["data"]] == ["paused"]
    assert [one["name"] for one in service.ask("GET", "/v1/shares")["received"]] == ["mine"]
    assert service.ask("GET", "/v1/limits")["limits"]["tokens_per_day"] == 1_000_000
    service.become(keys["revoked"])
    service.refused(401, "GET", "/v1/jobs")
    service.become(keys["admin"])
    assert len(service.ask("GET", "/v1/audit")["data"]) >= known["rows"]["audit"]
    used, before = (
        {line["tenant"]: line["tokens_trained"] for line in lines["data"] if line["tenant"]}
        for lines in (service.ask("GET", "/v1/usage", params={"by": "tenant"}), known["usage"])
    )
    assert used.keys() == before.keys()
    assert all(used[tenant] >= before[tenant] for tenant in before)


def says_so(message: str, number: int) -> None:
    """The message of a job of other rules names its Motet and this one, and what its owner may do."""
    now = f"this is Motet {version('motet')} with rules {RULES}: "
    assert message.startswith(f"paused: it was trained by Motet 0.1.0 with rules {number}, and {now}")
    assert message.endswith("resume it to continue by the rules of this one, as inexact, or cancel it")


@pytest.mark.parametrize("commit", [SAME_RULES], indirect=True)
def test_its_jobs_go_on(commit: str, service: Service) -> None:
    service.become(KNOWN[commit]["keys"]["acme"])
    assert service.ended("half") == "succeeded", service.job("half")
    assert service.ended("queued") == "succeeded", service.job("queued")
    assert service.steps("half") == list(range(service.job("half")["steps"] + 1))
    assert {name: service.job(name)["state"] for name in ("done", "cancelled")} == {
        "done": "succeeded", "cancelled": "cancelled",
    }  # fmt: skip
    service.become(KNOWN[commit]["keys"]["globex"])
    step = service.job("paused")["step"]
    assert service.job("paused")["state"] == "paused"
    service.steer("paused", "resume")
    service.reaches("paused", step + 1)
    service.steer("paused", "cancel")
    assert service.ended("paused") == "cancelled"
    for job in (service.directory / "run").glob("job-*"):
        assert verify(job) == 0, job


@pytest.mark.parametrize("commit", OTHER_RULES, indirect=True)
def test_its_jobs_of_other_rules_pause_until_their_owner_decides(commit: str, service: Service) -> None:
    number, keys = OTHER_RULES[commit], KNOWN[commit]["keys"]
    service.become(keys["acme"])
    says_so(service.becomes("half", "paused")["message"], number)
    service.become(keys["globex"])
    assert service.job("paused")["message"].startswith("paused after step "), "its owner's own pause stays"
    service.steer("paused", "resume")
    service.until(lambda: "rules" in service.job("paused")["message"])
    says_so(service.becomes("paused", "paused")["message"], number)
    service.steer("paused", "cancel")
    assert service.ended("paused") == "cancelled"
    service.become(keys["acme"])
    assert service.job("queued")["state"] == "queued"
    step = service.job("half")["step"]
    service.steer("half", "resume")
    service.reaches("half", step + 1)
    service.kill()
    service.start()  # who has decided is not asked again
    assert service.ended("half") == "succeeded", service.job("half")
    assert service.ended("queued") == "succeeded", service.job("queued")
    assert service.steps("half") == list(range(service.job("half")["steps"] + 1))
    (*_, last), (*_, other) = (
        [one["data"] for one in service.events(name) if one["kind"] == "state"] for name in ("half", "queued")
    )
    assert any(reason.startswith(f"the rules changed from {number} to {RULES} at step ") for reason in last["inexact"])
    assert other["inexact"] == []
    for job in (service.directory / "run").glob("job-*"):
        assert verify(job) == 0, job


@pytest.mark.parametrize("commit", OTHER_RULES, indirect=True)
def test_a_failed_job_of_other_rules_says_so_when_it_is_resumed(left: Path, commit: str) -> None:
    with contextlib.closing(sqlite3.connect(left / "motet.db")) as database:
        database.execute("UPDATE jobs SET state = 'failed', message = 'no luck' WHERE name = 'half'")
        database.commit()
    with serving(left, keys=True) as service:
        service.become(KNOWN[commit]["keys"]["acme"])
        job = service.job("half")
        assert (job["state"], job["message"]) == ("failed", "no luck")
        service.steer("half", "resume")
        says_so(service.becomes("half", "paused")["message"], OTHER_RULES[commit])
        service.steer("half", "resume")
        assert service.ended("half") == "succeeded", service.job("half")


def test_candidates_of_a_race_that_was_open_go_on_as_plain_jobs(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'motet.db'}")
    us = person(store, "us")
    with store.transaction() as session:
        session.add(StoredRace(id="race-1", tenant_id=us.tenant_id, name="sort", spec={}))
    waiting = queued(store, us, "sort-c=00", {}, 4, None)
    store.change_job(waiting.id, race="race-1", until=2, step=2)
    assert [job.id for job in store.scalars(in_turn(set(), None))] == [waiting.id]
    store.delete_job(waiting.id)
    assert [race.id for race in store.scalars(select(StoredRace))] == ["race-1"]
    store.close()
