"""What a tenant stores counts where it is written: rows of the database, blocks and inodes, whatever they are for."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Text, cast, func, select

from motet.config import RewardConfig
from motet.config.service import LimitsConfig
from motet.hosts.messages import Progress
from motet.service.database.store import Store
from motet.service.database.tables import ScoringUnit, StoredJob, UploadedAdapter, Usage
from motet.service.workers.rewards import RewardWorkers
from tests.support import inside
from tests.support.earlier import FIRST, unpack
from tests.support.house import House, open_house
from tests.support.service_run import ROWS, tiny

MB = 2**20


def stored(house: House) -> int:
    """Bytes of the tenant `us`."""
    found: int = house.ask("GET", "/v1/limits").json()["stored_bytes"]
    return found


def job_of(house: House, name: str = "ended") -> StoredJob:
    """A job of `us`."""
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    job = house.store.job(who, name)
    assert job is not None
    return job


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A service of its own."""
    with open_house(tmp_path) as found:
        yield found


class Watched(dict[str, Any]):
    """A row that knows which threads look at its columns."""

    def __init__(self, **columns: Any) -> None:
        super().__init__(**columns)
        self.readers = set[threading.Thread]()

    def __iter__(self) -> Any:
        self.readers.add(threading.current_thread())
        return super().__iter__()

    def items(self) -> Any:
        """Its columns, as encoders in C ask for them."""
        self.readers.add(threading.current_thread())
        return super().items()


def test_work_for_reward_workers_takes_room_of_its_tenant_until_it_is_scored(tmp_path: Path) -> None:
    with open_house(tmp_path, limits=LimitsConfig(storage_mb=8)) as house:
        job, reward, before = job_of(house), RewardConfig(name="worker"), stored(house)
        rows = [Watched(id=number, metadata={"text": "x" * MB}) for number in range(20)]

        async def asked() -> tuple[list[Any], list[str]]:
            workers = RewardWorkers(house.store, house.service.bus, 60.0, house.service.quotas)
            asking = [asyncio.create_task(workers.ask(job, reward, row, ["yes"])) for row in rows]
            refused, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            while len(refused) < 13:
                await asyncio.sleep(0.01)
                refused = {one for one in asking if one.done()}
            assert stored(house) - before > 6 * MB
            house.service.stored.work_added(job.tenant_id, job.id, 2 * MB)  # as if an earlier release had kept it
            assert house.refused(403, "POST", "/v1/files", files={"file": ("rows.jsonl", ROWS)})
            assert house.service.enforcer.rule(job.tenant_id).hold == "", "what runs may end"
            house.service.stored.work_done(job.id, 2 * MB)
            keys = list[str]()
            while len(keys) < 7:
                leased = await asyncio.to_thread(workers.units.lease, job.id, "w", 9, 60.0)
                keys += [one.key for one in leased if one.key not in keys]
            await workers.settle(job.id, {key: [1.0] for key in keys})
            told = await asyncio.gather(*asking)
            workers.close()
            return told, keys

        told, keys = asyncio.run(asked())
        reasons = [one[0] for one in told if one != [1.0]]
        assert (len(reasons), len(keys)) == (13, 7)
        assert all("reward worker: storage_mb: this tenant stores" in one for one in reasons)
        assert stored(house) - before < MB
        assert all(row.readers for row in rows)
        assert all(threading.main_thread() not in row.readers for row in rows), "the loop reads no row"
        assert (tmp_path / "motet.db").stat().st_size + (tmp_path / "motet.db-wal").stat().st_size < 30 * MB


