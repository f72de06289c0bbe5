"""The service's memory on SQLite and on a real PostgreSQL: shape, keys, jobs, events, and many writers at once."""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, event, func, inspect, select, text
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable

from motet.core.errors import StoreError
from motet.service.adapters.adapters import ALL, MOST_SHARES, Adapters
from motet.service.bases import Bases
from motet.service.database.opening import EVENTS, MIGRATING, open_engine
from motet.service.database.store import MOST_OF_A_PAGE, Store, files_of, jobs_of, size_of
from motet.service.database.tables import (
    FineTuning,
    Key,
    Share,
    StoredFile,
    StoredJob,
    Table,
    Tenant,
    TenantLimits,
    new_id,
    now,
)
from motet.service.database.tenants import MOST_KEYS
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.workers.attached import MOST_LEASED
from motet.service.workers.rewards import ScoringUnits, key_of
from tests.support import inside
from tests.support.database import person, queued
from tests.support.house import statements
from tests.support.together import at_once
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

# --- records of keys ---------------------------------------------------------------------------------------------------------


def test_no_sign_in_and_no_end_of_a_key_is_without_its_record(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/db")
    with contextlib.closing(store):
        who, tenants = person(store, "us"), store.tenants
        key, _ = tenants.sign_in("us", "ann", "member", now() + 60, "ann")
        assert tenants.revoke_key(key.id, who)
        records = [(entry.action, entry.object, name) for entry, _, name, _ in store.audit_entries()]
        assert records == [("revoke key", key.id, who.name), ("sign in", key.id, "ann")]
        with store.transaction() as session:
            session.execute(text("DROP TABLE audit"))
        before = [one.id for one, _ in tenants.keys_of(None)]
        with pytest.raises(OperationalError):
            tenants.sign_in("us", "ann", "member", now() + 60, "ann")
        with pytest.raises(OperationalError):
            tenants.revoke_key(who.key_id, who)
        assert [one.id for one, _ in tenants.keys_of(None)] == before == [who.key_id]


# --- a hundred thousand jobs ------------------------------------------------------------------------------------------------


def test_nothing_looks_at_all_jobs(tmp_path: Path) -> None:
    """What one job or one page needs is found by an index, so it takes as long with a hundred thousand jobs as with ten."""

    def listen(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if re.search(r"\b(jobs|keys)\b", statement) and not statement.startswith(("EXPLAIN", "INSERT")):
            asked.append((statement, parameters))

    store, asked = Store(f"sqlite:///{tmp_path}/db"), list[tuple[str, Any]]()
    who = person(store, "us")
    first = queued(store, who, "first", {}, 1, "key")
    event.listen(inside.database(store), "before_cursor_execute", listen)
    queued(store, who, "second", {}, 1, "other")
    assert store.submitted(who, "key") is not None
    assert store.job(who, "first") is not None
    assert store.job(who, first.id) is not None
    store.change_job(first.id, state="running")
    assert [job.name for job in store.open_jobs()] == ["first", "second"]
    assert store.jobs(who, before=9, limit=5)
    assert store.jobs(who, state="running", limit=5)
    assert store.page(jobs_of(who, "running", 9), size_of(StoredJob.spec), 5)[0]
    store.delete_job(first.id)
    head = person(store, "us", "tenant-admin")
    for one in (who, head):
        assert store.tenants.keys_of(one)
        assert store.tenants.key_of(one, one.key_id)
    assert store.tenants.rotate_key(who.key_id, head.key_id) is not None
    assert store.tenants.revoke_key(head.key_id)
    assert len(asked) >= 20
    with inside.database(store).connect() as connection:
        for statement, parameters in asked:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            steps = [row[3] for row in plan]
            assert not [step for step in steps if step.startswith(("SCAN jobs", "SCAN keys"))], (statement, steps)
    store.close()


# --- shape ------------------------------------------------------------------------------------------------------------------


def test_a_new_database_has_the_tables_and_can_be_opened_again(url: str) -> None:
    Store(url).close()
    store = Store(url)
    person(store, "us")
    store.close()
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Table.metadata) == []
        assert set(inspect(connection).get_table_names()) == {*Table.metadata.tables, "alembic_version"}
        assert context.get_current_revision() == "0006"
        assert connection.execute(text("SELECT count(*) FROM keys")).scalar() == 1
    engine.dispose()


def test_a_database_from_before_races_gets_their_table_and_keeps_its_jobs(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        for table in Table.metadata.sorted_tables:
            if table.name != "races":
                _made_earlier(connection, table, "race", "until", "cpu_microseconds")
        connection.execute(text("DROP INDEX ix_keys_made_by"))
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('0001')"))
        connection.execute(text("INSERT INTO tenants VALUES ('t', 'us', 0)"))
        connection.execute(
            text(
                "INSERT INTO jobs (id, tenant_id, name, spec, state, wanted, message, step, steps, created, waits) "
                "VALUES ('job-1', 't', 'old', '{}', 'succeeded', 'run', '', 3, 3, 0, false)"
            )
        )
    store = Store(url)
    job = store.job_by_id("job-1")
    assert job is not None
    assert (job.name, job.race, job.until) == ("old", None, None)
    store.close()
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Table.metadata) == []
        assert context.get_current_revision() == "0006"
    engine.dispose()


def _made_earlier(connection: Connection, table: Any, *left: str) -> None:
    """A table as an earlier release made it, without columns that came later."""
    later = re.compile(rf"\b({'|'.join((*left, 'account', 'submitter'))})\b")
    lines = str(CreateTable(table).compile(connection)).replace(", account)", ")").splitlines()
    lines = [line for line in lines if not later.search(line)]
    connection.execute(text(re.sub(r",\s*\)\s*$", ")", "\n".join(lines))))
    for index in table.indexes:
        if not later.search(str(index.name).replace("_", " ")):
            index.create(connection)


def test_a_database_of_the_last_release_keeps_its_rows_and_its_tenants_have_no_new_limit(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        for table in Table.metadata.sorted_tables:
            _made_earlier(connection, table, "cpu_microseconds")
        for line in (
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
            "INSERT INTO alembic_version VALUES ('0003')",
            "INSERT INTO tenants VALUES ('t', 'us', 0)",
            "INSERT INTO tenants VALUES ('u', 'them', 0)",
            """INSERT INTO limits VALUES ('u', '{"rank": 8, "open_samples": 64}')""",
            "INSERT INTO usage (day, tenant_id, job_id, job_name, tokens_prompt, tokens_sampled, tokens_trained, microseconds, "
            "base) VALUES ('2026-01-01', 't', 'job-1', 'old', 1, 2, 3, 4000000, '')",
        ):
            connection.exec_driver_sql(line)
    for _ in range(2):  # also when it is there already
        store = Store(url)
        (used,) = Ledger(store).page(None)[0]
        assert (used.tokens_trained, used.device_seconds, used.cpu_seconds) == (3, 4.0, 0.0)
        with store.transaction() as session:
            limits = {one.tenant_id: one.given for one in session.scalars(select(TenantLimits))}
        assert limits == {
            "t": {"cpu_seconds_per_day": None}, "u": {"cpu_seconds_per_day": None, "rank": 8, "open_samples": 1024},
        }  # fmt: skip
        store.tenants.made("new")
        store.close()
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Table.metadata) == []
        assert context.get_current_revision() == "0006"
    engine.dispose()


def test_keys_from_before_submitters_are_of_whom_they_were_made_for(url: str) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    people = "a" * 64
    keys = (
        ("key-1", "ann", "member", None, None),
        ("key-2", "ci", "member", "key-1", None),
        ("key-3", "", "member", "key-2", None),
        ("key-4", "head", "tenant-admin", None, None),
        ("key-5", "bob", "member", "key-4", None),
        ("key-6", "Eve", "member", None, people),
        ("key-7", "job", "member", "key-6", None),
        ("key-8", "", "member", "gone", None),
    )
    with engine.begin() as connection:
        for table in Table.metadata.sorted_tables:
            _made_earlier(connection, table)
        for line in (
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)",
            "INSERT INTO alembic_version VALUES ('0004')",
            "INSERT INTO tenants VALUES ('t', 'us', 0)",
            "INSERT INTO jobs (id, tenant_id, name, spec, state, wanted, message, step, steps, created, waits) "
            "VALUES ('job-1', 't', 'old', '{}', 'succeeded', 'run', '', 3, 3, 0, false)",
        ):
            connection.exec_driver_sql(line)
        columns = ("id", "name", "role", "made_by", "person")
        rows = [{"d": key[0], **dict(zip(columns, key, strict=True))} for key in keys]
        named = ", ".join(columns), ", ".join(f":{name}" for name in columns)
        connection.execute(
            text(f"INSERT INTO keys (tenant_id, digest, created, {named[0]}) VALUES ('t', :d, 0, {named[1]})"), rows
        )
    store = Store(url)
    assert {key.id: (key.account, key.submitter) for key, _ in store.tenants.keys_of(None)} == {
        "key-1": ("key-1", "ann"), "key-2": ("key-1", "ann"), "key-3": ("key-1", "ann"), "key-4": ("key-4", "head"),
        "key-5": ("key-5", "bob"), "key-6": (f"person-{people[:32]}", "Eve"), "key-7": (f"person-{people[:32]}", "Eve"),
        "key-8": ("key-8", "key-8"),
    }  # fmt: skip
    job = store.job_by_id("job-1")
    assert job is not None
    assert (job.account, job.submitter) == (None, None)
    store.close()
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Table.metadata) == []
    engine.dispose()


