"""Limits, usage and rates of the service without its engine: what is kept, what is refused, what the engine is told."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete
from sqlalchemy import text as sql

from motet.chat.completer import whole
from motet.client import Client
from motet.config import JobConfig
from motet.config.chain import take_shape
from motet.config.jobfile import load_service
from motet.config.service import HttpConfig, LimitsConfig, RateConfig
from motet.core.errors import ConfigError, LimitError, ServiceError
from motet.core.types import JobState, SamplingParams
from motet.hosts.charged import Charged
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Answer, Complete, ExamineAdapter, HostReady, PromptRead, SetRule, ToHost, UsageWindow
from motet.runtime.journal import Done
from motet.runtime.slots import Rule
from motet.service.answers import Asks, ask
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import Key
from motet.service.events import EventBus
from motet.service.http.auth import RateLimit
from motet.service.http.open_bytes import OpenBytes
from motet.service.jobs.handover import Handover
from motet.service.schemas.usage import UsageLine
from motet.service.tenants.ledger import Ledger, today
from motet.service.tenants.quotas import QuotaEnforcer
from motet.service.tinker.futures import Futures
from motet.service.tinker.requests import Sample
from motet.service.tinker.samplers import Samplers
from tests.support.database import person, queued
from tests.support.house import House, open_house, statements
from tests.support.service_run import ROWS, Json, tiny
from tests.support.tinker_requests import journal, made, request
from tests.support.tinker_requests import sent as sent_gradient
from tests.support.tinker_run import job_of
from tests.support.together import at_once
from tests.support.waiting import PATIENCE

DAY = "2026-03-01"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A service with limits of its own."""
    with open_house(tmp_path, limits=LimitsConfig(rank=64, steps=100, running_jobs=None, queued_jobs=None)) as found:
        yield found


def limit(house: House, **limits: Any) -> Json:
    """Set the limits of tenant `us`."""
    answer = house.ask("PUT", "/v1/tenants/us/limits", "admin", json=limits)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def step(house: House, job: str, number: int, sampled: int = 0, trained: int = 0) -> None:
    """What the engine tells of a step."""
    told = {"step": number, "loss": 0.0, "tokens_sampled": sampled, "tokens_trained": trained}
    house.recorder.record_step(job, told)


def test_limits_are_read_once_a_second_and_a_change_holds_at_once(house: House) -> None:
    quotas, tenant = house.service.quotas, person(house.store, "us").tenant_id
    with statements() as asked:
        for _ in range(20):
            assert quotas.of(tenant).rank == 64
    assert sum("limits.given" in one for one in asked) <= 2
    limit(house, rank=8)
    assert quotas.of(tenant).rank == 8


def test_a_rank_that_another_adapter_decides_is_limited_once_it_is_known(house: House) -> None:
    quotas, tenant = house.service.quotas, person(house.store, "us").tenant_id
    limit(house, rank=8)
    given = JobConfig.model_validate(tiny("younger", adapter={"init": "elder"}))
    quotas.check_size(tenant, given)  # the default is 32
    quotas.check_size(tenant, take_shape(given, {"rank": 8}))
    with pytest.raises(LimitError, match=r"adapter\.rank: 9 is more than 8"):
        quotas.check_size(tenant, take_shape(given, {"rank": 9}))


def test_a_job_whose_steps_are_too_large_is_refused_with_the_number_that_fits(house: House) -> None:
    (host,) = house.service.hosts.hosts
    most, tenant = 32_768 * 2, person(house.store, "us").tenant_id
    large = tiny("large", algorithm={"group_size": 8, "groups_per_step": 4096}, sampling={"max_tokens": 4})

    def submitted(name: str) -> Json | None:
        answer = house.ask("POST", "/v1/jobs", json={**large, "name": name})
        assert answer.status_code in (201, 403)
        return None if answer.status_code == 201 else answer.json()["error"]

    assert submitted("early") is None, "no host has said yet what its base does"
    host.told, host.step_tokens = HostReady([], positions=256), most
    (error,) = [submitted("large")]
    assert error is not None
    assert f"step_tokens: a step of this job has up to {32_768 * 8 + 4 * 4} tokens" in error["message"]
    assert "algorithm.groups_per_step: 1023 fits" in error["message"]
    assert "motet tenants limit --step-tokens" in error["message"]
    limit(house, step_tokens=None)
    assert submitted("any") is None
    limit(house, step_tokens=32_768 * 8 + 4 * 4)
    assert submitted("fits") is None
    limit(house, step_tokens="auto")
    assert submitted("again") is not None
    job = house.ask("GET", "/v1/jobs/early").json()["id"]
    stored = house.store.job_by_id(job)
    assert stored is not None
    assert house.service.handover.message(stored).rule.step_tokens == "auto", "its host looks at prompts and rows"
    limit(house, step_tokens=7)
    assert house.service.enforcer.rule(tenant).step_tokens == 7, "its hosts are told, also for clients that run"


def test_usage_is_read_once_a_second_and_what_this_process_stores_counts_at_once(house: House) -> None:
    quotas, ledger, tenant = house.service.quotas, house.service.ledger, person(house.store, "us").tenant_id
    limit(house, tokens_per_day=10)
    with statements() as asked:
        for _ in range(20):
            quotas.check_day(tenant)
    assert sum("FROM usage" in one for one in asked) <= 2
    ledger.count_completion(tenant, "", 7, 3)
    ledger.flush()
    with pytest.raises(LimitError, match="the 10 tokens"):
        quotas.check_day(tenant)