def test_jobs_whose_files_take_more_blocks_than_their_tenant_may_store_run_on(house: House) -> None:
    """An earlier release counted the content alone; whom this one puts over its limit writes nothing new."""
    job, before = job_of(house), stored(house)
    receipts = house.storage.job(job.id).receipts
    receipts.mkdir()
    for number in range(1000):
        (receipts / f"v{number}.json").write_bytes(b"x" * 1000)
    limits = house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": (before + 1.1 * MB) / MB})
    assert limits.status_code == 200
    house.service.stored.changed(job.id)
    house.service.enforcer.enforce()
    house.service.stored.measure()
    assert stored(house) - before > 3.9 * MB
    assert "storage_mb" in house.refused(403, "POST", "/v1/files", files={"file": ("rows.jsonl", ROWS)})["message"]
    rule = house.service.enforcer.rule(job.tenant_id)
    assert (rule.hold, rule.room is not None and rule.room > 100_000) == ("", True), "commits fit, too"
    (receipts / "v1000.json").write_bytes(b"x" * 2 * MB)
    house.service.stored.changed(job.id)
    house.service.stored.measure()
    assert "storage_mb" in house.service.enforcer.rule(job.tenant_id).hold


def test_rows_that_hosts_have_prepared_count(house: House) -> None:
    job, sizes = job_of(house), list[int]()
    (host,) = house.service.hosts.hosts
    host._handlers = house.service.handlers()
    stored(house)
    house.service.stored.measure()  # the job's directory, too
    for mb in (0, 3, 0):
        asyncio.run(inside.handle(host, Progress({}, {}, prepared={job.tenant_id: mb * MB, "tenant-other": 7 * MB})))
        house.service.enforcer.enforce()
        sizes.append(stored(house))
    assert [one - sizes[0] for one in sizes] == [0, 3 * MB, 0]


