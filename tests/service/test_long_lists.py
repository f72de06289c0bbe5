"""Lists that a tenant, or another one, can make long: a page costs what it shows, and pages together show all."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import event

import motet
from motet.config.service import RateConfig
from motet.runtime.client_loop import ABOUT
from motet.service.adapters.adapters import ALL
from motet.service.database.store import MOST_OF_A_PAGE
from motet.service.database.tables import Share, StoredJob, UploadedAdapter
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.http.auth import SECONDS_OF_A_REQUEST, Access, RateLimit, _admitted
from motet.service.routes.adapters import list_versions
from motet.service.tinker.checkpoints import MOST_CHECKPOINTS, Checkpoints
from motet.service.tinker.models import Models
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.runs import _run
from tests.support.counting import calls
from tests.support.database import queued
from tests.support.house import House
from tests.support.service_run import Json

MANY = 230


def pages(house: House, path: str, limit: int, key: str = "ours") -> list[Json]:
    """All rows, page by page."""
    rows = list[Json]()
    after: str | None = ""
    while after is not None:
        answer = house.ask("GET", f"{path}?limit={limit}{after and f'&after={after}'}", key).json()
        assert len(answer["data"]) <= limit + (path == "/v1/models" and not after), "bases come first"
        rows += answer["data"]
        after = answer.get("next")
    return rows


def jobs(house: House, tag: str, key: str | None = None) -> list[str]:
    """Ids of many jobs that have ended; `key` has a place for a number."""
    common: Any = {"tenant_id": house.store.tenants.made("us").id, "spec": {}, "steps": 1, "ended": 1.0}
    common |= {"state": "cancelled", "wanted": "cancel"}
    with house.store.transaction() as session:
        for n in range(MANY):
            idempotency = None if key is None else key.format(n)
            session.add(StoredJob(id=f"job-{tag}-{n}", name=f"{tag}-{n}", idempotency_key=idempotency, **common))
    return [f"job-{tag}-{n}" for n in range(MANY)]


def version(house: House, job: str, number: int) -> Path:
    """A stored version."""
    path = house.storage.job(job).path / "versions" / f"v{number}"
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    return path


def test_a_page_of_versions_looks_into_those_that_it_shows(house: House) -> None:
    job = house.store.job_by_id(house.job["id"])
    assert job is not None
    path, few = "/v1/jobs/ended/versions", pages(house, "/v1/jobs/ended/versions", 200)
    for number in range(100, 100 + MANY):
        version(house, job.id, number)
    numbers = [*(one["version"] for one in few), *range(100, 100 + MANY)]
    assert [one["version"] for one in pages(house, path, 7)] == numbers
    assert [one["version"] for one in house.ask("GET", path).json()["data"]] == numbers[:200]
    with calls() as counted:
        assert len(list_versions(house.service, job, None, 2).data) == 2
    assert counted["_size"] == 2
    assert counted["stat"] < 20


def test_each_line_of_a_rollout_log_is_parsed_once_and_then_only_what_a_page_shows(house: House) -> None:
    """Filters need the whole log, of up to 32,768 lines; so does an answer without rollouts."""
    directory, logs = house.storage.job(house.job["id"]), house.service.rollout_logs
    lines = [{"problem": n // 4, "reward": None if n % 4 == 3 else n % 4 / 2, "text": f"{n}"} for n in range(MANY)]
    directory.write_rollouts("7", lines)
    log = directory.rollout_log(7)

    def parsed(least: float, after: int, limit: int) -> int:
        with calls(own_thread=True) as counted:
            logs.page(log, lambda _, reward: reward >= least, after, limit)
        return counted["_parsed"]

    try:
        assert parsed(0.0, 0, 10) <= 20, "no more than it needs"
        assert parsed(2.0, 0, 10) <= MANY, "the rest"
        assert parsed(2.0, 0, 10) == 0
        for after in (0, 100, MANY, 10**9):
            assert parsed(1.0, after, 10) <= 10
        path = "/v1/jobs/ended/rollouts"
        assert [one["text"] for one in filtered(house, f"{path}?step=7&limit=7")] == [one["text"] for one in lines]
        best = [one["text"] for one in lines if one["reward"] == 1.0]
        assert [one["text"] for one in filtered(house, f"{path}?step=7&limit=9&min_reward=0.9")] == best
        directory.write_rollouts("7", lines[::-1])  # the step ran again
        assert filtered(house, f"{path}?step=7&limit=1000")[0]["text"] == str(MANY - 1)
    finally:
        log.unlink()


def test_a_client_reads_as_many_pages_of_rollouts_as_it_needs(house: House) -> None:
    directory = house.storage.job(house.job["id"])
    directory.write_rollouts("8", ({"problem": 0, "reward": 0.5, "text": f"{n}"} for n in range(2100)))
    try:
        with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
            for limit, there in ((2050, 2050), (5000, 2100), (1000, 1000), (5, 5)):
                found = client.rollouts("ended", limit=limit)
                assert [one["text"] for one in found.data] == list(map(str, range(there)))
                assert found.step == 8
    finally:
        directory.rollout_log(8).unlink()


def test_a_page_of_large_rollouts_is_short_and_its_tokens_are_not_parsed(house: House) -> None:
    """To read the tokens of a page as JSON, and to write them again, would hold up all threads."""
    directory = house.storage.job(house.job["id"])
    tokens = {"token_texts": ["a"] * 100_000, "logprobs": [0.5] * 100_000}
    directory.write_rollouts("9", ({"problem": n, "reward": 0.5, **tokens} for n in range(10)))
    log = directory.rollout_log(9)
    log.write_bytes(log.read_bytes().replace(b"[0.5, 0.5,", b"[0.5, 0.50000,"))
    fit = MOST_OF_A_PAGE // (log.stat().st_size // 10)
    try:
        for query, size in (("limit=1000&tokens=true", MOST_OF_A_PAGE), ("limit=1000", 1000)):
            answer = house.ask("GET", f"/v1/jobs/ended/rollouts?step=9&{query}")
            assert len(answer.json()["data"]) == fit
            assert len(answer.content) < size
            assert answer.content.count(b"0.50000,") == (fit if "tokens" in query else 0), "as they are in the log"
        with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
            found = client.rollouts("ended", 9, limit=1000, tokens=True).data
        assert [one["problem"] for one in found] == list(range(10))
        assert found[9]["logprobs"] == tokens["logprobs"]
    finally:
        log.unlink()


def test_accounts_tenants_and_keys_come_in_pages(house: House) -> None:
    """Each grows with what was stored: lines of usage stay when their job is deleted."""
    owner, service = house.store.tenants.made("us").id, house.service
    used = jobs(house, "used")
    for base in ("", "small", "former"):
        service.ledger.window(f"of {base}", 1, {**dict.fromkeys(used, 7), "": 3, f"answers/{owner}": 5}, base=base)
    for n in range(MANY):
        house.store.tenants.create_key(f"many-{n}", f"{n}", "member")
    with motet.Client(str(house.http.base_url), house.keys["admin"]) as client:
        for path, few, every in (
            ("/v1/usage?by=job", 100, client.usage()),
            ("/v1/usage?by=day&by=job&by=base", 100, client.usage(["day", "job", "base"])),
            ("/v1/usage?by=base", 1, client.usage(["base"])),
            ("/v1/usage?by=tenant&tenant=us", 1, client.usage(["tenant"], tenant="us")),
            ("/v1/tenants?", 100, client.tenants()),
            ("/v1/keys?", 100, client.keys()),
        ):
            found = filtered(house, f"{path}&limit={few}", "admin")
            assert found == house.ask("GET", f"{path}&limit=1000", "admin").json()["data"]
            assert found == [one.model_dump(mode="json") for one in every]
            assert len(house.ask("GET", f"{path}&limit=1", "admin").json()["data"]) == 1
        lines = client.usage(["job", "base"])
        assert [line.kind for line in lines] == ["completions", *["job"] * MANY, "idle"]
        microseconds = {round(1e6 * line.device_seconds) for line in lines}
        assert microseconds == {3 * 7, 3 * 5, 3 * 3}, "a base that had several names has one line"
        table = client.usage_csv()
        assert table == house.ask("GET", "/v1/usage?format=csv&limit=100", "admin").text, "of all pages"
        assert len(table.splitlines()) == 1 + len(lines)
    names = [one["name"] for one in filtered(house, "/v1/tenants?limit=100", "admin")]
    assert names == sorted(names)
    assert {"us", "them", *(f"many-{n}" for n in range(MANY))} <= set(names)
    with calls(own_thread=True) as counted:
        assert len(service.ledger.page(None, limit=2)[0]) == len(service.quotas.used(limit=2)) == 2
    assert (counted["_line"], counted["Quotas._with"]) == (2, 2)


def test_a_chart_has_no_more_evaluations_than_points(house: House) -> None:
    job = queued(house.store, Principal.member_of(house.store.tenants.made("us").id), "evaluated", {}, 1, None).id
    for step in range(MANY):
        house.recorder.record_step(job, {"step": step, "loss": 0.5, "eval": {"loss": step / MANY}})
    whole = house.ask("GET", f"/v1/jobs/{job}/steps").json()["data"]
    thin = house.ask("GET", f"/v1/jobs/{job}/steps?points=10").json()["data"]
    assert [line["step"] for line in thin] == [*range(0, MANY, MANY // 10), MANY - 1]
    assert thin[1] == whole[MANY // 10]
    with calls(own_thread=True) as counted:
        house.service.log.steps(job, 2)
    assert counted["to_json"] == 0


def test_a_read_that_takes_long_counts_as_many_requests(house: House) -> None:
    """What it costs to look at everything, for an answer of one line."""
    rate, scope = RateLimit(RateConfig()), dict[str, Any]()
    access = Access(house.store.tenants, rate, house.service.agent_workers, open_to_all=False)
    _admitted(scope).counted_as = "somebody"
    rate.wait("somebody")
    (left, _) = rate._buckets["somebody"]

    def work(seconds: float) -> str:
        began = time.thread_time()
        while time.thread_time() < began + seconds:
            pass
        return "done"

    assert access.timed(scope, lambda: work(0.0)) == "done"
    assert rate._buckets["somebody"][0] == left, "most reads are one request"
    assert access.timed(scope, lambda: work(11 * SECONDS_OF_A_REQUEST)) == "done"
    assert rate._buckets["somebody"][0] <= left - 10


def test_a_model_has_as_many_checkpoints_as_a_list_shows(house: House) -> None:
    (job,) = jobs(house, "kept", "session-0:train:{}")[:1]
    stored = house.store.job_by_id(job)
    assert stored is not None
    checkpoints, place = house.part(Checkpoints), house.storage.job(job).path / "checkpoints" / "weights"
    for n in range(MOST_CHECKPOINTS):
        (place / f"{n}").mkdir(parents=True)
        (place / f"{n}" / ABOUT).write_text("{}")
    checkpoints.check_free(stored, "weights", "7", 1, overwrite=True)
    with pytest.raises(Refusal, match=r"has 1000 checkpoints.*delete some"):
        checkpoints.check_free(stored, "weights", "another", 1)
    shutil.rmtree(place / "7")
    checkpoints.check_free(stored, "weights", "another", 1)


def filtered(house: House, path: str, key: str = "ours") -> list[Json]:
    """All rows, page by page."""
    rows = list[Json]()
    after: str | None = ""
    while after is not None:
        answer = house.ask("GET", path + (after and f"&after={quote(after)}"), key).json()
        assert answer["data"]
        rows += answer["data"]
        after = answer["next"]
    return rows


@pytest.mark.parametrize("key", ["ours", "theirs"])
def test_a_page_of_models_looks_into_as_many_jobs_as_it_shows(house: House, key: str) -> None:
    """Of one's own, and of those that a stranger shares with all."""
    tag = f"many-{key}"
    many, store, us = jobs(house, tag), house.store, house.store.tenants.made("us")
    with store.transaction() as session:
        session.add_all(
            Share(id=f"share-{tag}-{n}", tenant_id=us.id, object=one, with_tenant=ALL, created=float(n % 3))
            for n, one in enumerate(many)
        )
        common: Any = {"tenant_id": us.id, "bytes": 1, "rank": 1, "alpha": 1.0, "target_modules": []}
        for n in range(9):
            name = f"{key}-up-{n}"
            session.add(UploadedAdapter(id=f"adapter-{name}", name=name, created=float(n % 3), **common))
    for n, one in enumerate(many):
        for number in range(n % 3):  # a third of them have none
            version(house, one, number)
    before = "" if key == "ours" else "us/"
    names = {
        f"{before}{tag}-{n}@{version}" for n in range(MANY) for version in [*range(n % 3), "latest", "best"] if n % 3
    }
    listed = [one["id"] for one in pages(house, "/v1/models", 1000, key)]
    assert names <= set(listed)
    assert key != "ours" or {f"{key}-up-{n}" for n in range(9)} <= set(listed)
    for limit in (1, 7, 200):
        assert [one["id"] for one in pages(house, "/v1/models", limit, key)] == listed
    tenant, read = store.tenants.made("us" if key == "ours" else "them"), list[Share]()
    listened: Any = Share, "load", lambda one, _: read.append(one)
    event.listen(*listened)
    try:
        with calls() as counted:
            found, following = house.service.listing.page(Principal.member_of(tenant.id), None, 7)
    finally:
        event.remove(*listened)
    assert len(found) <= 7
    assert following
    assert 0 < counted["Storage.version_names"] <= 7
    assert len(read) < 10
    for after in ("many-1", "0/e//", "0/1.5//", "1/1e3/adapter-x/", "2/./share-x/", "1/1.0//"):
        house.refused(422, "GET", f"/v1/models?after={after}")