# --- the ledger -------------------------------------------------------------------------------------------------------------


def test_usage_is_kept_once_and_told_by_job_day_and_tenant(store: Store) -> None:
    day = [DAY]
    ledger = Ledger(store, lambda: day[0])
    us, them = person(store, "us"), person(store, "them")
    sort, other = queued(store, us, "sort", {}, 3, None), queued(store, them, "other", {}, 3, None)

    def told(job: str, number: int, sampled: int, trained: int) -> None:
        data = {"tokens_sampled": sampled, "tokens_trained": trained}
        store.add_event(job, "step", str(number), data, ledger.step(job, data))

    told(sort.id, 0, 10, 20)
    told(sort.id, 0, 10, 20)  # by an engine that was started again
    told("job-none", 0, 10, 20)
    day[0] = "2026-03-02"
    told(sort.id, 1, 1, 2)
    told(other.id, 0, 100, 200)
    ledger.count_completion(us.tenant_id, "", 7, 3)
    ledger.flush()
    micro = {sort.id: 1_500_000, other.id: 250_000, f"answers/{us.tenant_id}": 1, "": 249_999}
    assert ledger.window("one", 1, micro)
    assert not ledger.window("one", 1, micro)
    assert not ledger.window("one", 0, micro)
    assert ledger.window("one", 3, {"": 500_000})
    assert ledger.window("two", 1, {"": 500_000})
    assert ledger.tokens_of(sort.id) == 33
    assert {name: used.tokens for name, used in ledger.used_today().items()} == {
        us.tenant_id: 3 + 10, them.tenant_id: 300, "": 0
    }  # fmt: skip

    by_job = [
        (one.tenant, one.name, one.tokens_prompt, one.tokens_sampled, one.tokens_trained)
        for one in ledger.page(None)[0]
    ]
    assert by_job == [
        ("them", "other", 0, 100, 200), ("us", None, 7, 3, 0), ("us", "sort", 0, 11, 22), (None, None, 0, 0, 0)
    ]  # fmt: skip
    assert sum(one.device_seconds for one in ledger.page(None)[0]) == pytest.approx(3.0, abs=1e-9)
    by_day = ledger.page(us.tenant_id, by=["day"])[0]
    assert [(one.day, one.tokens_sampled, one.tokens_trained) for one in by_day] == [
        (DAY, 10, 20),
        ("2026-03-02", 4, 2),
    ]
    both = ledger.page(us.tenant_id, by=["day", "job"], since="2026-03-02")[0]
    assert [(one.day, one.job, one.tokens_sampled) for one in both] == [
        ("2026-03-02", None, 3),
        ("2026-03-02", sort.id, 1),
    ]
    assert [one.tokens_sampled for one in ledger.page(us.tenant_id, by=["tenant"], until=DAY)[0]] == [10]
    every, none = ledger.page(None, ["day", "job", "base"], called=lambda base: base or "small")
    found, after = list[UsageLine](), ""
    for _ in every:
        (line,), more = ledger.page(None, ["day", "job", "base"], None, None, lambda base: base or "small", after, 1)
        found, after = [*found, line], more or "the end"
    assert (found, none, after) == (every, None, "the end")
    store.delete_job(sort.id)
    assert [one.name for one in ledger.page(us.tenant_id)[0]] == [None, "sort"]
    assert ledger.window("two", 2, {sort.id: 5})
    assert ledger.page(us.tenant_id)[0][1].device_seconds == pytest.approx(1.500005)


def test_usage_is_told_by_key_and_sums_to_that_of_the_tenant(store: Store) -> None:
    ledger = Ledger(store, lambda: DAY)
    ann, bob = (store.tenants.who(store.tenants.create_key("us", name, "member")[1]) for name in ("ann", "bob"))
    assert ann is not None
    assert bob is not None
    sort = queued(store, ann, "sort", {}, 3, None)
    data = {"tokens_sampled": 10, "tokens_trained": 20}
    store.add_event(sort.id, "step", "0", data, ledger.step(sort.id, data))
    answers = f"answers/{ann.tenant_id}"
    assert ledger.window("e", 1, {answers: 5})  # before anybody is known
    for who, prompt, sampled in ((ann, 25, 5), (bob, 6, 4)):
        ledger.count_completion(ann.tenant_id, "", prompt, sampled, who.account or "")
    assert ledger.window("e", 2, {answers: 1_000_000, sort.id: 500_000})
    assert ledger.window("e", 3, {answers: 400})  # as the last that were counted
    ledger.count_cpu(ann.tenant_id, 2.0)
    ledger.flush()

    def lines() -> list[tuple[Any, ...]]:
        return [
            (one.submitter, one.tokens_prompt, one.tokens_sampled, one.tokens_trained, round(1e6 * one.device_seconds))
            for one in ledger.page(ann.tenant_id, ["key"])[0]
        ]

    known = {(None, 0, 0, 0, 5), ("ann", 25, 15, 20, 500_000 + 750_000 + 300), ("bob", 6, 4, 0, 250_000 + 100)}
    assert set(lines()) == known
    (whole,) = ledger.page(ann.tenant_id, ["tenant"])[0]
    assert sum(one[4] for one in known) == round(1e6 * whole.device_seconds)
    with store.transaction() as session:
        session.execute(delete(Key))
    assert set(lines()) == {(bob.account if one[0] == "bob" else one[0], *one[1:]) for one in known}
    every = ledger.page(None, ["job", "key", "base"], called=lambda base: base)[0]
    found, after = list[UsageLine](), ""
    for _ in every:
        (line,), more = ledger.page(None, ["job", "key", "base"], None, None, lambda base: base, after, 1)
        found, after = [*found, line], more or "the end"
    assert (found, len(found), after) == (every, 4, "the end")
    store.delete_job(sort.id)
    assert ledger.window("e", 4, {sort.id: 7})
    assert {round(1e6 * one.device_seconds) for one in ledger.page(None, ["job", "key"])[0] if one.job} == {500_007}


