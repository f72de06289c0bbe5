"""Jobs that wait: tenants take turns, only those that may run soon are prepared, and a cancel is done at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError

from motet.config.service import Largest
from motet.core.types import JobState, Wanted
from motet.hosts import messages as m
from motet.hosts.assignments import Assignments
from motet.hosts.host_link import HostLink
from motet.hosts.placement import HostLoad, placed
from motet.process.thread_turns import ThreadTurns
from motet.runtime.scheduler import FairScheduler
from motet.runtime.slot_turns import MOST_REST, StartTurns
from motet.runtime.slots import FREE, Claim
from motet.service.database.store import Store
from motet.service.jobs.handover import Handover, in_turn
from tests.support.database import person, queued
from tests.support.fake_run import FakeRun, Setting, job, run_jobs
from tests.support.house import House, open_house, statements
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE


def test_a_tenant_with_many_waiters_gets_one_turn_and_then_the_others() -> None:
    order, all_wait = list[str](), threading.Event()

    def prepare(name: str) -> None:
        assert all_wait.wait(PATIENCE)
        order.append(name)

    async def work(turns: StartTurns, threads: ThreadTurns, tenant: str, number: int) -> None:
        async with turns.turn("prepare", tenant):
            await threads.run(tenant, lambda: prepare(f"{tenant}{number}"))

    async def run() -> None:
        parts = StartTurns(lambda _: 0.0), ThreadTurns(1, 9)
        many = [asyncio.create_task(work(*parts, "a", number)) for number in range(5)]
        await until_all_wait()
        few = [asyncio.create_task(work(*parts, tenant, 0)) for tenant in ("b", "c")]
        await until_all_wait()
        many[2].cancel()  # one that gives up takes nobody's turn
        all_wait.set()
        await asyncio.gather(*many, *few, return_exceptions=True)
        await work(*parts, "d", 0)
        parts[1].close()

    asyncio.run(run())
    assert order == ["a0", "b0", "c0", "a1", "a3", "a4", "d0"]


async def until_all_wait() -> None:
    """Let the event loop turn until everybody waits for a lock or a thread."""
    for _ in range(50):
        await asyncio.sleep(0)


class _Starts:
    """Starts of tenants by a clock of their own, which goes on while they work, and while all wait for one that rests."""

    def __init__(self, seconds: float, others: float) -> None:
        self.now, self.others, self.started = 0.0, others, list[tuple[str, float]]()
        self.turns, self._seconds = StartTurns(lambda _: self.others, self._later, lambda: self.now), seconds
        self._rests = list[tuple[float, Callable[[], None]]]()

    def _later(self, seconds: float, release: Callable[[], None]) -> None:
        self._rests.append((self.now + seconds, release))

    async def prepare(self, tenant: str, *, free: bool = False) -> None:
        await self._start("prepare", tenant, free)

    async def open(self, tenant: str, *, free: bool = False) -> None:
        await self._start("open", tenant, free)

    async def _start(self, what: str, tenant: str, free: bool) -> None:
        async with self.turns.turn(what, tenant, free=free):
            self.started.append((tenant, self.now))
            self.now += self._seconds

    def run(self, *works: Coroutine[None, None, None]) -> list[tuple[str, float]]:
        async def all_of_them() -> None:
            starts = asyncio.gather(*works)
            while not starts.done():
                await until_all_wait()
                if self._rests and not starts.done():
                    self._rests.sort(key=lambda rest: rest[0])
                    until, release = self._rests.pop(0)
                    self.now = max(self.now, until)
                    release()
            await starts

        asyncio.run(all_of_them())
        return [(tenant, round(at, 6)) for tenant, at in self.started]


def test_while_others_train_starting_jobs_takes_no_more_than_a_tenant_s_share_of_the_time() -> None:
    beside = _Starts(1.0, others=2.0)
    assert beside.run(*(beside.prepare("a") for _ in range(3))) == [("a", 0.0), ("a", 3.0), ("a", 6.0)]
    opened = _Starts(1.0, others=1.0)
    assert opened.run(*(opened.open("a") for _ in range(3))) == [("a", 0.0), ("a", 2.0), ("a", 4.0)]
    alone = _Starts(1.0, others=0.0)
    assert alone.run(*(alone.prepare("a") for _ in range(3))) == [("a", 0.0), ("a", 1.0), ("a", 2.0)]
    slow = _Starts(1000.0, others=5.0)
    assert slow.run(slow.open("a"), slow.open("a")) == [("a", 0.0), ("a", 1000.0 + MOST_REST)]


def test_the_time_in_which_a_preparation_waits_for_others_is_not_charged() -> None:
    rests = list[float]()

    def later(seconds: float, release: Callable[[], None]) -> None:
        rests.append(seconds)

    async def prepare() -> None:
        turns = StartTurns(lambda _: 1.0, later, iter([0.0, 9.0, 12.0]).__next__)
        async with turns.turn("prepare", "a") as seconds:
            assert seconds is not None
            seconds.append(2.0)
        async with turns.turn("open", "a"):
            pass

    asyncio.run(prepare())
    assert rests == [2.0, 3.0]


def test_jobs_of_a_host_that_died_start_without_a_rest() -> None:
    died = _Starts(1.0, others=9.0)
    order = died.run(*(died.prepare("a", free=True) for _ in range(3)))
    assert order == [("a", 0.0), ("a", 1.0), ("a", 2.0)]
    assert died.run(died.open("a", free=True), died.open("a", free=True))[3:] == [("a", 3.0), ("a", 4.0)]
    assert died.run(died.open("a"), died.open("a"))[5:] == [("a", 5.0), ("a", 15.0)], "a new start rests as before"


@pytest.mark.parametrize("what", ["prepare", "open"])
def test_a_job_that_had_a_slot_does_not_wait_behind_a_new_one_that_rests(what: str) -> None:
    starts = _Starts(1.0, others=9.0)
    begin = getattr(starts, what)
    _, (_, again), (_, new) = starts.run(begin("a"), begin("a"), begin("a", free=True))
    assert again < 3
    assert new >= 10


@pytest.mark.parametrize("resumes", [False, True])
def test_a_job_that_had_a_slot_is_opened_once_without_a_rest(tmp_path: Path, resumes: bool) -> None:
    rests = list[float]()

    def later(seconds: float, release: Callable[[], None]) -> None:
        rests.append(seconds)

    async def adds(run: FakeRun) -> None:
        while run.jobs["other"].progress.step == 0:  # its tenant works, and starts nothing more
            await asyncio.sleep(0.001)
        run.jobs["one"].resumes = resumes
        vars(run.services)["starts"] = StartTurns(run.services.scheduler.others, later)
        run.pipeline.add(run.jobs["one"])

    tenants = {"one": "us", "other": "them"}
    setting = Setting(tenants=tenants, late=frozenset({"one"}))
    run = run_jobs(tmp_path, [job(name, steps=3) for name in tenants], setting, adds)
    assert {run.state(name) for name in tenants} == {JobState.SUCCEEDED}
    assert bool(rests) is not resumes
    assert not run.jobs["one"].resumes


def test_a_tenant_that_rests_keeps_nobody_else_from_starting() -> None:
    starts = _Starts(1.0, others=3.0)
    order = starts.run(*(starts.prepare("a") for _ in range(2)), starts.prepare("b"), starts.prepare("c"))
    assert [tenant for tenant, _ in order] == ["a", "b", "c", "a"]


def test_other_tenants_with_jobs_here_count_by_their_shares() -> None:
    scheduler = FairScheduler(8)
    scheduler.share("large", 4.0)
    for name, tenant in (("one", "small"), ("two", "large"), ("three", "large"), ("four", "third")):
        scheduler.join(name, 1.0, tenant)
    assert scheduler.others("new") == 0, "none has worked yet"
    for name in ("one", "two", "three", "four"):
        scheduler.spend(name, 1)
    assert [scheduler.others(tenant) for tenant in ("small", "large", "third", "new")] == [5.0, 0.5, 5.0, 6.0]
    for name in ("two", "three", "four"):
        scheduler.leave(name)
    assert scheduler.others("small") == 0


def test_a_host_prepares_a_few_jobs_of_each_tenant_beyond_its_slots() -> None:
    mine = [Claim(f"mine-{number}", "me") for number in range(6)]
    full = HostLoad(0, 2, running=tuple(mine[:2]), waiting=tuple(mine[2:5]), fresh=tuple(mine[2:4]))
    assert placed(Claim("more", "me"), [full], {}, ahead=3) == 0
    assert placed(Claim("more", "me"), [full], {}, ahead=2) is None
    assert placed(Claim("other", "you"), [full], {}, ahead=2) == 0
    assert placed(Claim("urgent", "me", priority=10), [full], {}, ahead=2) == 0  # nothing of its kind waits
    assert placed(Claim("more", "me"), [HostLoad(0, 2, running=tuple(mine[:1]))], {}, ahead=0) == 0  # a slot is free


def test_a_job_that_was_not_placed_is_placed_when_one_before_it_has_a_slot(tmp_path: Path) -> None:
    start = m.StartHost("small", "", {"slots": 1}, {}, {}, [], 1.0, Largest(), serves="small")
    host = HostLink(0, start, tmp_path / "log", None)  # type: ignore[arg-type]
    host.ready = True
    jobs = Assignments([host])
    jobs.ahead = 1

    def give(name: str, tenant: str) -> bool:
        message = m.AddJob({"name": name}, Wanted.RUN, 0, tenant, FREE, base="small")
        return jobs.place(message, jobs.loads()) is host

    assert give("one", "me")
    jobs.moved_on(host, m.JobChanged("one", JobState.RUNNING, ""))
    assert not give("one", "me"), "it came with its host while the queue was read"
    assert [give(name, "me") for name in ("two", "three")] == [True, False]
    assert give("other", "you")
    assert (jobs.room("me", "small"), jobs.room("new", "small")) == (0, 1)
    assert not jobs.can_place_more()  # the slot is taken, and one waits
    jobs.moved_on(host, m.JobChanged("one", JobState.SUCCEEDED, ""))
    jobs.moved_on(host, m.JobChanged("two", JobState.RUNNING, ""))
    assert jobs.can_place_more()
    assert give("three", "me")
    for name, state in (("two", JobState.QUEUED), ("three", JobState.RUNNING)):  # `two` asks for nothing, and rests
        jobs.moved_on(host, m.JobChanged(name, state, ""))
    assert give("four", "me")


def test_jobs_are_read_by_turns_of_tenants_and_a_few_of_each(store: Store) -> None:
    us, them = person(store, "us"), person(store, "them")
    first = [queued(store, us, f"a{number}", {"priority": 0}, 1, None) for number in range(5)]
    urgent = queued(store, us, "urgent", {"priority": 10}, 1, None)
    queued(store, them, "b0", {}, 1, None)  # as an older release wrote it, without a priority
    begun = queued(store, us, "begun", {"priority": -10}, 1, None)
    store.change_job(begun.id, state="running")
    store.change_job(first[3].id, state="paused", wanted="pause")
    store.change_job(first[4].id, waits=True)
    assert [job.name for job in store.scalars(in_turn((), None))] == ["b0", "begun", "urgent", "a0", "a1", "a2"]
    assert [job.name for job in store.scalars(in_turn([begun.id], 2))] == ["urgent", "b0", "a0"]
    assert urgent.number > first[0].number


@pytest.mark.parametrize("damage", [r'{"sampling": {"stop": ["a\u0000"]}}', r'{"a": "\ud83d"}', '{"name": "odd', "{}"])
def test_a_stored_row_that_cannot_be_read_fails_its_own_job(url: str, tmp_path: Path, damage: str) -> None:
    """As an earlier release stored a NUL in a stop text, or as a disk damaged it: the others' jobs start nevertheless."""
    with open_house(tmp_path, database=url) as house:
        for key, name in (("ours", "odd"), ("ours", "mine"), ("theirs", "yours")):
            assert house.ask("POST", "/v1/jobs", key, json=tiny(name)).status_code == 201
        with contextlib.suppress(DataError), house.store.transaction() as session:  # PostgreSQL keeps no broken JSON
            session.execute(text("UPDATE jobs SET spec = :spec WHERE name = 'odd'"), {"spec": damage})
        names = {str(message.job["name"]) for message in house.service.handover.open_jobs()}
        rows = {job.name: job for job in house.store.jobs(person(house.store, "staff", "admin"))}
        damaged = rows["odd"].id not in names
        assert damaged is (not url.startswith("postgresql") or not damage.endswith("odd"))
        assert {rows["mine"].id, rows["yours"].id} < names | {rows["odd"].id}
        assert (rows["odd"].state, rows["mine"].state) == ("failed" if damaged else "queued", "queued")
        assert house.ask("GET", "/v1/jobs", "admin").status_code == 200
        assert house.service.handover.open_jobs()
    Store(url).close()