@pytest.mark.parametrize("key", ["ours", "theirs", "admin"])
def test_a_page_of_shares_looks_at_as_many_as_it_shows(house: House, key: str) -> None:
    """Given by the tenant, and by strangers with all."""
    store, many = house.store, jobs(house, f"lent-{key}")
    us, them = (store.tenants.made(name).id for name in ("us", "them"))
    with store.transaction() as session:
        session.add_all(
            Share(id=f"lent-{key}-{n}", tenant_id=(us, them)[n % 2], object=one, with_tenant=ALL, created=float(n % 3))
            for n, one in enumerate(many)
        )
    given, received = whole = paged_shares(house, 200, key)
    for limit in (37, min(200, len(given))):  # the last one ends a page with what is given
        assert paged_shares(house, limit, key) == whole
    for shares in whole:
        assert len(set(shares)) == len(shares)
    mine = {f"lent-{key}-{n}" for n in range(MANY) if key == "admin" or n % 2 == (key == "theirs")}
    assert mine <= set(given)
    if key != "admin":
        assert not mine & set(received)
    assert {f"lent-{key}-{n}" for n in range(MANY)} <= {*given, *received}
    assert len(house.ask("GET", "/v1/shares", key).json()["given"]) <= 200
    read = list[Share]()
    listened: Any = Share, "load", lambda one, _: read.append(one)
    event.listen(*listened)
    try:
        house.service.adapters.listed(Principal.member_of(them), None, 3)
    finally:
        event.remove(*listened)
    assert 0 < len(read) <= 4
    with motet.Client(str(house.http.base_url), house.keys[key]) as client:
        known = client.shares()
    assert ([one.id for one in known.given], [one.id for one in known.received]) == whole