def test_tokens_that_wait_for_the_database_weigh_once(tmp_path: Path) -> None:
    """The device time of completions is divided by tokens, also if these could not be stored at first."""
    with contextlib.closing(Store(f"sqlite:///{tmp_path / 'service.db'}")) as store:
        _weigh_once(store)


def _weigh_once(store: Store) -> None:
    ledger = Ledger(store)
    ann, bob = (store.tenants.who(store.tenants.create_key("us", name, "member")[1]) for name in ("ann", "bob"))
    assert ann is not None
    assert bob is not None
    ledger.count_completion(ann.tenant_id, "", 10, 20, ann.account or "")
    for before, after in (("usage", "away"), ("away", "usage")):
        with store.transaction() as session:
            session.execute(sql(f"ALTER TABLE {before} RENAME TO {after}"))
        if after == "away":
            with pytest.raises(AWAY):
                ledger.flush()
    ledger.count_completion(bob.tenant_id, "", 10, 20, bob.account or "")
    ledger.flush()
    assert ledger.window("e", 1, {f"answers/{ann.tenant_id}": 1_000_000})
    lines = ledger.page(None, ["key"])[0]
    assert {(one.submitter, one.tokens_sampled, one.device_seconds) for one in lines} == {
        ("ann", 20, 0.5),
        ("bob", 20, 0.5),
    }


def test_many_writers_at_once_lose_nothing_of_the_ledger(store: Store) -> None:
    ledger = Ledger(store)
    us = person(store, "us")
    job = queued(store, us, "sort", {}, 3, None)

    def write(number: int) -> None:
        for turn in range(10):
            data = {"tokens_sampled": 1, "tokens_trained": 2}
            store.add_event(job.id, "step", f"{number}.{turn}", data, ledger.step(job.id, data))
            ledger.count_completion(us.tenant_id, "", 1, 1)
            ledger.flush()
            ledger.window(f"engine-{number}", turn, {job.id: 10, "": 1})

    assert at_once(write, 6) == [None] * 6
    completions, trained, idle = ledger.page(None)[0]
    assert (completions.tokens_prompt, completions.tokens_sampled) == (60, 60)
    assert (trained.tokens_sampled, trained.tokens_trained, round(trained.device_seconds * 1e6)) == (60, 120, 600)
    assert round(idle.device_seconds * 1e6) == 60


def test_usage_over_http(house: House) -> None:
    job = house.job["id"]
    step(house, job, 7, 10, 20)
    house.recorder.record_usage(UsageWindow("e", 1, {job: 2_000_000, "": 1_000_000}))
    (own,) = house.ask("GET", "/v1/usage").json()["data"]
    assert own == {
        "day": None, "tenant": "us", "job": job, "name": "ended", "kind": "job", "tokens_prompt": 0,
        "tokens_sampled": 10, "tokens_trained": 20, "device_seconds": 2.0, "cpu_seconds": 0.0, "base": None,
        "submitter": None, "account": None,
    }  # fmt: skip
    assert house.ask("GET", "/v1/usage", "theirs").json()["data"] == []
    assert house.ask("GET", "/v1/usage?tenant=us").json()["data"] == [own]
    assert "tenant" in house.refused(404, "GET", "/v1/usage?tenant=us", "theirs")["message"]
    house.refused(404, "GET", "/v1/usage?tenant=no-one", "admin")
    everything = house.ask("GET", "/v1/usage?by=job&by=day", "admin").json()["data"]
    assert [(one["kind"], one["day"], one["device_seconds"]) for one in everything] == [
        ("job", today(), 2.0),
        ("idle", today(), 1.0),
    ]
    assert house.ask("GET", "/v1/usage?tenant=us", "admin").json()["data"] == [own]
    assert house.ask("GET", "/v1/usage?since=2999-01-01", "admin").json()["data"] == []
    assert house.ask("GET", "/v1/usage?by=tenant").json()["data"][0]["kind"] == "all"
    assert [one["submitter"] for one in house.ask("GET", "/v1/usage?by=key").json()["data"]] == ["ours"]
    table = house.ask("GET", "/v1/usage?format=csv", "admin")
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [(row["tenant"], row["kind"], row["tokens_trained"], row["device_seconds"]) for row in rows] == [
        ("us", "job", "20", "2.0"),
        ("", "idle", "0", "1.0"),
    ]
    assert house.ask("DELETE", f"/v1/jobs/{job}").status_code in (204, 409)


# --- limits -----------------------------------------------------------------------------------------------------------------