def test_a_cancel_of_a_job_that_no_host_has_is_done_in_the_answer(house: House) -> None:
    for name in ("one", "two"):
        assert house.ask("POST", "/v1/jobs", json=tiny(name)).status_code == 201
    cancelled = house.ask("POST", "/v1/jobs/one/cancel").json()
    assert (cancelled["state"], cancelled["message"]) == ("cancelled", "cancelled before it began")
    assert house.ask("POST", "/v1/jobs/two/pause").json()["state"] == "paused"
    handed = house.part(Handover)
    assert handed.open_jobs() == []
    assert house.ask("POST", "/v1/jobs/two/resume").json()["state"] == "queued"
    assert [one.job["name"] for one in handed.open_jobs()] == [house.ask("GET", "/v1/jobs/two").json()["id"]]
    kinds = [one["data"]["state"] for one in house.ask("GET", "/v1/jobs/one/events").json()["data"]]
    assert kinds == ["queued", "cancelled"]


def test_a_host_hears_which_jobs_had_a_slot_when_the_last_one_ended(house: House) -> None:
    ids = [house.ask("POST", "/v1/jobs", json=tiny(name)).json()["id"] for name in ("had", "waits")]
    house.store.change_job(ids[0], state="running")
    told = {one.job["name"]: one.resumes for one in house.part(Handover).open_jobs()}
    assert (told[ids[0]], told[ids[1]]) == (True, False)