def test_a_page_of_uploaded_adapters_reads_what_it_shows(house: House) -> None:
    us = house.store.tenants.made("us").id
    about: Any = {"tenant_id": us, "bytes": 1, "rank": 1, "alpha": 1.0, "target_modules": []}
    with house.store.transaction() as session:
        session.add_all(
            UploadedAdapter(id=f"brought-{n}", name=f"brought-{n}", created=1e9 + n % 3, **about) for n in range(MANY)
        )
    whole = [one["id"] for one in pages(house, "/v1/adapters", 200)]
    assert {f"brought-{n}" for n in range(MANY)} <= set(whole)
    assert len(set(whole)) == len(whole)
    created = [one["created"] for one in pages(house, "/v1/adapters", 37)]
    assert created == sorted(created, reverse=True)
    assert [one["id"] for one in pages(house, "/v1/adapters", 37)] == whole
    assert len(house.ask("GET", "/v1/adapters").json()["data"]) == 200
    read = list[UploadedAdapter]()
    listened: Any = UploadedAdapter, "load", lambda one, _: read.append(one)
    event.listen(*listened)
    try:
        house.ask("GET", "/v1/adapters?limit=3")
    finally:
        event.remove(*listened)
    assert 0 < len(read) <= 4
    with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
        assert [one.id for one in client.adapters()] == whole