def test_a_member_sees_what_is_left_of_their_tenants_limits(house: House) -> None:
    _, house.keys["member"] = house.store.tenants.create_key("few", "member", "member")
    limits = {
        "queued_jobs": 3,
        "running_jobs": 1,
        "tokens_per_day": 100,
        "storage_mb": 50.0,
        "device_seconds_per_day": None,
    }
    assert house.ask("PUT", "/v1/tenants/few/limits", "admin", json=limits).is_success
    before = house.ask("GET", "/v1/limits", "member").json()["left"]
    assert (before["queued_jobs"], before["running_jobs"], before["device_seconds_per_day"]) == (4, 1, None)
    assert 49.9 < before["storage_mb"] <= 50
    for number in range(before["queued_jobs"]):
        assert house.ask("POST", "/v1/jobs", "member", json=tiny(f"few-{number}")).status_code == 201
    assert house.ask("POST", "/v1/files", "member", files={"file": ("rows.jsonl", ROWS)}).status_code == 201
    tenant = house.store.tenants.made("few").id
    house.part(Ledger).count_completion(tenant, "", 60, 30)
    house.part(Ledger).flush()
    after = house.ask("GET", "/v1/limits", "member").json()["left"]
    assert (after["queued_jobs"], after["tokens_per_day"]) == (0, 10)
    assert after["storage_mb"] < before["storage_mb"]
    assert "queued_jobs" in house.refused(429, "POST", "/v1/jobs", "member", json=tiny("few-more"))["message"]
    house.part(Ledger).count_completion(tenant, "", 60, 30)
    house.part(Ledger).flush()
    assert house.ask("GET", "/v1/limits", "member").json()["left"]["tokens_per_day"] == 0


def test_defaults_hold_until_an_admin_sets_something_else(house: House) -> None:
    (us,) = [one for one in house.ask("GET", "/v1/tenants", "admin").json()["data"] if one["name"] == "us"]
    assert (us["limits"]["rank"], us["limits"]["steps"], us["limits"]["queued_jobs"], us["own"]) == (64, 100, None, [])
    assert limit(house, steps=None, rank=8)["limits"]["steps"] is None
    found = house.ask("GET", "/v1/limits").json()
    assert (found["name"], found["limits"]["rank"], sorted(found["own"])) == ("us", 8, ["rank", "steps"])
    assert house.ask("GET", "/v1/limits", "theirs").json()["limits"]["rank"] == 64
    assert limit(house)["own"] == []
    house.refused(422, "PUT", "/v1/tenants/us/limits", "admin", json={"rnak": 1})
    house.refused(404, "PUT", "/v1/tenants/no-one/limits", "admin", json={})
    for method, path in (("GET", "/v1/tenants"), ("PUT", "/v1/tenants/us/limits")):
        house.refused(403, method, path, json={})


@pytest.mark.parametrize(
    ("limits", "job", "status", "words"),
    [
        ({"rank": 8}, {"adapter": {"rank": 16}}, 403, ("adapter.rank", "16", "8", "--rank", "admin")),
        ({"steps": 10}, {"steps": 11}, 403, ("steps", "11", "10", "--steps", "admin")),
        ({}, {"steps": 101}, 403, ("steps", "101", "100")),
        ({}, {"reward": {"name": "exact", "wall_seconds": 601}}, 403, ("wall_seconds", "601", "600", "--wall-seconds")),
        ({"memory_mb": 64}, {}, 403, ("reward exact.memory_mb", "1024", "64", "--memory-mb", "admin")),
        ({"priority": "normal"}, {"priority": "high"}, 403, ("priority", "normal", "admin")),
        ({"priority": "low"}, {}, 403, ("priority", "low")),
        ({"queued_jobs": 1, "running_jobs": 1}, {}, 429, ("queued_jobs", "2 jobs", "--queued-jobs", "admin")),
        ({"storage_mb": 0}, {}, 403, ("storage_mb", "delete", "--storage-mb", "admin")),
    ],
)  # fmt: skip
def test_what_breaks_a_limit_is_refused_with_its_name_use_and_remedy(
    house: House, limits: Json, job: Json, status: int, words: tuple[str, ...]
) -> None:
    for name in ("one", "two"):
        assert house.ask("POST", "/v1/jobs", json=tiny(name)).status_code == 201
    again = {"Idempotency-Key": "kept"}
    kept = house.ask("POST", "/v1/jobs", json=tiny("kept"), headers=again).json()["id"]
    house.recorder.record_state(kept, JobState.CANCELLED, "")
    limit(house, **limits)
    before = house.store.counts()
    error = house.refused(status, "POST", "/v1/jobs", json={**tiny("more"), **job})
    for word in words:
        assert word in error["message"], error
    assert house.store.counts() == before
    assert house.ask("POST", "/v1/jobs", json=tiny("kept"), headers=again).json()["id"] == kept  # was let in before
    assert house.ask("POST", "/v1/jobs", "theirs", json={**tiny("more"), "adapter": {"rank": 16}}).status_code == 201


def test_two_that_come_together_do_not_both_take_the_last_place(house: House) -> None:
    limit(house, queued_jobs=2, running_jobs=1)

    def submit(n: int) -> int:  # under keys of their own: what one key asks is done one after another
        _, house.keys[f"key-{n}"] = house.store.tenants.create_key("us", f"key-{n}", "member")
        return house.ask("POST", "/v1/jobs", f"key-{n}", json=tiny(f"j{n}")).status_code

    answers = at_once(submit, 9)
    assert sorted(answers) == [201] * 3 + [429] * 6
    assert house.ask("POST", "/v1/jobs", json=tiny("later")).headers["Retry-After"] == "60"


def test_uploads_count_as_storage(house: House) -> None:
    assert house.ask("GET", "/v1/limits").json()["stored_bytes"] > 0  # rows.jsonl and two small versions
    limit(house, storage_mb=0.001)
    rows = b'{"prompt": "a?", "answer": "b"}\n' * 40
    error = house.refused(403, "POST", "/v1/files", files={"file": ("rows.jsonl", rows)})
    assert "storage_mb" in error["message"]
    assert len(list((house.storage.directory / "files").iterdir())) == 1
    assert house.ask("POST", "/v1/files", "theirs", files={"file": ("rows.jsonl", rows)}).status_code == 201