def test_a_database_that_cannot_be_brought_up_to_date_stays_as_it_was(url: str) -> None:
    """What was changed before the fault would be in the way of the next start."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE other (day TEXT)"))
        connection.execute(text("CREATE INDEX usage_of_tenant ON other (day)"))
    with pytest.raises(StoreError, match="usage_of_tenant"):
        Store(url)
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == ["other"]
        connection.execute(text("DROP TABLE other"))
    Store(url).close()
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_several_services_may_begin_on_the_same_empty_database(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        for store in list(pool.map(Store, [url] * 6)):
            store.close()


def test_a_connection_waits_for_no_writer(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/motet.db"
    Store(url).close()
    writer = sqlite3.connect(tmp_path / "motet.db", isolation_level=None)
    assert writer.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    writer.execute("BEGIN IMMEDIATE")
    engine = open_engine(url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tenants").scalar() == 0
    engine.dispose()
    writer.close()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_service_that_hangs_holds_others_on_its_database_for_a_while_only(url: str) -> None:
    """Each with its locks: of events, and of the shape of the tables."""
    reason = "has held a lock on it for 0.1 s: wait if another service is migrating it"
    store = Store(url, lock_seconds=0.1)
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as hanging:
        for number in (EVENTS, MIGRATING):
            hanging.execute(select(func.pg_advisory_xact_lock(number)))
        with pytest.raises(OperationalError, match=reason):
            queued(store, person(store, "us"), "sort", {}, 3, None)
        with pytest.raises(StoreError, match=reason):
            Store(url, lock_seconds=0.1)
    job = queued(store, person(store, "us"), "sort", {}, 3, None)
    assert store.add_event(job.id, "step", "0", {}) is not None
    with store.transaction() as session:
        store.wait_for_earlier_events(session)
        assert session.scalar(text("SHOW lock_timeout")) == "0"  # of what is locked next: as it was
    store.close()
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_database_that_only_reads_counts_as_away_and_any_other_fault_does_not(url: str) -> None:
    def delete(before: str) -> None:
        with store.transaction() as session:
            with contextlib.suppress(ProgrammingError):
                session.execute(text(before))
            session.execute(text("DELETE FROM jobs"))

    store = Store(url)
    with pytest.raises(OperationalError, match="read-only transaction"):
        delete("SET TRANSACTION READ ONLY")
    with pytest.raises(InternalError, match="transaction is aborted"):
        delete("nonsense")
    store.close()


def test_a_start_that_was_cut_off_is_taken_up(tmp_path: Path) -> None:
    """It may have made some of the tables, and nothing says yet of which release they are."""
    engine = create_engine(f"sqlite:///{tmp_path}/db")
    Table.metadata.create_all(engine, [Table.metadata.tables["tenants"], Table.metadata.tables["keys"]])
    engine.dispose()
    store = Store(f"sqlite:///{tmp_path}/db")
    assert store.job_by_id("job-1") is None
    store.close()


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://motet:secret-word@127.0.0.1:1/none",
        "postgresql://motet:secret-word@127.0.0.1:port/none",
        "nonsense://motet:secret-word@127.0.0.1/none",
        "secret-word",
        "sqlite:////proc/nowhere/secret.db",
    ],
)
def test_a_database_that_cannot_be_opened_is_told_without_its_password(bad: str) -> None:
    with pytest.raises(StoreError, match="database") as error:
        Store(bad)
    assert "secret-word" not in str(error.value)
    assert "secret-word" not in str(error.value.__cause__ or "")


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "motet.db").write_bytes(b"not a database, " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(f"sqlite:///{tmp_path / 'motet.db'}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE alembic_version SET version_num = '0007'", "have the number 0007, which is unknown here"),
        ("ALTER TABLE jobs DROP COLUMN waits", "table `jobs` has no waits"),
        ("DROP TABLE audit", "table `audit` has no "),
    ],
)
def test_a_database_of_another_release_is_told_with_what_to_do(url: str, change: str, message: str) -> None:
    Store(url).close()
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text(change))
    engine.dispose()
    with pytest.raises(StoreError, match=f"{message}.*start a new service with an empty --directory"):
        Store(url)


# --- keys -------------------------------------------------------------------------------------------------------------------


def test_a_key_opens_until_it_is_revoked_or_expires(store: Store, url: str) -> None:
    key, words = store.tenants.create_key("us", "laptop", "admin")
    who = store.tenants.who(words)
    assert who is not None
    assert (who.tenant, who.key_id, who.admin) == ("us", key.id, True)
    assert store.tenants.who(words[:-1]) is None
    assert store.tenants.who("") is None
    later, _ = store.tenants.create_key("us", "later", "member", now() + 60)
    _, past = store.tenants.create_key("us", "past", "member", now() - 1)
    assert store.tenants.who(past) is None
    assert [(one.name, tenant) for one, tenant in store.tenants.keys_of(None)] == [
        ("laptop", "us"),
        ("later", "us"),
        ("past", "us"),
    ]
    assert store.tenants.revoke_key(key.id)
    assert store.tenants.revoke_key(key.id)  # as often as one likes
    assert store.tenants.who(words) is None
    assert not store.tenants.revoke_key("key-none")
    assert later.tenant_id == key.tenant_id
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        everything = str(connection.execute(text("SELECT * FROM keys")).all())
    engine.dispose()
    assert key.id in everything
    assert words.removeprefix("mk-") not in everything


@contextlib.contextmanager
def before_write(store: Store, number: int, work: Callable[[], object]) -> Iterator[None]:
    """Run `work` once, before the store's statement of this number that writes or locks keys, counted from 1."""
    numbers = itertools.count(1)

    def listen(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        writes = statement.startswith(("INSERT INTO keys", "UPDATE keys")) or "FOR UPDATE" in statement
        if writes and next(numbers) == number:
            work()

    event.listen(inside.database(store), "before_cursor_execute", listen)
    try:
        yield
    finally:
        event.remove(inside.database(store), "before_cursor_execute", listen)


@pytest.mark.parametrize("way", ["create with it", "rotate it", "rotate another with it"])
def test_a_key_that_is_being_revoked_makes_no_other(store: Store, url: str, way: str) -> None:
    maker, _ = store.tenants.create_key("us", "maker", "tenant-admin")
    other, _ = store.tenants.create_key("us", "other", "member")
    others, waits = create_engine(url.replace("postgresql:", "postgresql+psycopg:")), threading.Event()

    def make() -> object:
        with before_write(store, 1, waits.set):
            if way == "create with it":
                return store.tenants.create_key("us", "child", "member", made_by=maker.id)
            rotated = (maker.id, None) if way == "rotate it" else (other.id, maker.id)
            if store.tenants.rotate_key(*rotated) is None:
                raise StoreError("there is no such key")
            return None

    with ThreadPoolExecutor(1) as thread:
        with others.begin() as connection:
            connection.execute(text("UPDATE keys SET revoked = 1 WHERE id = :id"), {"id": maker.id})
            made = thread.submit(make)
            assert waits.wait(PATIENCE)
        with pytest.raises(StoreError, match=r"revoked meanwhile|no such key"):
            made.result(PATIENCE)
    others.dispose()
    assert [key.id for key, _ in store.tenants.keys_of(None) if key.revoked is None] == [other.id]


@pytest.mark.parametrize(
    ("url", "way", "number"),
    [("sqlite", "create", 1), ("sqlite", "rotate", 1), ("postgresql", "rotate", 1), ("postgresql", "rotate", 2)],
    indirect=["url"],
)
def test_a_key_that_is_made_while_its_maker_is_revoked_ends_too(store: Store, way: str, number: int) -> None:
    maker, _ = store.tenants.create_key("us", "maker", "member")
    child, _ = store.tenants.create_key("us", "child", "member", made_by=maker.id)
    store.tenants.create_key("us", "grandchild", "member", made_by=child.id)
    made = list[object]()

    def make() -> None:
        if way == "create":
            made.append(store.tenants.create_key("us", "late", "member", made_by=maker.id))
        else:
            made.append(store.tenants.rotate_key(child.id))

    with before_write(store, number, make):
        assert store.tenants.revoke_key(maker.id)
    assert len(made) == 1
    assert [key.name for key, _ in store.tenants.keys_of(None) if key.revoked is None] == []


def test_a_tenant_is_made_once_by_many_at_once(store: Store) -> None:
    found = at_once(lambda _: store.tenants.made("us").id, 8)
    assert found == [found[0]] * 8


def test_who_needs_no_key_is_looked_up_once_a_second(store: Store) -> None:
    first = store.tenants.made("local")
    with statements() as asked:
        for _ in range(20):
            assert store.tenants.who("none") is None
            assert store.tenants.made_id("local") == first.id
    assert len(asked) <= 2
    with store.transaction() as session:
        session.delete(session.get(Tenant, first.id))
    store.tenants.forget(first.id)
    assert store.tenants.made_id("local") == store.tenants.made("local").id != first.id


def test_many_at_once_take_a_tenant_to_its_bounds_and_no_further(store: Store, tmp_path: Path) -> None:
    adapters, owner = Adapters(store, Storage(tmp_path), Bases({"small": "small"})), store.tenants.made("us").id
    keys = [
        Key(id=new_id("key"), tenant_id=owner, digest=new_id("key"), name="one", role="member")
        for _ in range(MOST_KEYS - 1)
    ]
    shares = [
        Share(id=new_id("share"), tenant_id=owner, object=new_id("job"), with_tenant=ALL)
        for _ in range(MOST_SHARES - 1)
    ]
    with store.transaction() as session:
        session.add_all([*keys, *shares])

    def refused(make: Callable[[], object]) -> bool:
        try:
            make()
        except StoreError:
            return True
        return False

    def share() -> object:
        return adapters.share(Share(id=new_id("share"), tenant_id=owner, object=new_id("job"), with_tenant=ALL))

    for make in (lambda: store.tenants.create_key("us", "one", "member"), share):
        assert sorted(at_once(lambda _, make=make: refused(make), 8)) == [False] + [True] * 7  # type: ignore[misc]


# --- jobs and files ---------------------------------------------------------------------------------------------------------


def test_an_admin_is_not_given_one_of_two_jobs_of_a_name(store: Store) -> None:
    us, them, admin = person(store, "us"), person(store, "them"), person(store, "staff", "admin")
    ours = queued(store, us, "sort", {}, 3, None)
    found = store.job(admin, "sort")
    assert found is not None
    assert found.id == ours.id
    theirs = queued(store, them, "sort", {}, 3, None)
    with pytest.raises(StoreError, match=f"{ours.id} of us, {theirs.id} of them"):
        store.job(admin, "sort")
    for one in (ours, theirs):
        found = store.job(admin, one.id)
        assert found is not None
        assert found.id == one.id
    own = queued(store, admin, "sort", {}, 3, None)
    found = store.job(admin, "sort")
    assert found is not None
    assert found.id == own.id


def test_jobs_are_their_tenants(store: Store) -> None:
    us, them, admin = person(store, "us"), person(store, "them"), person(store, "staff", "admin")
    ours = queued(store, us, "sort", {"a": [1, None]}, 3, None)
    theirs = queued(store, them, "sort", {}, 5, None)
    with pytest.raises(StoreError, match="'sort'"):
        queued(store, us, "sort", {}, 3, None)
    for who, mine in ((us, ours), (them, theirs)):
        assert [job.id for job in store.jobs(who)] == [mine.id]
        found = store.job(who, "sort")
        assert found is not None
        assert found.id == mine.id
    assert store.job(us, theirs.id) is None
    assert store.job(us, "none") is None
    assert {job.id for job in store.jobs(admin)} == {ours.id, theirs.id}
    assert store.job(admin, theirs.id) is not None
    kept = store.job(us, ours.id)
    assert kept is not None
    assert (kept.spec, kept.steps, kept.state, kept.wanted, kept.step) == ({"a": [1, None]}, 3, "queued", "run", 0)
    assert [event.data["state"] for event in store.events(ours.id)] == ["queued"]
    store.change_job(ours.id, state="succeeded", step=3)
    assert [job.id for job in store.open_jobs()] == [theirs.id]
    assert store.counts() == {"succeeded": 1, "queued": 1}
    store.delete_job(ours.id)
    assert store.job(admin, ours.id) is None
    assert store.events(ours.id) == []
    assert queued(store, us, "sort", {}, 3, None).id != ours.id


def test_an_idempotency_key_is_one_job(store: Store) -> None:
    us, them = person(store, "us"), person(store, "them")
    first = queued(store, us, "sort", {}, 3, "once")
    with pytest.raises(StoreError, match="there is a job 'other' already"):
        queued(store, us, "other", {}, 3, "once")
    found = store.submitted(us, "once")
    assert found is not None
    assert found.id == first.id
    assert queued(store, them, "sort", {}, 3, "once").id != first.id
    assert [event.kind for event in store.events(first.id)] == ["state"]


def test_pages_hold_every_job_once_newest_first(store: Store) -> None:
    us = person(store, "us")
    ids = [queued(store, us, f"job{number}", {}, 1, None).id for number in range(11)]
    queued(store, person(store, "them"), "other", {}, 1, None)
    store.change_job(ids[4], state="failed")
    found: list[str] = []
    before: int | None = None
    while len(found) < 20 and (page := store.jobs(us, before=before, limit=4)):
        assert len(page) <= 4
        found += [job.id for job in page]
        before = page[-1].number
    assert found == ids[::-1]
    assert [job.id for job in store.jobs(us, state="failed")] == [ids[4]]


def test_a_page_of_large_jobs_is_short_and_none_is_left_out(store: Store) -> None:
    us = person(store, "us")
    large, small = {"text": "x" * (MOST_OF_A_PAGE // 2 - 100)}, {"text": "x"}
    ids = [queued(store, us, f"job{n}", small if n < 4 else large, 1, None).id for n in range(9)]
    pages, before, more = list[list[str]](), None, True
    while more:
        page, more = store.page(jobs_of(us, None, before), size_of(StoredJob.spec), 3)
        assert all(job.spec["text"] for job in page)
        pages.append([job.id for job in page])
        before = page[-1].number
    assert [len(page) for page in pages] == [2, 2, 3, 2], "the last large one has small ones beside it"
    assert [job for page in pages for job in page] == ids[::-1]
    fine_tunings = FineTunings(store, None, None)  # type: ignore[arg-type]
    with store.transaction() as session:
        session.add_all(FineTuning(job_id=job, request={"metadata": {"a": "b"}}) for job in ids[-3:])
    assert len(fine_tunings.page(us, None, 5, {"a": "b"})[0]) == 2
    assert fine_tunings.page(us, ids[-2], 5, None)[1] is False


def test_files_are_their_tenants(store: Store) -> None:
    us, them, admin = person(store, "us"), person(store, "them"), person(store, "staff", "admin")
    store.add_file(us, "file-1", "rows.jsonl", 2**40, 3)
    assert [(file.id, file.bytes) for file in store.scalars(files_of(us, None, newest=True))] == [("file-1", 2**40)]
    assert store.file(us, "file-1") is not None
    for other in (them, admin):
        assert store.file(other, "file-1") is None
        assert store.scalars(files_of(other, None, newest=True)) == []
    store.delete_file("file-1")
    assert store.file(us, "file-1") is None


@pytest.mark.parametrize("newest", [True, False])
def test_files_of_one_moment_are_each_on_one_page(store: Store, newest: bool) -> None:
    us, found, more = person(store, "us"), list[StoredFile](), True
    with store.transaction() as session:
        row: Any = {"tenant_id": us.tenant_id, "filename": "rows.jsonl", "bytes": 1, "rows": 1}
        session.add_all(StoredFile(id=f"file-{n}", created=0.1 + n // 4, **row) for n in range(9))
    while more:
        query = files_of(us, found[-1] if found else None, newest=newest)
        page, more = store.page(query, size_of(StoredFile.filename), 2)
        found += page
    ids = [f"file-{n}" for n in range(9)]
    assert [one.id for one in found] == (ids[::-1] if newest else ids)


def test_an_upload_and_its_record_are_one_write(store: Store) -> None:
    us, writes = person(store, "us"), list[Any]()

    def listen(connection: Any) -> None:
        writes.append(connection)

    event.listen(inside.database(store), "commit", listen)
    store.add_file(us, "file-1", "rows.jsonl", 7, 3)
    event.remove(inside.database(store), "commit", listen)
    assert len(writes) == 1
    said = [(one.action, one.object) for one, *_ in store.audit_entries(tenant_id=us.tenant_id)]
    assert ("upload file", "file-1") in said


# --- events -----------------------------------------------------------------------------------------------------------------


def test_events_are_there_in_the_order_of_their_ids(store: Store) -> None:
    """Who reads after the newest one would pass over an earlier one that is committed later."""
    us = person(store, "us")
    first, second = (queued(store, us, name, {}, 3, None).id for name in ("first", "second"))
    written, go = threading.Event(), threading.Event()

    def late(session: Session) -> None:
        written.set()
        assert go.wait(PATIENCE)

    with ThreadPoolExecutor(3) as threads:
        one = threads.submit(store.add_event, first, "step", "0", {}, late)
        assert written.wait(PATIENCE)
        after: list[Future[int | None]] = [
            threads.submit(store.add_event, second, "step", "0", {}),
            threads.submit(lambda: store.events(queued(store, us, "third", {}, 3, None).id)[0].id),
        ]
        early = wait(after, timeout=0.5).done
        go.set()
        assert not early
        earlier, *later = [event.result() for event in (one, *after)]
    assert earlier is not None
    assert all(number is not None and number > earlier for number in later)


def test_an_event_is_kept_once_with_what_it_says_of_its_job(store: Store) -> None:
    us = person(store, "us")
    job, other = (queued(store, us, name, {}, 3, None).id for name in ("sort", "other"))
    assert store.add_event(job, "step", "0", {"reward": 0.5}, step=1) is not None
    assert store.add_event(job, "step", "1", {"reward": None}, step=2) is not None
    assert store.add_event(job, "step", "0", {"reward": 9.0}, step=1) is None  # told again by an engine that starts
    assert store.add_event(job, "state", "1", {"state": "failed"}, state="failed") is not None
    assert store.add_event(other, "step", "0", {"reward": 7.0}) is not None
    assert store.add_event("job-none", "step", "0", {}) is None
    found = store.events(job)
    assert [event.key for event in found] == ["0", "0", "1", "1"]
    assert [event.data.get("reward") for event in found] == [None, 0.5, None, None]
    assert [event.id for event in store.events(job, found[1].id)] == [event.id for event in found[2:]]
    assert len(store.events(job, limit=2)) == 2
    last = store.last_event(job)
    assert last is not None
    assert last.id == found[-1].id
    kept = store.job(us, job)
    assert kept is not None
    assert (kept.step, kept.state) == (2, "failed")


def test_many_writers_at_once_lose_nothing(store: Store) -> None:
    us = person(store, "us")
    jobs = [queued(store, us, f"job{number}", {}, 3, None).id for number in range(4)]

    def write(number: int) -> int:
        job = jobs[number % 4]
        for step in range(15):
            assert store.add_event(job, "step", f"{number}.{step}", {"step": step}) is not None
            store.change_job(job, **({"message": "m"} if number < 4 else {"wanted": "pause"}))
            store.jobs(us)
        return number

    assert at_once(write, 8) == list(range(8))
    for job in jobs:
        told = [event for event in store.events(job) if event.kind == "step"]
        assert len({event.key for event in told}) == 30
        kept = store.job(us, job)
        assert kept is not None
        assert (kept.message, kept.wanted) == ("m", "pause")


# --- rollouts that wait for a reward worker ---------------------------------------------------------------------------------


def work_of(number: int, n: int = 2) -> dict[str, Any]:
    """A piece of work like no other."""
    return {
        "reward": {"args": {}},
        "problem": {"id": number},
        "completions": [f"{number}.{i}\ud800é\0" for i in range(n)],
    }


def test_a_unit_is_asked_once_handed_out_on_lease_and_counted_once(store: Store) -> None:
    units, us = ScoringUnits(store), person(store, "us")
    job, other = (queued(store, us, name, {}, 3, None).id for name in ("sort", "other"))
    keys = [key_of(work_of(number)) for number in range(3)]
    for number, key in enumerate(keys):
        assert units.ask(job, key, 0, work_of(number)) is None
        assert units.ask(job, key, 0, work_of(number)) is None  # asked again after a crash: one unit
    assert units.ask(other, keys[0], 0, work_of(0)) is None
    first = units.lease(job, "a", 2, 60)
    assert [unit.key for unit in first] == keys[:2]
    assert [unit.work for unit in first] == [work_of(0), work_of(1)]
    assert [unit.key for unit in units.lease(job, "b", 5, 60)] == keys[2:]
    assert units.lease(job, "b", 5, 60) == []
    units.give_back(job, "a")
    again = units.lease(job, "b", 1, 60)
    assert [(unit.key, unit.handed_out) for unit in again] == [(keys[0], 2)]
    assert units.settle(job, keys[0], [0.5, "n\0\ud800o"])  # by whoever is first, also when its lease is over
    assert not units.settle(job, keys[0], [9.0, 9.0])
    assert not units.settle(job, "none", [1.0])
    assert units.ask(job, keys[0], 1, work_of(0)) == [0.5, "n\0\ud800o"]
    assert units.ask(other, keys[0], 0, work_of(0)) is None  # nothing of one job is another's
    assert units.completions(job, [*keys, "none"]) == dict.fromkeys(keys, 2)
    assert [unit.key for unit in units.lease(job, "c", 5, 60)] == [keys[1]]
    units.forget(job, before_step=1)  # only what is scored
    assert set(units.completions(job, keys)) == set(keys[1:])
    store.delete_job(job)
    assert units.completions(job, keys) == {}
    assert units.ask(job, keys[0], 0, work_of(0)) is None  # a job that is gone: nothing is kept, nothing falls over
    assert units.completions(job, keys) == {}


def test_one_answer_hands_out_so_much_and_at_least_a_unit(store: Store) -> None:
    units = ScoringUnits(store)
    job = queued(store, person(store, "us"), "sort", {}, 3, None).id
    for number, share in enumerate((4, 4, 1)):
        units.ask(job, f"{number}", 0, {**work_of(number), "completions": ["x" * (MOST_LEASED // share)]})
    assert [[unit.key for unit in units.lease(job, "w", 9, 60)] for _ in range(2)] == [["0", "1"], ["2"]]


def test_a_lease_that_runs_out_is_handed_out_again_unless_it_is_renewed(store: Store) -> None:
    units = ScoringUnits(store)
    job = queued(store, person(store, "us"), "sort", {}, 3, None).id
    key = key_of(work_of(1))
    units.ask(job, key, 0, work_of(1))
    assert [unit.key for unit in units.lease(job, "a", 1, 0.3)] == [key]
    for seconds in (0.0, 60.0):
        assert units.lease(job, "a", 0, seconds) == []  # renews, also if its time was over
    time.sleep(0.4)
    assert units.lease(job, "b", 1, 0.3) == []
    assert units.lease(job, "a", 0, 0.0) == []
    assert [(unit.key, unit.handed_out) for unit in units.lease(job, "b", 1, 60)] == [(key, 2)]
    assert units.lease(job, "a", 1, 60) == []
    assert units.settle(job, key, [1.0, 2.0])


def test_many_workers_at_once_get_every_unit_once(store: Store) -> None:
    units = ScoringUnits(store)
    job = queued(store, person(store, "us"), "sort", {}, 3, None).id
    keys = [key_of(work_of(number)) for number in range(40)]
    for number, key in enumerate(keys):
        units.ask(job, key, 0, work_of(number))

    def take(number: int) -> list[str]:
        found: list[str] = []
        while some := units.lease(job, f"worker{number}", 3, 60):
            found += [unit.key for unit in some]
        return found

    got = at_once(take, 6)
    assert sorted(key for one in got for key in one) == sorted(keys)
    counted = at_once(lambda number: [units.settle(job, key, [float(number)] * 2) for key in keys], 4)
    assert sum(map(sum, counted)) == len(keys)
