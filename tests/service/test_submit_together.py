"""Several jobs in one request: all are taken, or none, and the mistakes of all are told at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.core.errors import ServiceError
from tests.support.commands import Motet, job_file, rows_in
from tests.support.house import House
from tests.support.service_run import tiny
from tests.support.together import at_once


@pytest.fixture
def ours(house: House, monkeypatch: pytest.MonkeyPatch) -> motet.Client:
    monkeypatch.setenv("MOTET_URL", str(house.http.base_url))
    monkeypatch.setenv("MOTET_API_KEY", house.keys["ours"])
    return motet.Client()


def names(client: motet.Client) -> set[str]:
    return {job.name for job in client.jobs()}


def submit(house: House, *jobs: dict[str, Any], status: int = 201, after: Sequence[str] = (), key: str = "") -> Any:
    body = {"jobs": [{"job": job, "after": list(after)} for job in jobs]}
    answer = house.ask("POST", "/v1/submissions", json=body, headers={"Idempotency-Key": key} if key else {})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_of_two_jobs_none_is_taken_where_one_is_refused(house: House, ours: motet.Client) -> None:
    before = names(ours)
    chained = tiny("fourth", adapter={"init": "second@latest"})
    wrong = [tiny("second", reward="exct"), tiny("third", data="toy:ad"), tiny("ended"), chained]
    said = submit(house, tiny("first"), *wrong, status=400)["error"]["message"].splitlines()
    assert [line.partition(":")[0] for line in said] == ["job second", "job third", "job ended"]
    assert "did you mean 'exact'?" in said[0]
    assert "did you mean 'add'" in said[1]
    assert "there is a job 'ended' already" in said[2]
    assert names(ours) == before


def test_a_job_may_start_from_one_above_it(house: House) -> None:
    chained = tiny("next", adapter={"init": "begin@latest"})
    first, second = submit(house, tiny("begin"), chained, key="once")["data"]
    assert second["after"] == [first["id"]]
    assert second["message"] == "waits for 'begin' to succeed"
    row = house.store.job_by_id(second["id"])
    assert row is not None
    assert row.starts_from == f"{first['id']}@latest"
    again = submit(house, tiny("begin"), chained, key="once")["data"]
    assert [job["id"] for job in again] == [first["id"], second["id"]]
    narrow = tiny("narrow", adapter={"init": "wide", "rank": 2})
    said = submit(house, tiny("wide"), narrow, status=400)["error"]["message"]
    assert said.startswith("job narrow: adapter.init: 'wide' has rank 32, the job asks for 2; leave out adapter.rank")


def test_what_a_request_may_hold(house: House, ours: motet.Client) -> None:
    before = names(ours)
    assert "another job of this request has it" in submit(house, tiny("a"), tiny("a"), status=400)["error"]["message"]
    submit(house, status=422)
    submit(house, *[{}] * 1001, status=422)
    submit(house, {"name": "x" * 10_000}, {"name": "y"}, status=400)
    assert names(ours) == before


def test_the_queue_has_room_for_all_or_takes_none(house: House, ours: motet.Client) -> None:
    before = names(ours)
    with motet.Client(key=house.keys["admin"]) as admin:
        admin.set_limits("us", {"queued_jobs": 0})
        try:
            with pytest.raises(ServiceError, match=r"queued_jobs: .* and 20 more are too many") as refused:
                ours.submit_all([tiny(f"job{n}") for n in range(20)])
        finally:
            admin.set_limits("us", {})
    assert refused.value.status == 429
    assert names(ours) == before


def test_motet_submit_leaves_nothing_behind(ours: motet.Client, tmp_path: Path, says: Motet) -> None:
    before, files = names(ours), len(ours.files())
    first = tiny("first", data=str(rows_in(tmp_path)))
    code, out, err = says("submit", job_file(tmp_path, first, tiny("second", reward="exct")))
    assert (code, out) == (2, "")
    assert "job second: reward 'exct' cannot be used here; did you mean 'exact'?" in err
    assert (names(ours), len(ours.files())) == (before, files)


def test_files_are_read_before_any_is_uploaded(ours: motet.Client, tmp_path: Path, says: Motet) -> None:
    before = len(ours.files())
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(8)))
    jobs = [tiny("good", data=str(rows_in(tmp_path))), tiny("bad", data=str(tmp_path / "bare.jsonl"))]
    code, _, err = says("submit", job_file(tmp_path, *jobs))
    assert code == 2
    assert err.startswith("motet: job bad: ")
    assert "row 1 has no column named prompt" in err
    assert len(ours.files()) == before


def test_requests_with_one_key_at_once_make_one_job(house: House) -> None:
    job, headers = tiny("at-once"), {"Idempotency-Key": "at-once"}
    found = at_once(lambda _: house.ask("POST", "/v1/jobs", json=job, headers=headers).json()["id"], 8)
    assert found == [found[0]] * 8
    other = house.ask("POST", "/v1/jobs", json=tiny("another"), headers=headers)
    assert other.json()["id"] == found[0]
