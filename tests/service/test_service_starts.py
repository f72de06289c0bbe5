"""Jobs that wait: for other jobs, for a time, and what their adapters start from; on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from motet.config import JobConfig
from motet.config.jobfile import normal_job
from motet.core.checksums import SUMS
from motet.core.errors import ConfigError, StoreError
from motet.core.types import JobState, Wanted
from motet.runtime.identity import RECORD
from motet.service.database.store import Store
from motet.service.database.tenants import Principal
from motet.service.jobs.handover import Handover
from motet.service.tenants.quotas import Quotas
from tests.support.counting import calls
from tests.support.database import person
from tests.support.house import House, open_house
from tests.support.places import Place
from tests.support.service_run import Json, tiny
from tests.support.waiting import wait_until


@pytest.fixture
def place(store: Store, tmp_path: Path) -> Place:
    return Place(store, tmp_path / "run")


@pytest.fixture
def us(place: Place) -> Principal:
    return person(place.store, "us")


# --- after ------------------------------------------------------------------------------------------------------------------


def test_a_job_waits_until_others_have_succeeded(place: Place, us: Principal) -> None:
    first, second = place.submit(us, "first"), place.submit(us, "second")
    job = place.submit(us, "third", after=["first", second.id])
    assert (job.waits, job.state, job.message) == (True, "queued", "waits for 'first', 'second' to succeed")
    assert not first.waits
    place.queue.release()
    place.end(first)
    place.queue.release()
    assert place.now(job).message == "waits for 'second' to succeed"
    assert place.handed == []
    place.end(second)
    place.queue.release()
    place.queue.release()
    assert place.handed == ["third"]
    assert (place.now(job).waits, place.now(job).message) == (False, "")
    assert [event.data["message"] for event in place.store.events(job.id)] == [job.message, ""]


def test_a_job_after_one_that_has_succeeded_starts_at_once(place: Place, us: Principal) -> None:
    first = place.submit(us, "first")
    place.end(first)
    assert not place.submit(us, "second", after=["first"], at=time.time() - 5).waits


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_fails_with_what_it_waits_for_and_can_be_resumed(place: Place, us: Principal, state: str) -> None:
    first = place.submit(us, "first")
    job = place.submit(us, "second", after=["first"])
    place.end(first, state, "no luck")
    place.queue.release()
    failed = place.now(job)
    assert (failed.state, failed.ended is not None) == ("failed", True)
    assert failed.message == f"job 'first', which this one waits for, has {state}: no luck"
    assert place.handed == []
    assert place.queue.steer(failed, Wanted.RUN)
    place.queue.release()
    assert place.now(job).state == "failed"  # still no use
    assert place.queue.steer(failed, Wanted.RUN)
    place.end(first, "queued")  # it was resumed too
    place.queue.release()
    assert place.now(job).message == "waits for 'first' to succeed"
    place.end(first)
    place.queue.release()
    assert place.handed == ["second"]
    with pytest.raises(ConfigError, match="after: there is no job 'none'"):
        place.submit(us, "third", after=["none"])
    place.end(first, state)
    with pytest.raises(ConfigError, match=f"has {state}"):
        place.submit(us, "third", after=["first"])


def test_a_job_that_is_waited_for_and_removed_is_told(place: Place, us: Principal) -> None:
    first = place.submit(us, "first")
    job = place.submit(us, "second", after=["first"])
    place.store.delete_job(first.id)
    place.queue.release()
    assert "gone" in place.now(job).message


def test_another_tenants_job_cannot_be_waited_for(place: Place, us: Principal) -> None:
    place.submit(person(place.store, "them"), "first")
    with pytest.raises(ConfigError, match="no job 'first'"):
        place.submit(us, "second", after=["first"])


def test_jobs_come_out_in_the_order_they_came(place: Place, us: Principal) -> None:
    first = place.submit(us, "first")
    for number in range(5):
        place.submit(us, f"job{number}", after=["first"])
    place.end(first)
    place.queue.release()
    assert place.handed == [f"job{number}" for number in range(5)]


# --- at ---------------------------------------------------------------------------------------------------------------------


def test_a_job_waits_until_its_time(place: Place, us: Principal) -> None:
    job = place.submit(us, "later", at=time.time() + 20)
    assert job.message.startswith("waits until 20")
    assert 0 < place.queue.release() <= 20
    assert place.handed == []
    place.store.change_job(job.id, start_at=time.time() - 0.1)
    place.queue.release()
    assert place.handed == ["later"]
    with pytest.raises(ConfigError, match="a year"):
        place.submit(us, "never", at=1e12)


# --- steering ---------------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_can_be_paused_and_cancelled(place: Place, us: Principal) -> None:
    first = place.submit(us, "first")
    job, other = (place.submit(us, name, after=["first"]) for name in ("second", "third"))
    assert not place.queue.steer(first, Wanted.PAUSE)  # it is the engine's
    assert place.queue.steer(job, Wanted.PAUSE)
    assert place.queue.steer(other, Wanted.CANCEL)
    place.end(first)
    place.queue.release()
    assert (place.now(job).state, place.now(other).state, place.handed) == ("paused", "cancelled", [])
    assert place.queue.steer(job, Wanted.RUN)
    place.queue.release()
    assert place.handed == ["second"]
    assert not place.queue.steer(job, Wanted.CANCEL)


def test_a_job_that_is_cancelled_just_as_it_may_start_stays_cancelled(place: Place, us: Principal) -> None:
    first = place.submit(us, "first")
    job = place.submit(us, "second", after=["first"])
    place.end(first)
    seen = place.queue._waiting()
    assert [one.name for one in seen] == ["second"]
    place.queue.steer(job, Wanted.CANCEL)
    place.queue._end_wait(seen[0], JobState.QUEUED, "")
    assert (place.now(job).state, place.handed) == ("cancelled", [])


# --- from what --------------------------------------------------------------------------------------------------------------


def test_a_start_is_kept_whatever_happens_to_it(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    job = place.submit(us, "younger", adapter={"init": "elder@best"})
    assert job.starts_from == f"{elder.id}@1"
    shutil.rmtree(place.run / elder.id)
    place.store.delete_job(elder.id)
    place.initial.keep(job)
    assert place.start_of(job) == "elder 1"
    assert [path.name for path in place.run.iterdir()] == [job.id]  # nothing is left lying about


def test_the_best_of_a_job_that_is_waited_for_is_the_best_at_its_end(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    job = place.submit(us, "younger", after=["elder"], adapter={"init": "elder@best"})
    assert not place.initial.path(job.id).exists()
    place.save(elder, 2)
    place.end(elder)
    place.queue.release()
    wait_until(lambda: place.handed == ["younger"])
    assert place.start_of(job) == "elder 2"


def test_a_start_that_takes_long_holds_up_no_other_job(place: Place, us: Principal) -> None:
    elder, them = place.submit(us, "elder"), person(place.store, "them")
    place.save(elder, 1)
    slow = place.submit(us, "slow", after=["elder"], adapter={"init": "elder@1"})
    place.submit(us, "quick", after=["elder"])
    theirs = place.submit(them, "elder")
    place.save(theirs, 1)
    place.submit(them, "other", after=["elder"], adapter={"init": "elder@1"})
    sums = place.run / elder.id / "versions" / "v1" / SUMS
    os.mkfifo(sums)  # read as soon as somebody writes into it
    for one in (elder, theirs):
        place.end(one)
    threading.Thread(target=place.queue.release, daemon=True).start()
    wait_until(lambda: place.handed == ["quick", "other"])
    place.queue.release()
    assert place.now(slow).waits
    sums.write_bytes(b"no sums")
    wait_until(lambda: place.now(slow).state == "failed")
    assert place.handed == ["quick", "other"]


def test_a_start_that_never_came_fails_the_job(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    with pytest.raises(ConfigError, match="`after`"):
        place.submit(us, "younger", adapter={"init": "elder@best"})
    job = place.submit(us, "younger", after=["elder"], adapter={"init": "elder@7"})
    place.end(elder)
    place.queue.release()
    wait_until(lambda: place.now(job).state == "failed")
    assert "'elder@7'" in place.now(job).message
    assert place.handed == []


def test_a_start_of_another_shape_is_refused_with_the_field(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1, rank=8)
    with pytest.raises(ConfigError, match=r"adapter\.rank"):
        place.submit(us, "younger", adapter={"init": "elder@1", "rank": 2})
    younger = place.submit(us, "younger", adapter={"init": "elder@1"})
    assert (younger.starts_from, younger.spec["adapter"]["rank"]) == (f"{elder.id}@1", 8)


def test_an_admins_job_keeps_its_start_from_another_tenant(place: Place, us: Principal) -> None:
    elder, admin = place.submit(us, "elder"), person(place.store, "staff", "admin")
    place.save(elder, 1)
    (place.run / elder.id / RECORD).write_text("job: {}")
    with pytest.raises(ConfigError, match=r"adapter\.init"):
        place.submit(person(place.store, "them"), "younger", adapter={"init": "us/elder@1"})
    job = place.submit(admin, "younger", adapter={"init": "us/elder@1"})
    place.initial.keep(place.now(job))  # as when the engine is started again, which does not know who asked
    assert place.start_of(job) == "elder 1"
    shutil.rmtree(place.initial.path(job.id))  # killed before it was kept
    place.initial.keep(place.now(job))
    assert place.start_of(job) == "elder 1"
    own = place.submit(us, "youngest", adapter={"init": "elder@1"})
    assert [(place.initial.path(one.id) / RECORD).exists() for one in (job, own)] == [False, True]


def test_a_job_that_has_begun_needs_its_start_no_more(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    job = place.submit(us, "younger", adapter={"init": "elder@1"})
    shutil.rmtree(place.initial.path(job.id))
    shutil.rmtree(place.run / elder.id)
    with pytest.raises(ConfigError, match="gone"):
        place.initial.keep(job)
    (place.run / job.id / "state" / "1").mkdir(parents=True)
    place.initial.keep(job)


def test_a_name_that_is_taken_leaves_nothing(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    with pytest.raises(StoreError, match="'elder'"):
        place.submit(us, "elder", adapter={"init": "elder@1"})
    assert [path.name for path in place.run.iterdir()] == [elder.id]


def test_a_start_of_many_jobs_is_read_once(place: Place, us: Principal) -> None:
    elder = place.submit(us, "elder")
    place.save(elder, 1)
    fields = {"adapter": {"init": "elder@1"}}
    configs = [JobConfig.model_validate(normal_job({**tiny(f"younger-{number}"), **fields})) for number in range(5)]
    planned = [place.queue.plan(us, one, "small") for one in configs]
    with calls(own_thread=True) as counted, place.queue.drafts(us, planned) as drafts:
        jobs = place.queue.submit(us, planned, drafts)
    assert counted["version_damage"] == 1
    assert [place.start_of(job) for job in jobs] == ["elder 1"] * 5


# --- over HTTP --------------------------------------------------------------------------------------------------------------


def test_a_job_says_what_it_waits_for(house: House) -> None:
    first = house.ask("POST", "/v1/jobs", json=tiny("first")).json()
    at = time.time() + 3600
    params: Json = {"after": ["first", "ended"], "at": at}
    job = house.ask("POST", "/v1/jobs", json=tiny("second"), params=params).json()
    assert (job["state"], job["after"], job["at"]) == ("queued", [first["id"], house.job["id"]], at)
    assert job["message"].startswith("waits for 'first' to succeed and until ")
    assert house.part(Handover).open_jobs()[-1].job["name"] == first["id"]  # the engine hears nothing of it
    assert house.ask("POST", "/v1/jobs/second/pause").json()["state"] == "paused"
    assert house.ask("POST", "/v1/jobs/second/resume").json()["state"] == "queued"
    assert house.ask("POST", "/v1/jobs/second/cancel").json()["state"] == "cancelled"
    odd: list[Json] = [{"after": "nobody"}, {"at": "inf"}, {"at": "soon"}, {"at": -1}, {"after": ["first"] * 21}]
    for params in odd:
        answer = house.ask("POST", "/v1/jobs", json=tiny("third"), params=params)
        assert answer.status_code in (400, 422), params


@pytest.mark.parametrize("own", [{}, {"alpha": 4.0}, {"rank": 4}])
def test_a_job_that_starts_from_an_awaited_one_takes_its_shape(house: House, own: Json) -> None:
    shape = {"rank": 16, "alpha": 8.0, "target_modules": ["q_proj"]}
    source, then, last = (f"{name}{len(own)}{min(own, default='')}" for name in ("source", "then", "last"))
    assert house.ask("POST", "/v1/jobs", json={**tiny(source), "adapter": shape}).status_code == 201
    for name, init in ((then, f"{source}@best"), (last, then)):
        body = {**tiny(name), "adapter": {"init": init, **own}}
        answer = house.ask("POST", "/v1/jobs", json=body, params={"after": init.partition("@")[0]})
        assert answer.status_code == 201, answer.text
        adapter = answer.json()["spec"]["adapter"]
        assert {field: adapter[field] for field in shape} == {**shape, **own}


def test_a_start_is_read_before_its_job_waits_for_those_of_other_tenants(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        version = house.storage.version(house.job["id"], "latest")
        assert version is not None
        (version[1] / "adapter_model.safetensors").write_text("damaged")
        with house.part(Quotas)._admitting:
            job = {**tiny("younger"), "adapter": {"init": "ended@latest"}}
            assert "is not what was saved" in house.refused(500, "POST", "/v1/jobs", json=job)["message"]


def test_the_same_request_twice_is_one_job_although_its_start_is_gone(house: House) -> None:
    job = {**tiny("twice"), "adapter": {"init": "ended@2"}}
    first = house.ask("POST", "/v1/jobs", json=job, headers={"Idempotency-Key": "twice"})
    directory = house.storage.job(house.job["id"]).path / "versions"
    directory.rename(directory.with_name("away"))
    try:
        second = house.ask("POST", "/v1/jobs", json=job, headers={"Idempotency-Key": "twice"})
    finally:
        directory.with_name("away").rename(directory)
    assert (first.status_code, second.json()["id"]) == (201, first.json()["id"])
