"""What a service does for all of its jobs at once, counted: as many queries for fifty jobs of ten tenants as for a few."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from motet.core.types import JobState
from motet.hosts.messages import JobStanding, UsageWindow
from motet.runtime.device_usage import IDLE
from motet.service.adapters.adapters import ALL, MOST_SHARES
from motet.service.database.tables import Share, UploadedAdapter, new_id
from motet.service.database.tenants import Principal
from tests.support.counting import calls
from tests.support.database import queued
from tests.support.house import House, open_house, statements
from tests.support.service_run import tiny

PAGES = ("/metrics", "/v1/jobs?limit=100", "/v1/tenants", "/v1/usage", "/v1/models")
TIMES = 4


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """One whose tenants may have many jobs."""
    with open_house(tmp_path, limits={"queued_jobs": 100, "running_jobs": 100}, rate=None) as found:
        yield found


def live(house: House, jobs: int, tenants: int) -> list[str]:
    """The ids of so many running jobs."""
    found = []
    for number in range(jobs):
        tenant = f"tenant-{number % tenants}"
        if tenant not in house.keys:
            house.keys[tenant] = house.ask("POST", "/v1/keys", "admin", json={"tenant": tenant}).json()["key"]
        name = f"job-{number}-of-{jobs}"
        found.append(house.ask("POST", "/v1/jobs", tenant, json=tiny(name)).json()["id"])
    for job_id in found:
        house.recorder.record_state(job_id, JobState.RUNNING, "")
        house.recorder.record_step(job_id, {"step": 0, "loss": 0.0, "tokens_sampled": 3})
    (host,) = house.service.hosts.hosts
    host.progress |= {one: JobStanding("training", 1, 0, 8, 9, 1.0, None) for one in found}
    return found


def asked(house: House, jobs: list[str], window: int) -> dict[str, int]:
    """How many queries each page takes, and what runs without a page."""
    found = {page: queries(partial(house.ask, "GET", page, "admin")) for page in PAGES}
    windows = itertools.count(window)
    house.recorder.record_usage(UsageWindow("engine", next(windows), {IDLE: 7}))
    times = dict.fromkeys((*jobs, IDLE), 7)
    found["usage"] = queries(lambda: house.recorder.record_usage(UsageWindow("engine", next(windows), times)))
    found["limits"] = queries(house.service.enforcer.enforce)
    return found


def queries(work: Callable[[], object]) -> int:
    """The fewest of some times: what is known is asked once, and other threads of the service ask now and then."""
    counts = []
    for _ in range(TIMES):
        with statements() as said:
            work()
        counts.append(len(said))
    return min(counts)


def test_pages_and_accounts_take_as_many_queries_for_many_jobs(house: House) -> None:
    few = asked(house, live(house, 2, 1), 1)
    many = asked(house, live(house, 50, 10), 100)
    assert many == few
    lines = house.ask("GET", "/v1/usage", "admin").json()["data"]
    times = Counter(round(1e6 * line["device_seconds"]) for line in lines if line["kind"] == "job")
    assert times == {7 * TIMES: 52}
    assert house.ask("GET", "/metrics", "admin").text.count("motet_tokens_per_second{") == 52


def test_jobs_are_handed_over_without_a_look_at_all_jobs_for_each(house: House) -> None:
    (host,) = house.service.hosts.hosts
    host.ready, host.slots = True, 100

    def counts(jobs: int, tenants: int) -> tuple[int, int]:
        live(house, jobs, tenants)
        house.service.handover.open_jobs()
        with calls() as counted:
            messages = house.service.handover.open_jobs()
        assert len(messages) >= jobs
        assert {message.first_step for message in messages} == {1}
        return queries(house.service.handover.open_jobs), counted["Assignments.loads"]

    few, many = counts(20, 10), counts(50, 10)
    assert many[1] == few[1]
    assert many[0] <= few[0] + 10, "but for the limits of each tenant, which are read once a second"


def test_shares_take_as_many_queries_for_many_as_for_one(house: House) -> None:
    """And a tenant that shares much with all makes no other wait."""
    owner = house.store.tenants.made("us").id
    who = Principal.member_of(owner)

    def share(number: int) -> None:
        name = f"shared-{number}"
        if number % 2:
            row = UploadedAdapter(
                id=new_id("adapter"),
                tenant_id=owner,
                name=name,
                bytes=4,
                rank=32,
                alpha=32.0,
                target_modules=["q_proj"],
            )
            thing = house.service.adapters.add(who, row).id
        else:
            thing = queued(house.store, who, name, {}, 1, None).id
            (house.storage.job(thing).path / "versions" / "v3").mkdir(parents=True)
        house.service.adapters.share(Share(id=new_id("share"), tenant_id=owner, object=thing, with_tenant=ALL))

    def counts() -> list[int]:
        pages = ("/v1/models", "/v1/shares")
        return [queries(partial(house.ask, "GET", page, key)) for page in pages for key in ("theirs", "ours", "admin")]

    share(0)
    few = counts()
    for number in range(1, 200):
        share(number)
    assert counts() == few
    listed = {one["id"] for one in house.ask("GET", "/v1/models", "theirs").json()["data"]}
    assert {"us/shared-0@3", "us/shared-0@best", "us/shared-199"} <= listed
    received = house.ask("GET", "/v1/shares", "theirs").json()["received"]
    assert sorted(one["name"] for one in received) == sorted(f"shared-{number}" for number in range(200))


def test_a_tenant_gives_so_many_shares(house: House) -> None:
    first = house.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "them"}).json()
    owner, given = house.store.tenants.made("us").id, len(house.ask("GET", "/v1/shares").json()["given"])
    rows = [
        Share(id=new_id("share"), tenant_id=owner, object=new_id("job"), with_tenant=ALL)
        for _ in range(given, MOST_SHARES)
    ]
    with house.store.transaction() as session:
        session.add_all(rows)
    message = house.refused(409, "POST", "/v1/shares", json={"name": "ended", "tenant": "*"})["message"]
    assert "motet unshare" in message
    assert house.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "them"}).json() == first
    assert house.ask("DELETE", f"/v1/shares/{rows[0].id}").status_code == 204
    assert house.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "*"}).status_code == 201