# --- budget and priority ----------------------------------------------------------------------------------------------------


def test_a_budget_and_a_priority_can_be_changed(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json={**tiny("paid"), "budget": 100, "priority": "low"}).json()
    assert (job["spec"]["budget"], job["spec"]["priority"]) == (100, -10)
    changed = house.ask("PATCH", "/v1/jobs/paid", json={"budget": 500}).json()
    assert (changed["spec"]["budget"], changed["spec"]["priority"]) == (500, -10)
    assert (
        house.ask("PATCH", "/v1/jobs/paid", json={"budget": None, "priority": "high"}).json()["spec"]["priority"] == 10
    )
    limit(house, priority="normal")
    assert "priority" in house.refused(403, "PATCH", "/v1/jobs/paid", json={"priority": 11})["message"]
    assert house.ask("PATCH", "/v1/jobs/paid", json={"priority": "normal"}).status_code == 200  # down is always allowed
    for odd in ({"budget": 0}, {"budget": "x"}, {"steps": 3}, {"priority": "urgent"}, {"priority": 101}):
        house.refused(422, "PATCH", "/v1/jobs/paid", json=odd)
    house.refused(404, "PATCH", "/v1/jobs/paid", "theirs", json={})
    house.recorder.record_state(job["id"], JobState.CANCELLED, "")
    house.refused(409, "PATCH", "/v1/jobs/paid", json={"budget": 1})


def test_a_spent_job_is_not_resumed_without_a_larger_budget(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json={**tiny("paid"), "budget": 30}).json()["id"]
    step(house, job, 0, 10, 20)
    house.recorder.record_state(job, JobState.PAUSED, "its budget of 30 tokens is spent")
    error = house.refused(409, "POST", "/v1/jobs/paid/resume")
    assert "--budget" in error["message"]
    assert "30" in error["message"]
    assert house.ask("PATCH", "/v1/jobs/paid", json={"budget": 31}).status_code == 200
    assert house.ask("POST", "/v1/jobs/paid/resume").status_code == 202


def test_a_failed_job_is_charged_for_what_it_does_again_when_it_is_resumed(house: House) -> None:
    ledger, model = house.part(Ledger), job_of(made(house))
    house.ask("POST", "/v1/jobs", json=tiny("again"))
    charged = list[tuple[int, ...]]()
    jobs = [house.ask("GET", f"/v1/jobs/{one}").json()["id"] for one in ("again", model)]
    for _ in range(3):
        for job in jobs:
            for _ in range(2):  # a crash repeats work within a turn
                ledger.worked(job, 0, 10, 40)
            house.recorder.record_state(job, JobState.FAILED, "no luck")
        charged.append(tuple(map(ledger.tokens_of, jobs)))
        for job in jobs:
            assert house.ask("POST", f"/v1/jobs/{job}/resume").status_code == 202
    assert charged == [(50, 50), (100, 90), (150, 130)], "a client's journal tells a host what was trained"


# --- tokens a day -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(house: House, monkeypatch: pytest.MonkeyPatch) -> list[SetRule]:
    """The rules that the engine is sent after those that it is sent at the start."""
    rules: list[SetRule] = []
    house.part(QuotaEnforcer).enforce()

    def send(*messages: ToHost) -> None:
        rules.extend(message for message in messages if isinstance(message, SetRule))

    monkeypatch.setattr(house.part(Hosts), "send", send)
    return rules


def sent_body(house: House, body: Any) -> Any:
    """The answer to a request for a gradient."""
    return sent_gradient(house, body.SerializeToString())


DAYS = {"tokens_per_day": 25, "device_seconds_per_day": 2.5}


@pytest.mark.parametrize("name", DAYS)
def test_every_door_to_the_device_asks_for_what_is_left_of_the_day(
    house: House, sent: list[SetRule], name: str
) -> None:
    """Completions are refused; samples and gradients of Tinker clients are held, and so are jobs."""
    ledger, enforcer, tinker = house.part(Ledger), house.part(QuotaEnforcer), "/tinker/api/v1"
    us, who = house.ask("GET", "/v1/limits").json()["id"], house.store.tenants.who(house.keys["ours"])
    assert who is not None
    model = made(house)
    before = house.ask("GET", "/v1/limits").json()
    ledger.count_completion(us, "", 12, 13)
    ledger.flush()
    assert ledger.window(f"engine of {name}", 1, {f"answers/{us}": 2_500_000})
    limit(house, **{name: DAYS[name]})
    now = house.ask("GET", "/v1/limits").json()
    assert now["tokens_today"] - before["tokens_today"] == 25
    assert now["device_seconds_today"] - before["device_seconds_today"] == pytest.approx(2.5)

    chat = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
    claude, responses = {**chat, "max_tokens": 1}, {"model": "small", "input": "a"}
    for path, body in (("chat/completions", chat), ("messages", claude), ("responses", responses)):
        assert name in house.refused(429, "POST", f"/v1/{path}", json=body)["message"]
    assert name in house.refused(429, "POST", "/v1/completions", json={"model": "small", "prompt": "a"})["message"]
    judge = {
        "type": "score_model", "name": "judge", "model": "small",
        "input": [{"role": "user", "content": "{{sample.output_text}}"}],
    }  # fmt: skip
    run = {"grader": judge, "model_sample": "a", "item": {}}
    assert name in house.refused(429, "POST", "/v1/fine_tuning/alpha/graders/run", json=run)["message"]
    for asked in ({}, {"prompt_logprobs": True}):
        sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, **asked}
        request_id = house.ask("POST", f"{tinker}/asample", json=sample).json()["request_id"]
        waiting = house.part(Futures).wait(who, request_id, 0.0)
        held = asyncio.run_coroutine_threadsafe(waiting, house.app.state.loop).result(PATIENCE)
        assert isinstance(held, dict)
        assert (held["queue_state"], name in held["queue_state_reason"]) == ("paused_rate_limit", True)
        house.ask("POST", f"{tinker}/cancel_future", json={"request_id": request_id})

    enforcer.enforce()
    rule = [message.rule for message in sent if message.tenant == us][-1]
    assert name in rule.hold, "jobs are held, those of clients too"
    assert house.ask("POST", "/v1/jobs", json=tiny(f"held-{name.replace('_', '-')}")).status_code == 201
    body = request(model)
    assert sent_body(house, body).status_code == 200, "its job is held, and the gradient with it"
    limit(house)
    enforcer.enforce()