def test_a_host_that_starts_gets_the_rule_of_a_tenant_by_one_computation(house: House) -> None:
    with statements() as asked:
        for name in ("first", "second", "third"):
            house.ask("POST", "/v1/jobs", json=tiny(name))
        asked.clear()
        added = house.part(Handover).open_jobs()
    assert len(added) >= 3
    assert len({one.tenant for one in added}) == 1
    assert sum("FROM usage" in query and "usage.tenant_id IN" in query for query in asked) == 1


def test_what_was_asked_before_a_crash_is_recorded_and_no_host_hears_of_it(house: House) -> None:
    for name, wanted in (("old", "cancel"), ("older", "pause")):
        job = house.ask("POST", "/v1/jobs", json=tiny(name)).json()["id"]
        house.store.change_job(job, wanted=wanted)
    house.part(Handover).open_jobs()
    assert [house.ask("GET", f"/v1/jobs/{name}").json()["state"] for name in ("old", "older")] == [
        "cancelled",
        "paused",
    ]


def test_who_gives_up_while_it_waits_to_be_opened_has_no_turn_and_frees_it() -> None:
    """Behind another job of its tenant, and while the tenant rests."""

    ends, clock = list[Callable[[], None]](), itertools.count()

    async def wait() -> list[bool]:
        turns = StartTurns(
            lambda tenant: 1.0, lambda seconds, release: ends.append(release), lambda: float(next(clock))
        )
        found = list[bool]()
        async with turns.turn("open", "us"), turns.turn("open", "us", lambda: True) as turn:
            found.append(turn is not None)
        async with turns.turn("open", "us", lambda: True) as turn:
            found.append(turn is not None)
        ends.pop()()
        async with asyncio.timeout(PATIENCE), turns.turn("open", "us", lambda: False) as turn:
            found.append(turn is not None)
        return found

    assert asyncio.run(wait()) == [False, False, True]