def paged_shares(house: House, limit: int, key: str) -> tuple[list[str], list[str]]:
    """Ids of all shares, given and received, page by page."""
    given, received = list[str](), list[str]()
    after: str | None = ""
    while after is not None:
        answer = house.ask("GET", f"/v1/shares?limit={limit}{after and f'&after={after}'}", key).json()
        assert 0 < len(answer["given"]) + len(answer["received"]) <= limit
        given += (one["id"] for one in answer["given"])
        received += (one["id"] for one in answer["received"])
        after = answer.get("next")
    return given, received


def test_pages_of_a_tinker_client_read_what_they_show(house: House) -> None:
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    _, before = house.part(Checkpoints).page(who, 1, 0)  # the models of other tests are looked into here
    many = jobs(house, "model", "session-{0:032d}:train:0")
    for n, job in enumerate(many):
        for kind in ("weights", "sampler_weights")[: n % 3]:
            place = house.storage.job(job).path / "checkpoints" / kind / "w"
            place.mkdir(parents=True)
            (place / ABOUT).write_text('{"number": 9}')
    read, checkpoints, models = list[StoredJob](), house.part(Checkpoints), house.part(Models)
    listened: Any = StoredJob, "load", lambda one, _: read.append(one)
    event.listen(*listened)
    try:
        with calls() as counted:
            whole, total = checkpoints.page(who, 10**6, 0)
        assert counted["_saved"] == MANY
        read.clear()
        with calls() as counted:
            found, _ = checkpoints.page(who, 10, 30)
        assert [one.path for one in found] == [one.path for one in whole[30:40]]
        assert len(read) <= 10
        assert counted["Checkpoints._there"] == 10
        assert counted["_saved"] == 0, "ended models are not looked into again"
        read.clear()
        assert len(models.sessions(who, 10, 5)) == 10
        assert not read
    finally:
        event.remove(*listened)
    assert total == len(whole) == before + sum(n % 3 for n in range(MANY))
    checkpoints.remove(whole[0])
    cursor = house.ask("GET", f"{PREFIX}/checkpoints?limit=3&offset=2").json()["cursor"]
    assert cursor == {"limit": 3, "offset": 2, "total_count": total - 1}


def test_a_model_shows_its_newest_checkpoint_without_a_look_at_the_others(house: House) -> None:
    (job, *_), checkpoints = jobs(house, "saving"), house.part(Checkpoints)
    for n in range(50):
        place = house.storage.job(job).path / "checkpoints" / "weights" / f"w{n:02d}"
        place.mkdir(parents=True)
        (place / ABOUT).write_text('{"number": 9}')
    row = house.store.job_by_id(job)
    assert row is not None
    row.spec = {"adapter": {"rank": 4}}
    with calls() as counted:
        shown = _run(house.part(Models), checkpoints, "us", row)
    assert shown["last_checkpoint"]["checkpoint_id"] == "weights/w49"
    assert counted["Checkpoint.about"] == counted["Checkpoints._there"] == 1