def test_a_gradient_that_takes_more_than_is_left_is_refused(house: House) -> None:
    """Its tokens times its targets are promised when it is taken, so that many at once cannot take more than a day has."""
    ledger, model = house.part(Ledger), made(house)
    used = house.ask("GET", "/v1/limits").json()["tokens_today"]
    limit(house, tokens_per_day=used + 30)

    def wanted(number: int, targets: int) -> Any:
        body = request(model, number)
        tensor = body.data[0].loss_fn_inputs[0].value
        tensor.dense = np.zeros(3 * targets, "<i8").tobytes()
        tensor.shape[:] = [3, targets]
        return body

    assert sent_body(house, wanted(1, 5)).status_code == 200  # (3 + 1) tokens of 5 targets
    assert sent_body(house, wanted(1, 5)).status_code == 200, "sent again"
    refused = sent_body(house, wanted(2, 3))
    assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
    assert "takes 12 tokens" in refused.text
    assert not journal(house, model).known(2), "its number stays free"
    assert sent_body(house, wanted(2, 2)).status_code == 200
    never = sent_body(house, wanted(3, 2000))
    assert (never.status_code, "a day of this tenant has" in never.text) == (403, True)
    assert journal(house, model).known(3), "its number is used up"
    assert sent_body(house, wanted(4, 2**16)).status_code == 400, "too many targets for the device"

    job = house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"]
    for step_, tokens in ((0, 5), (0, 20), (0, 12), (1, 4), (0, 20)):  # done again after a crash, and late
        ledger.worked(job, step_, tokens)
    assert ledger.tokens_of(job) == 24
    house.recorder.record_step(job, {"step": 1, "tokens_trained": 10})
    assert ledger.tokens_of(job) == 30, "of the step's tokens four were counted before"

    counted = []
    for step_, sampled, ends in (
        (2, 50, None),  # an unfinished step, and rollouts ahead of it
        (2, 30, None),  # sampled again after a crash
        (2, 50, 40),  # ten are of a later step
        (3, 25, None),
        (3, 25, 60),
        (1, 500, None),  # late: those are counted with the step
        (4, 7, None),  # the job is cancelled
    ):
        ledger.worked(job, step_, 0, sampled)
        if ends is not None:
            house.recorder.record_step(job, {"step": step_, "tokens_sampled": ends})
        counted.append(ledger.tokens_of(job) - 30)
    assert counted == [50, 50, 50, 65, 100, 100, 107]


def test_a_gradient_that_is_done_counts_once_before_and_after_the_ledger_has_it(house: House) -> None:
    ledger, model = house.part(Ledger), made(house)
    limit(house, tokens_per_day=house.ask("GET", "/v1/limits").json()["tokens_today"] + 9)
    assert sent_body(house, request(model, 1)).status_code == 200  # four tokens
    journal(house, model).answer(1, Done())
    assert sent_body(house, request(model, 2)).status_code == 200
    assert sent_body(house, request(model, 3)).status_code == 429
    ledger.worked(house.ask("GET", f"/v1/jobs/{job_of(model)}").json()["id"], 0, 4)
    limit(house, tokens_per_day=house.ask("GET", "/v1/limits").json()["tokens_today"] + 8)
    assert sent_body(house, request(model, 3)).status_code == 200
    limit(house)


def test_a_rule_is_sent_again_after_jobs_that_may_bring_an_older_one(house: House, sent: list[SetRule]) -> None:
    enforcer, us = house.part(QuotaEnforcer), house.ask("GET", "/v1/limits").json()["id"]
    assert house.ask("POST", "/v1/jobs", json=tiny("late")).status_code == 201
    (late,) = house.part(Handover).open_jobs()
    limit(house, share=2.0)  # before the message arrives
    enforcer.enforce()
    enforcer.enforce()
    assert late.rule != Rule(share=2.0, step_tokens="auto")
    assert [one for one in sent if one.tenant == us] == [SetRule(us, Rule(share=2.0, step_tokens="auto"))] * 2