def test_work_that_waits_is_counted_after_a_restart_too(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        before = stored(house)
        house.service.reward_workers.units.ask(job_of(house).id, "key", 0, {"text": "x" * MB, "completions": []})
        assert stored(house) - before < MB, "this one bypassed the limit"
        house.service.stored._bytes.clear()  # as in another process
        assert stored(house) - before > MB
        house.service.reward_workers.units.forget(job_of(house).id)
        assert stored(house) - before < MB


def test_work_and_scores_count_as_the_text_that_is_stored(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        job, units, counted = job_of(house), house.service.reward_workers.units, house.service.stored
        texts = [func.coalesce(func.length(cast(column, Text)), 0) for column in (ScoringUnit.work, ScoringUnit.scores)]

        def sizes() -> tuple[int, int]:
            counted.of(job.tenant_id)
            return counted._work[job.tenant_id][job.id], house.store.scalar(select(func.sum(texts[0] + texts[1]))) or 0

        for key in "ab":
            units.ask(job.id, key, 0, {"text": "\u6587" * 6000, "nan": math.nan, "completions": []}, job.tenant_id)
        found = [sizes()]
        units.settle(job.id, "a", [[0.5, "\u6587" * 4000]])
        found.append(sizes())
        counted._bytes.clear()  # as in another process
        found.append(sizes())
        units.forget(job.id, before_step=1)
        found.append(sizes())
        assert [one for one, _ in found] == [one for _, one in found]
        assert found[0][0] > 72_000 > found[1][0] > 60_000 > found[3][0] > 36_000


@pytest.mark.parametrize(
    ("what", "least"),
    [
        ("files", 20 * 4096),
        ("adapters", 20 * 3 * 4096),
        ("events", 20 * 1024),
        ("keys and audit", 60 * 512),
        ("usage", 20 * 512),
    ],
)
def test_many_small_things_count(tmp_path: Path, what: str, least: int) -> None:
    with open_house(tmp_path) as house:
        job, sizes = job_of(house), house.service.stored

        def later() -> int:
            sizes.measure()
            sizes._entries = (-math.inf, sizes._entries[1])  # after a minute
            return stored(house)

        stored(house)
        before = later()  # with the directory of the job, which is larger than what comes
        for number in range(20):
            if what == "files":
                house.ask("POST", "/v1/files", files={"file": (f"{number}.jsonl", b'{"prompt": "a", "answer": "b"}\n')})
            elif what == "adapters":
                shape: Any = {"bytes": 1, "rank": 1, "alpha": 1.0, "target_modules": []}
                with house.store.transaction() as session:
                    session.add(UploadedAdapter(id=f"a-{number}", name=f"{number}", tenant_id=job.tenant_id, **shape))
            elif what == "events":
                house.recorder.record_step(job.id, {"step": 10 + number})
            elif what == "usage":  # which stays when its job is deleted
                none = {"tokens_prompt": 0, "tokens_sampled": 1, "tokens_trained": 0, "microseconds": 0}
                with house.store.transaction() as session:
                    session.add(
                        Usage(day="2026-01-31", tenant_id=job.tenant_id, job_id=f"gone-{number}", job_name="", **none)
                    )
            else:
                key = house.ask("POST", "/v1/keys", json={"name": "more"}).json()
                house.ask("DELETE", f"/v1/keys/{key['id']}")
        assert later() - before >= least


def test_ended_keys_are_bounded(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        tenants = house.store.tenants
        with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
            (us,) = database.execute("SELECT id FROM tenants WHERE name = 'us'").fetchone()
            rows = [(f"key-old-{n}", us, f"{n}", "old", "member", float(n), 1.0) for n in range(2100)]
            insert = (
                "INSERT INTO keys (id, tenant_id, digest, name, role, created, revoked) VALUES (?, ?, ?, ?, ?, ?, ?)"
            )
            database.executemany(insert, rows)
            database.commit()
        for _ in range(2):
            tenants.create_key("us", "new", "member")
        with contextlib.closing(sqlite3.connect(tmp_path / "motet.db")) as database:
            left = database.execute("SELECT id FROM keys WHERE name = 'old' ORDER BY created").fetchall()
            assert len(left) <= 2000
            assert left[-1] == ("key-old-2099",)
        assert house.ask("GET", "/v1/jobs").status_code == 200


@pytest.mark.parametrize("earlier", [False, True], ids=["new", "earlier"])
def test_the_database_gives_space_back(tmp_path: Path, earlier: bool) -> None:
    place = unpack(FIRST, "served", tmp_path) / "motet.db" if earlier else tmp_path / "motet.db"
    store = Store(f"sqlite:///{place}")
    try:
        with store.transaction() as session:
            connection = session.connection()
            connection.exec_driver_sql("CREATE TABLE large (text TEXT)")
            for _ in range(30):
                connection.exec_driver_sql("INSERT INTO large VALUES (zeroblob(1048576))")
        with store.transaction() as session:
            session.connection().exec_driver_sql("DROP TABLE large")
        for _ in range(10):
            store.presence.shrink()
    finally:
        store.close()
    assert place.stat().st_size < 18 * MB


def test_logs_of_hosts_are_bounded_while_they_are_written(house: House, tmp_path: Path) -> None:
    for name in ("engine.log", "engine-3.log", "run/server-0.log"):
        log = tmp_path / name
        log.parent.mkdir(exist_ok=True)
        with log.open("ab", buffering=0) as writer:
            writer.write(b"short\n")
            house.service.enforcer.enforce()
            assert log.read_bytes() == b"short\n"
            for text in (b"first", b"second"):
                writer.write(text + b"x" * 2**25)
                house.service.enforcer.enforce()
                assert log.stat().st_size == 0
            writer.write(b"last\n")
            assert log.read_bytes() == b"last\n"
        assert {one.name for one in log.parent.glob(f"{log.name}*")} == {log.name, f"{log.name}.1"}
        assert log.with_name(f"{log.name}.1").read_bytes().startswith(b"second")


def test_configurations_are_stored_too(tmp_path: Path) -> None:
    with open_house(tmp_path, limits=LimitsConfig(storage_mb=1)) as house:
        large = tiny("large") | {"environment": {"name": "agent", "args": {"text": "x" * 2**19}}}
        said = list[int]()
        for number in range(4):
            said.append(house.ask("POST", "/v1/jobs", json=large | {"name": f"large-{number}"}).status_code)
            house.service.enforcer.enforce()
        assert said[0] == 201
        assert said[-1] == 403
