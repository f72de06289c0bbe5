"""Jobs that wait: tenants take turns, only those that may run soon are prepared, and a cancel is done at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from motet.cluster import messages as m
from motet.cluster.assignments import Assignments
from motet.cluster.host import Host
from motet.cluster.placement import HostLoad, placed
from motet.config.service import Largest
from motet.hosting.turns import PreparationTurns
from motet.runtime.slots import FREE, Claim
from motet.service.database.store import Store
from motet.service.jobs.handover import Handover, in_turn
from motet.types import JobState
from tests.database import person, queued
from tests.house import House
from tests.service_run import tiny


def test_a_tenant_with_many_waiters_gets_one_turn_and_then_the_others() -> None:
    order: list[str] = []

    async def work(turns: PreparationTurns, tenant: str, number: int) -> None:
        async with turns.turn(tenant):
            order.append(f"{tenant}{number}")
            await asyncio.sleep(0)

    async def run() -> None:
        turns = PreparationTurns()
        many = [asyncio.create_task(work(turns, "a", number)) for number in range(5)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(work(turns, tenant, 0)) for tenant in ("b", "c")]
        await asyncio.sleep(0)
        many[2].cancel()  # one that gives up takes nobody's turn
        await asyncio.gather(*many, *few, return_exceptions=True)
        await work(turns, "d", 0)

    asyncio.run(run())
    assert order == ["a0", "a1", "b0", "c0", "a3", "a4", "d0"]


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
    host = Host(0, start, tmp_path / "log", None)  # type: ignore[arg-type]
    host.ready = True
    jobs = Assignments([host])
    jobs.ahead = 1

    def give(name: str, tenant: str) -> bool:
        message = m.AddJob({"name": name}, "run", 0, tenant, FREE, base="small")
        return jobs.place(message, jobs.loads()) is host

    assert give("one", "me")
    jobs.moved_on(host, m.JobChanged("one", JobState.RUNNING, ""))
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


def test_what_was_asked_before_a_crash_is_recorded_and_no_host_hears_of_it(house: House) -> None:
    for name, wanted in (("old", "cancel"), ("older", "pause")):
        job = house.ask("POST", "/v1/jobs", json=tiny(name)).json()["id"]
        house.store.change_job(job, wanted=wanted)
    house.part(Handover).open_jobs()
    assert [house.ask("GET", f"/v1/jobs/{name}").json()["state"] for name in ("old", "older")] == [
        "cancelled",
        "paused",
    ]