def test_spent_tokens_hold_a_tenant_until_the_next_day(
    house: House, sent: list[SetRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcer, ledger = house.part(QuotaEnforcer), house.part(Ledger)
    job = house.ask("POST", "/v1/jobs", json=tiny("day")).json()["id"]
    us = house.ask("GET", "/v1/limits").json()["id"]
    limit(house, tokens_per_day=25, share=2.0)
    enforcer.enforce()
    assert sent == [SetRule(us, Rule(share=2.0, step_tokens="auto"))]
    step(house, job, 0, 10, 10)
    ledger.count_completion(us, "", 2, 3)
    enforcer.enforce()
    (held,) = sent[1:]
    assert held.tenant == us
    assert "25 tokens" in held.rule.hold
    assert "00:00 UTC" in held.rule.hold
    assert house.ask("GET", "/v1/limits").json()["tokens_today"] == 25
    enforcer.enforce()
    assert len(sent) == 2  # told once
    house.recorder.record_state(job, JobState.PAUSED, held.rule.hold)
    assert "tokens_per_day" in house.refused(429, "POST", "/v1/jobs/day/resume")["message"]
    asked = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
    assert "tokens_per_day" in house.refused(429, "POST", "/v1/chat/completions", json=asked)["message"]
    assert house.ask("POST", "/v1/chat/completions", "theirs", json=asked).status_code == 503  # there is no engine here
    (message,) = [one for one in house.part(Handover).open_jobs() if one.job["name"] == job]
    assert message.tenant == us
    assert message.rule == held.rule  # an engine that starts hears of it with the job
    ledger.day = lambda: "2999-01-01"
    enforcer.enforce()
    assert sent[-1].rule == Rule(share=2.0, step_tokens="auto")
    assert house.ask("POST", "/v1/jobs/day/resume").status_code == 202
    limit(house)
    enforcer.enforce()
    assert sent[-1].rule == Rule(step_tokens="auto")


def test_what_one_host_hears_with_a_job_all_hosts_are_told(house: House, sent: list[SetRule]) -> None:
    """The rule in the message of a job goes to the host that is given the job, and to no other."""
    enforcer = house.part(QuotaEnforcer)
    job = house.store.job_by_id(house.ask("POST", "/v1/jobs", json=tiny("two-hosts")).json()["id"])
    assert job is not None
    limit(house, share=2.0)
    assert enforcer.rule_with_job(job) == Rule(share=2.0, step_tokens="auto")
    enforcer.enforce()
    assert [message.rule for message in sent] == [Rule(share=2.0, step_tokens="auto")]
    limit(house, share=3.0)
    assert enforcer.rule_with_job(job) == Rule(share=3.0, step_tokens="auto")
    limit(house, share=2.0)  # as all were told; one has heard something else since
    enforcer.enforce()
    enforcer.enforce()
    assert [message.rule for message in sent] == [
        Rule(share=2.0, step_tokens="auto")
    ] * 3  # again until messages have arrived


# --- rates ------------------------------------------------------------------------------------------------------------------


def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    clock = [0.0]
    rate = RateLimit(RateConfig(requests_per_second=2, burst=3), lambda: clock[0])
    assert [rate.wait("a") for _ in range(4)] == [0, 0, 0, 1]
    assert rate.wait("b") == 0
    clock[0] = 0.5
    assert [rate.wait("a") for _ in range(2)] == [0, 1]
    clock[0] = 100.0
    assert [rate.wait("a") for _ in range(4)] == [0, 0, 0, 1]
    slow = RateLimit(RateConfig(requests_per_second=0.1, burst=1), lambda: clock[0])
    assert [slow.wait("a"), slow.wait("a")] == [0, 10]
    for open_to in (None, RateConfig(requests_per_second=None)):
        assert {RateLimit(open_to).wait("a") for _ in range(1000)} == {0}


def test_whoever_ends_the_http_process_gains_no_requests() -> None:
    clock = [0.0]
    rate = RateLimit(RateConfig(requests_per_second=2, burst=30), lambda: clock[0], restarted=True)
    assert [rate.wait("a") for _ in range(3)] == [0, 0, 1], "what a second brings"
    clock[0] = 100.0
    assert [rate.wait("a") for _ in range(31)] == [0] * 30 + [1]


def test_one_request_may_take_as_much_as_a_burst_in_advance() -> None:
    clock = [0.0]
    rate = RateLimit(RateConfig(requests_per_second=2, burst=3), lambda: clock[0])
    assert rate.wait("a") == 0
    rate.spend("a", 540)
    assert rate.wait("a") == 2


def test_whoever_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with open_house(tmp_path / "slow", rate=RateConfig(requests_per_second=0.01, burst=5)) as house:
        for _ in range(3):  # two were used to set the house up
            assert house.ask("GET", "/v1/jobs").status_code == 200
        answer = house.ask("GET", "/v1/jobs")
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 100
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200
        assert {house.ask("GET", "/v1/jobs", "wrong").status_code for _ in range(7)} == {401, 429}
        assert house.ask("GET", "/", "none").status_code == 429  # strangers of one address count together
        assert house.ask("GET", "/healthz", "none").status_code == 200


def test_a_client_waits_as_it_is_told(tmp_path: Path) -> None:
    with (
        open_house(tmp_path, rate=RateConfig(requests_per_second=2, burst=3)) as house,
        Client(str(house.http.base_url), house.keys["ours"]) as client,
    ):
        assert [len(list(client.jobs())) for _ in range(6)] == [1] * 6


def test_a_client_gives_up_when_it_is_told_to_wait_for_long(tmp_path: Path) -> None:
    with open_house(tmp_path, rate=RateConfig(requests_per_second=0.001, burst=2)) as house:
        with (
            Client(str(house.http.base_url), house.keys["ours"]) as client,
            pytest.raises(ServiceError, match="second") as error,
        ):
            client.files()
        assert error.value.status == 429


# --- the configuration file -------------------------------------------------------------------------------------------------


def test_the_configuration_file_sets_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "motet.yaml"
    file.write_text(
        "limits: {tokens_per_day: 1000, priority: normal}\nrate: {requests_per_second: 5}\nengine: {slots: 2}\n"
    )
    found = load_service(file)
    assert (found.limits.tokens_per_day, found.limits.priority, found.engine.slots) == (1000, "normal", 2)
    assert found.rate == RateConfig(requests_per_second=5)
    assert load_service(None).rate is None
    file.write_text("takeover_seconds: 0.2\nengine: {slots: 2}\n")
    assert load_service(file).engine.slots == 2
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith(f"{file}: takeover_seconds is ignored: ")
    for text, words in (
        ("limits: {tokens: 1}", "tokens_per_day"),
        ("limits: {rank: 0}", "limits.rank"),
        ("jobs: []", "jobs: there is no such field; .* There are bases, cluster, engine"),
        ("engine: {slotss: 1}", "slots"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_service(file)


def test_the_page_about_limits_has_every_field_with_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    for model in (LimitsConfig, RateConfig):
        for name, field in model.model_fields.items():
            (told,) = re.findall(rf"^\| `{name}` \| ([^|]+) \|", page, re.M)
            default = "none" if field.default is None else field.default
            assert told.replace(",", "") == (default if isinstance(default, str) else f"{default:.0f}"), name


class Held(Hosts):
    """Answers when it may, and remembers what it was asked."""

    def __init__(self, directory: Path) -> None:
        super().__init__([], directory)
        self.asked, self.may = list[int](), asyncio.Event()

    async def ask(self, question: Complete | ExamineAdapter, charged: Charged | None = None) -> AsyncIterator[Answer]:
        """The prompt at once; the answer when it may."""
        assert isinstance(question, Complete)
        self.asked.append(question.sampling.max_tokens)
        yield PromptRead(0, 10)
        await self.may.wait()


def test_what_open_requests_may_sample_counts_against_the_day(house: House, tmp_path: Path) -> None:
    known = house.ask("GET", "/v1/limits").json()
    limit(house, tokens_per_day=known["tokens_today"] + 100)

    async def go() -> list[int]:
        hosts = Held(tmp_path)
        asks = Asks(hosts, house.service.quotas.tokens_left)

        def question(most: int, n: int = 1) -> Complete:
            return Complete(known["id"], None, n, 0, False, False, SamplingParams(max_tokens=most), prompt="a")

        first = await ask(asks, question(30, 2))
        with pytest.raises(LimitError, match=r"may sample 64 tokens, and.*open requests"):
            await ask(asks, question(32, 2))
        second = await ask(asks, question(32, 2), cut=True)  # whose length nobody set
        with pytest.raises(LimitError, match="0 are left today besides 100 that"):
            await ask(asks, question(1), cut=True)
        hosts.may.set()
        assert [await whole(pieces) for _, pieces in (first, second)] == [[], []]
        third = await ask(asks, question(100))  # what was not sampled is given back
        with pytest.raises(LimitError):
            await ask(asks, question(1))
        del third
        return hosts.asked

    assert asyncio.run(go()) == [30, 20, 100]
    limit(house)


def test_what_open_samples_may_sample_counts_against_the_day(house: House, tmp_path: Path) -> None:
    """Of several at once, as many are sampled as the day has room for; the others wait until these end."""
    service, tinker = house.service, house.app.state.tinker
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    limit(house, tokens_per_day=service.ledger.used_lately(who.tenant_id).tokens + 100)

    def wanted(number: int, **most: int) -> Sample:
        asked = {"prompt": {"chunks": [{"tokens": [number]}]}, "num_samples": 4, "sampling_params": most}
        return Sample.model_validate(asked)

    async def go() -> list[int]:
        hosts = Held(tmp_path)
        hosts.there = {service.bases.first: asyncio.Event()}
        hosts.there[service.bases.first].set()
        asks = Asks(hosts, service.quotas.tokens_left)
        samplers = Samplers(tinker.models, tinker.checkpoints, service.storage, hosts, asks)
        room, turns = OpenBytes(HttpConfig()), service.write_threads
        bus = EventBus()
        futures = Futures(tinker.models, samplers, service.quotas, service.store, bus, service.storage, room, turns)
        names = [await futures.begin(who, wanted(number, max_tokens=10)) for number in range(6)]

        async def states() -> list[str]:
            """Why each has no answer; empty if it has one."""
            answers = await asyncio.gather(*(futures.wait(who, name, 0.3) for name in names))
            assert not any("error" in one for one in answers if isinstance(one, dict)), answers
            return [str(one["queue_state_reason"]) if isinstance(one, dict) else "" for one in answers]

        words = "besides 80 that open requests may sample; lower max_tokens or n, wait until these end"
        while sum(words in one for one in await states()) < 4:
            assert len(hosts.asked) <= 2
        assert len(hosts.asked) == 2
        hosts.may.set()
        while any(await states()):
            pass
        with pytest.raises(LimitError, match=r"a day of this tenant has.*num_samples"):
            await futures.begin(who, wanted(7, max_tokens=10_000))
        last = await futures.begin(who, wanted(8))  # whose length nobody set
        while not isinstance(await futures.wait(who, last, 0.01), bytes):
            pass
        return hosts.asked

    assert asyncio.run(go()) == [10] * 6 + [25]
    limit(house)
