"""The service's routes without an engine: who may ask for what, what is refused and how, and that nothing answers 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import math
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import pytest
from fastapi import Request, UploadFile
from pydantic import Field
from safetensors.numpy import save
from sqlalchemy import select

from motet.commands.answers import say, table
from motet.commands.serve import serve
from motet.config.service import HttpConfig, ServiceConfig
from motet.core.errors import ConfigError
from motet.core.json_text import storable
from motet.core.settings import Described, described
from motet.core.types import JobState
from motet.hosts.hosts import Hosts
from motet.hosts.messages import AdapterExamined, Answered
from motet.process.thread_turns import ThreadTurns
from motet.service.adapters.adapters import Adapters
from motet.service.database.tables import StoredJob, StoredRace, UploadedAdapter
from motet.service.http.downloads import MOST_OPEN, Packing
from motet.service.routes.adapters import upload as upload_adapter
from motet.service.routes.files import upload
from tests.support import inside
from tests.support.cases import few
from tests.support.house import House, error_of, open_house
from tests.support.service_run import ROWS, Json, tiny
from tests.support.together import at_once
from tests.support.waiting import PATIENCE, until, wait_until

pytestmark = pytest.mark.tier1

OPEN = {"/healthz", "/readyz"}  # routes that need no key
SIGN_IN = {"/v1/login", "/v1/login/key", "/v1/login/device", "/v1/login/device/key"}
"""They need none either; a service without sign-in has nothing there (tests/service/test_sign_in.py)."""


# --- keys -------------------------------------------------------------------------------------------------------------------


def operations(house: House) -> Iterator[tuple[str, str, Json]]:
    """(method, path, description) of every operation."""
    for path, methods in house.app.openapi()["paths"].items():
        for method, told in methods.items():
            yield method.upper(), path, told


def filled(house: House, path: str) -> str:
    """A path with the names of `ours`."""
    key = next(one for one, _ in house.store.tenants.keys_of(None) if one.name == "revoked")
    known = {"job": house.job["id"], "file": house.file["id"], "key": key.id, "version": "latest", "word": "pause"}
    known |= {"adapter": "brought", "share": "share-1", "tenant": "us", "worker": "w", "episode": "e"}
    known |= {"model": "ended@latest", "kind": "rewards"}
    return path.format(**known)


def test_every_route_wants_a_key_that_is_good(house: House) -> None:
    seen = 0
    for (method, path, _), key in itertools.product(operations(house), ("none", "wrong", "expired", "revoked")):
        answer = house.ask(method, filled(house, path), key)
        if path in OPEN:
            assert answer.status_code in (200, 503)
            continue
        if path in SIGN_IN and method != "DELETE":
            assert (answer.status_code, path) in {(404, path), (422, path)}
            continue
        if path.startswith("/episodes/"):  # with keys of their own: one that is not there is over, whoever asks
            assert (answer.status_code, path) == (404, path)
            continue
        seen += 1
        assert (answer.status_code, path) == (401, path)
        assert error_of(answer)["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert seen >= 4 * 15


def test_what_is_another_tenants_is_not_there(house: House) -> None:
    for method, path, _ in operations(house):
        if path.startswith(("/v1/audit", "/v1/tenants")):
            assert house.refused(403, method, filled(house, path), "theirs")["type"] == "permission_error"
        elif "{" in path:
            answer = house.ask(method, filled(house, path), "theirs")
            assert (answer.status_code, path) == (404, path)
            assert error_of(answer)["message"]
    house.refused(403, "POST", "/v1/keys", "theirs", json={"tenant": "us"})
    assert {one["tenant"] for one in house.ask("GET", "/v1/keys", "theirs").json()["data"]} == {"them"}
    assert house.ask("GET", "/v1/jobs", "theirs").json()["data"] == []
    assert house.ask("GET", "/v1/files", "theirs").json()["data"] == []
    assert not [one for one in house.ask("GET", "/v1/models", "theirs").json()["data"] if "ended" in one["id"]]
    asked = {"model": "ended@latest", "messages": [{"role": "user", "content": "a"}]}
    assert house.refused(404, "POST", "/v1/chat/completions", "theirs", json=asked)["param"] == "model"
    for who, tenant in (("ours", None), ("admin", "us")):
        assert house.ask("GET", f"/v1/jobs/{house.job['id']}", who).json()["tenant"] == tenant


def test_an_admin_removes_none_of_two_adapters_of_a_name(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        them, adapters = house.store.tenants.who(house.keys["theirs"]), house.part(Adapters)
        assert them is not None
        given = {"name": "brought", "bytes": 4, "rank": 32, "alpha": 32.0, "target_modules": ["q_proj"]}
        adapters.add(them, UploadedAdapter(id="adapter-2", tenant_id=them.tenant_id, **given))
        told = house.ask("DELETE", "/v1/adapters/brought", "admin")
        assert (told.status_code, "adapter-brought of us, adapter-2 of them" in told.text) == (409, True), told.text
        assert house.ask("DELETE", "/v1/adapters/adapter-2", "admin").status_code == 204
        assert house.ask("GET", "/v1/adapters/brought", "admin").json()["id"] == "adapter-brought"


def test_an_admin_makes_and_ends_keys(house: House) -> None:
    made = house.ask("POST", "/v1/keys", "admin", json={"tenant": "us", "name": "new", "expires_days": 1}).json()
    house.keys["new"] = made["key"]
    assert house.ask("GET", "/v1/jobs/ended", "new").status_code == 200
    assert made["key"] not in house.ask("GET", "/v1/keys", "admin").text
    assert house.ask("DELETE", f"/v1/keys/{made['id']}", "admin").status_code == 204
    house.refused(401, "GET", "/v1/jobs", "new")


def test_no_name_steers_the_terminal_of_who_prints_it(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("\x1b[31mred", "two\nlines", "\u202ebackwards"):
        message = house.refused(422, "POST", "/v1/keys", "admin", json={"tenant": "us", "name": name})["message"]
        assert "unprintable" in message
    files = {"file": ("\x9b1ma\u202e.jsonl", ROWS)}
    assert house.ask("POST", "/v1/files", files=files).json()["filename"] == "1ma.jsonl"
    kept = "\x1b[2Jkept\x1b]8;;http://x\x07 by an older release\x9b1m"
    say(table([(kept, "\x07")], "name, bell", empty=""))
    say(kept)
    printed = capsys.readouterr().out
    assert "kept by an older release" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}


# --- the description --------------------------------------------------------------------------------------------------------


def test_every_route_is_described(house: House) -> None:
    for method, path, told in operations(house):
        assert told.get("description") or told.get("summary"), (method, path)
        assert told["description"].strip(), (method, path)
        successes = [answer for status, answer in told["responses"].items() if status.startswith("2")]
        assert successes, (method, path)
        assert set(told["responses"]) >= {"400", "401", "403", "404", "409", "422", "503"}, (method, path)
    models = house.app.openapi()["components"]["schemas"]
    assert models["Error"]["properties"]["error"]["$ref"].endswith("ErrorDetail")


@pytest.mark.parametrize("times", few([12, 60], 12))
@pytest.mark.slow
def test_nothing_that_is_asked_makes_the_service_fall_over(tmp_path: Path, times: int) -> None:
    with open_house(tmp_path) as house:  # of its own: some of what is asked is granted
        _ask_oddly(house, times)


def test_what_cannot_be_kept_or_found_is_told(house: House) -> None:
    house.refused(404, "GET", f"/v1/jobs/ended/versions/{'9' * 5000}/download")
    for odd in ('"\\ud800"', "NaN", "1e999"):
        text = json.dumps({**tiny("odd"), "data": {"source": "toy:add", "config": {"x": "HERE"}}})
        content = text.replace('"HERE"', odd).encode()
        error = house.refused(400, "POST", "/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert "JSON" in error["message"]
    assert house.ask("GET", "/v1/jobs").status_code == 200


def _ask_oddly(house: House, times: int) -> None:
    draw = random.Random(times)
    asked = 0
    for method, path, told in operations(house):
        if path.endswith("/stream"):
            continue  # open for as long as its job; see below
        for _ in range(times if method != "DELETE" else 5):
            target, request = _odd(draw, house, path, told)
            answer = house.ask(method, target, draw.choice(["ours", "admin"]), **request)
            asked += 1
            expected = answer.status_code < 500 or answer.status_code == 503
            assert expected, (method, target, request, answer.text)
            if answer.status_code >= 400 and path not in OPEN:
                error_of(answer)
    assert asked > 300
    assert house.ask("GET", "/v1/jobs?limit=200", "admin").status_code == 200


ODD: list[Any] = [
    "", "0", "-1", "1e999", "nan", "9" * 5000, "%00", "%2e%2e%2f", "..", "é", "%F0%9F%90%88", "a b", "null", "a" * 300, "'--",
    "latest", "best", "٣", "\ud83d\ude00", "ended", "file-x", "{}", "[]",
]  # fmt: skip
JSONS: list[Any] = [
    None, [], {}, "", 0, -1, 10**30, 1e308, True, "\ud800", "\x00", "x" * 300, [[]], {"a": {"b": 1}}, ["\ud800"], -(10**20),
]  # fmt: skip


GRADER: Json = {"type": "string_check", "name": "x", "input": "a", "reference": "b", "operation": "eq"}


def _odd(draw: random.Random, house: House, path: str, told: Json) -> tuple[str, Json]:
    """A request that a person would not make."""
    names = [one["name"] for one in told.get("parameters", ()) if one["in"] == "path"]
    plain = [one for one in ODD if not any(0xD800 <= ord(letter) < 0xE000 for letter in one)]
    target = path.format(**{name: _named(draw, name, plain) for name in names})
    query = {
        one["name"]: draw.choice(plain)
        for one in told.get("parameters", ())
        if one["in"] == "query" and draw.random() < 0.7
    }
    request: Json = {"params": query} if query else {}
    if "requestBody" in told:
        field = draw.choice([*tiny("x"), "adapter", "messages", "model", "tenant", "n", "stop", "max_tokens", "seed"])
        base: Json = tiny(f"odd{draw.random()}")
        if "chat" in path:
            base = {"model": "small", "messages": [{"role": "user", "content": "a"}]}
        elif path.endswith("/completions"):
            base = {"model": "small", "prompt": "a"}
        elif "graders" in path:
            base = {"grader": GRADER, "model_sample": "a", "item": {}}
        elif "fine_tuning" in path:
            tuned: Json = {"grader": GRADER, "hyperparameters": {"n_epochs": 1}}
            base = {"model": "small", "training_file": house.file["id"], "suffix": "odd"}
            base |= {"method": {"type": "reinforcement", "reinforcement": tuned}, "metadata": {}, "motet": {}}
        elif "keys" in path:
            base = {"tenant": "us", "name": "odd"}
        body = draw.choice([{**base, field: draw.choice(JSONS)}, draw.choice(JSONS), _deep(draw, base)])
        request["content"] = json.dumps(body).encode()
        request["headers"] = {
            "Content-Type": draw.choice(["application/json"] * 4 + ["text/plain", "multipart/form-data"])
        }
    return target, request


def _named(draw: random.Random, name: str, odd: list[str]) -> str:
    return "ended" if name == "job" and draw.random() < 0.6 else draw.choice(odd) or "x"


def _deep(draw: random.Random, base: Json) -> Json:
    """The same with something odd one level down."""
    found: Json = json.loads(json.dumps(base))
    for name, value in found.items():
        if isinstance(value, dict) and draw.random() < 0.6:
            value[draw.choice([*value, "config", "template", "init", "prompt"])] = draw.choice(JSONS)
        elif name == "steps":
            found[name] = draw.choice([value, 10**12, 2**31, 1e3])
    return found


# --- jobs -------------------------------------------------------------------------------------------------------------------


def test_another_tenants_version_is_no_start(house: House) -> None:
    job = {**tiny("mine"), "adapter": {"init": "ended@latest"}}
    assert "adapter.init" in house.refused(400, "POST", "/v1/jobs", "theirs", json=job)["message"]
    named = {**tiny("mine"), "adapter": {"init": f"{house.job['id']}@latest"}}
    assert "adapter.init" in house.refused(400, "POST", "/v1/jobs", "theirs", json=named)["message"]
    file = {**tiny("mine"), "data": house.file["id"]}
    assert house.file["id"] in house.refused(400, "POST", "/v1/jobs", "theirs", json=file)["message"]
    for allowed in (job, {**tiny("filed"), "data": house.file["id"]}):
        assert house.ask("POST", "/v1/jobs", "ours", json=allowed).status_code == 201


def test_the_hub_is_for_services_that_allow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near" / "here").mkdir(parents=True)
    with open_house(tmp_path / "house", hub=True) as house:
        assert house.ask("POST", "/v1/jobs", json={**tiny("hub"), "data": "openai/gsm8k"}).status_code == 201
        for source in ("/etc", "near/here", "near", "a.JSONL", "../x/y", "a" * 300, f"a/{'b' * 300}"):
            house.refused(400, "POST", "/v1/jobs", json={**tiny("disk"), "data": source})


def test_the_same_request_twice_is_one_job(house: House) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = (house.ask("POST", "/v1/jobs", json=tiny("once"), headers=headers) for _ in range(2))
    assert (first.status_code, first.json()["id"]) == (201, second.json()["id"])
    assert "once" in house.refused(409, "POST", "/v1/jobs", json=tiny("once"))["message"]
    assert (
        house.ask("POST", "/v1/jobs", "theirs", json=tiny("once"), headers=headers).json()["id"] != first.json()["id"]
    )
    events = house.ask("GET", "/v1/jobs/once/events").json()["data"]
    assert [event["data"]["state"] for event in events] == ["queued"]


def test_the_request_of_an_old_race_again_is_its_first_candidate(house: House) -> None:
    """Its race was stored with the key of its first candidate. A new one is refused, with what to do instead."""
    headers = {"Idempotency-Key": "raced"}
    first, second = (house.ask("POST", "/v1/jobs", json=tiny(f"raced-{name}"), headers=one).json()["id"]
                     for name, one in (("a", headers), ("b", {})))  # fmt: skip
    with house.store.transaction() as session:
        tenant = session.scalars(select(StoredJob.tenant_id).where(StoredJob.id == first)).one()
        session.add(StoredRace(id="race-2", tenant_id=tenant, name="raced", spec={}))
    for job in (first, second):
        house.store.change_job(job, race="race-2")
    race = {**tiny("raced"), "race": {"candidates": 2}}
    answer = house.ask("POST", "/v1/jobs", json=race, headers=headers)
    assert (answer.status_code, answer.json()["id"]) == (201, first)
    assert "examples/search.py" in house.refused(400, "POST", "/v1/jobs", json=race)["message"]


def test_a_job_is_removed_only_when_it_has_ended(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("open")).json()
    assert "cancel" in house.refused(409, "DELETE", "/v1/jobs/open")["message"]
    assert house.ask("POST", "/v1/jobs/open/pause").status_code == 202
    house.recorder.record_state(job["id"], JobState.FAILED, "for a test")
    event = house.ask("GET", "/v1/jobs/open/events").json()["data"][-1]
    assert event["data"] == {"state": "failed", "message": "for a test"}
    house.refused(409, "POST", "/v1/jobs/open/cancel")
    again = house.ask("POST", "/v1/jobs/open/resume").json()
    assert (again["state"], again["message"], again["ended"]) == ("queued", "", None)
    house.recorder.record_state(job["id"], JobState.CANCELLED, "")
    house.refused(409, "POST", "/v1/jobs/open/resume")
    assert house.ask("DELETE", "/v1/jobs/open").status_code == 204
    house.refused(404, "GET", "/v1/jobs/open")
    assert house.ask("POST", "/v1/jobs", json=tiny("open")).json()["id"] != job["id"]


def test_rollouts_can_be_filtered(house: House) -> None:
    def rewards(query: str) -> list[Any]:
        return [one["reward"] for one in house.ask("GET", f"/v1/jobs/ended/rollouts{query}").json()["data"]]

    assert house.ask("GET", "/v1/jobs/ended/rollouts").json()["step"] == 1
    assert rewards("?step=0") == [0.0, 0.5, 1.0, None]
    assert rewards("?min_reward=0.5") == [0.5, 1.0]
    assert rewards("?max_reward=0.5") == [0.0, 0.5]
    assert rewards("?min_reward=0.1&max_reward=0.9&limit=1") == [0.5]


def test_an_empty_answer_about_a_problem_says_which_there_are(house: House) -> None:
    directory = house.storage.job(house.job["id"])
    lines = [{"problem": number // 2, "reward": 0.5} for number in range(60)]
    files = [directory.path / "rollouts" / f"{name}.jsonl" for name in ("0", "eval-1")]
    kept = {file: file.read_bytes() for file in files if file.exists()}
    for name in ("0", "eval-1"):
        directory.write_rollouts(name, lines)

    def note(query: str) -> str:
        answer = house.ask("GET", f"/v1/jobs/ended/rollouts?{query}").json()
        assert bool(answer["note"]) == (not answer["data"])
        return str(answer["note"])

    try:
        assert not note("step=0&problem=3")
        assert note("step=0&problem=99").startswith("row 99 is not among those here: 0, 1, 2, 3, ")
        assert note("step=0&problem=99").endswith("19, …; held-out rows: purpose=eval")
        assert note("step=1&purpose=eval&problem=99").endswith("not held out: purpose=train")
        assert note("step=0&problem=3&min_reward=0.9") == "row 3 has rollouts here, with other rewards"
    finally:
        for file in files:
            file.write_bytes(kept[file]) if file in kept else file.unlink()


def test_rollouts_take_a_tenants_memory_until_they_are_sent(house: House) -> None:
    who, room = house.store.tenants.who(house.keys["ours"]), house.service.open_answers
    assert who is not None
    payer = who.tenant_id
    assert house.ask("GET", "/v1/jobs/ended/rollouts?step=0").is_success
    wait_until(lambda: payer not in inside.taken(room))
    room.take(payer, room.most_of_one)  # of others that a slow client reads
    assert "memory" in house.refused(429, "GET", "/v1/jobs/ended/rollouts?step=0")["message"]
    room.give_back(payer, room.most_of_one)
    assert len(house.ask("GET", "/v1/jobs/ended/rollouts?step=0").json()["data"]) == 4


@pytest.mark.parametrize(("turns", "path"), [("read", "rollouts?step=9"), ("answer", "versions/9/download")])
def test_what_a_job_has_is_looked_up_in_the_turn_of_its_tenant(house: House, turns: str, path: str) -> None:
    who, may = house.store.tenants.who(house.keys["ours"]), threading.Event()
    waiting: ThreadTurns = getattr(house.service, f"{turns}_threads")
    assert who is not None
    directory = house.storage.job(house.job["id"])
    asyncio.run_coroutine_threadsafe(waiting.run(who.tenant_id, may.wait), house.app.state.loop)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(house.ask, "GET", f"/v1/jobs/ended/{path}")
        wait_until(lambda: inside.queued(waiting, who.tenant_id) > 0 or asked.done())
        directory.write_rollouts("9", [{"reward": 0.5}])
        shutil.copytree(directory.version(directory.versions()[-1]), directory.version(9))
        try:
            may.set()
            assert asked.result().is_success
        finally:
            directory.rollout_log(9).unlink()
            shutil.rmtree(directory.version(9))


def test_rollouts_that_are_deleted_while_they_wait_for_their_turn_are_not_there(house: House) -> None:
    who, reading, may = house.store.tenants.who(house.keys["ours"]), house.service.read_threads, threading.Event()
    assert who is not None
    kept = house.storage.job(house.job["id"]).path / "rollouts" / "0.jsonl"
    asyncio.run_coroutine_threadsafe(reading.run(who.tenant_id, may.wait), house.app.state.loop)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(house.refused, 404, "GET", "/v1/jobs/ended/rollouts?step=0")
        wait_until(lambda: inside.queued(reading, who.tenant_id) > 0)
        gone = kept.rename(kept.with_suffix(".gone"))
        may.set()
        assert "step 0 of job 'ended' is not there" in asked.result()["message"]
    gone.rename(kept)


def slow_uploads(
    house: House, threads: ThreadPoolExecutor, n: int, may: threading.Event, path: str = "/v1/files"
) -> list[Future[httpx2.Response]]:
    """Send some, without their lengths, that end when they may."""
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'

    def body() -> Iterator[bytes]:
        yield head
        may.wait(PATIENCE)
        yield ROWS + b"\r\n--x--\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    asked = [threads.submit(house.ask, "POST", path, content=body(), headers=kind, timeout=PATIENCE) for _ in range(n)]
    wait_until(lambda: house.bodies._uploads.total() == n)
    return asked


@pytest.mark.parametrize(
    ("settings", "n", "told_of"),
    [
        ({"http": HttpConfig(waiting_per_tenant=2)}, 2, "2 uploads"),
        ({"max_adapter_mb": 0.01}, 4, "uploads of this tenant take"),
    ],
    ids=["number", "bytes"],
)
def test_few_uploads_of_a_tenant_are_received_at_a_time(
    settings: dict[str, Any], n: int, told_of: str, tmp_path: Path
) -> None:
    may = threading.Event()
    with open_house(tmp_path, **settings) as house, ThreadPoolExecutor(n) as threads:
        try:
            slow = slow_uploads(house, threads, n, may)
            told = house.ask("POST", "/v1/files", files={"file": ("a.jsonl", ROWS)})
            theirs = house.ask("POST", "/v1/files", "theirs", files={"file": ("a.jsonl", ROWS)})
        finally:
            may.set()
        assert (told.status_code, told_of in told.text, theirs.status_code) == (429, True, 201)
        assert [one.result().status_code for one in slow] == [201] * n
        assert house.ask("POST", "/v1/files", files={"file": ("a.jsonl", ROWS)}).is_success


def test_an_open_upload_holds_up_no_smaller_files_and_no_requests(tmp_path: Path) -> None:
    may = threading.Event()
    long = {**tiny("long"), "data": {**tiny("long")["data"], "template": "{prompt}" + "x" * 90_000}}
    with open_house(tmp_path) as house, ThreadPoolExecutor(1) as threads:
        try:
            slow = slow_uploads(house, threads, 1, may, "/v1/adapters")
            file = house.ask("POST", "/v1/files", files={"file": ("a.jsonl", ROWS)})
            job = house.ask("POST", "/v1/jobs", json=long)
        finally:
            may.set()
        assert (file.status_code, job.status_code) == (201, 201), file.text + job.text
        assert slow[0].result().status_code == 400, "no adapter"


def test_few_downloads_of_a_tenant_are_packed_and_not_sent_yet(house: House) -> None:
    who, reading, may = house.store.tenants.who(house.keys["ours"]), house.service.read_threads, threading.Event()
    assert who is not None
    path, packing = "/v1/adapters/brought/download", house.part(Packing)
    asyncio.run_coroutine_threadsafe(reading.run(who.tenant_id, may.wait), house.app.state.loop)
    with ThreadPoolExecutor(MOST_OPEN) as threads:
        asked = [threads.submit(house.ask, "GET", path) for _ in range(MOST_OPEN)]
        try:
            wait_until(lambda: inside.queued(reading, who.tenant_id) == MOST_OPEN)
            told = house.ask("GET", path, timeout=PATIENCE)
        finally:
            may.set()
        assert [one.result().status_code for one in asked] == [200] * MOST_OPEN
    assert (told.status_code, told.headers["retry-after"]) == (429, "5")
    wait_until(lambda: not packing._open)
    assert house.ask("GET", path).is_success


# --- events -----------------------------------------------------------------------------------------------------------------


def streamed(house: House, job: str, start: str | None = None, stop: int | None = None) -> list[tuple[int, Json]]:
    """Events of a stream until it ends, or so many."""
    found: list[tuple[int, Json]] = []
    headers = {"Authorization": f"Bearer {house.keys['ours']}", **({} if start is None else {"Last-Event-ID": start})}
    with house.http.stream("GET", f"/v1/jobs/{job}/events/stream", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        number = -1
        for line in answer.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                found.append((number, json.loads(line[6:])))
                if len(found) == stop:
                    break
    return found


def test_a_stream_told_in_pieces_has_no_gap_and_no_double(house: House) -> None:
    job = house.ask("POST", "/v1/jobs", json=tiny("told")).json()["id"]

    def tell() -> None:
        for step in range(30):
            house.recorder.record_step(job, {"step": step, "loss": 0.0})
            time.sleep(0.01)
        house.recorder.record_state(job, JobState.SUCCEEDED, "")

    telling = threading.Thread(target=tell)
    telling.start()
    found: list[tuple[int, Json]] = []
    while not found or found[-1][1]["data"].get("state") != "succeeded":
        found += streamed(house, job, str(found[-1][0]) if found else None, stop=4)
    telling.join()
    kept = house.ask("GET", f"/v1/jobs/{job}/events").json()["data"]
    assert [event for _, event in found] == kept
    assert [event["data"].get("step") for event in kept] == [None, *range(30), None]
    assert streamed(house, job) == found  # the whole ends by itself
    assert streamed(house, job, str(found[-1][0])) == []  # and so does what comes after the end
    middle = kept[10]["id"]
    assert house.ask("GET", f"/v1/jobs/{job}/events?after={middle}").json()["data"] == kept[11:]


# --- files ------------------------------------------------------------------------------------------------------------------


def test_a_file_cannot_choose_where_it_lies(house: House) -> None:
    directory = house.storage.directory
    beside = set(directory.parent.iterdir())
    for name in ("../../out.jsonl", "/tmp/motet-out.jsonl", "..\\out.jsonl", "a\x00b.jsonl", "é" * 300 + ".JSONL"):
        answer = house.ask("POST", "/v1/files", files={"file": (name, ROWS)})
        assert answer.status_code == 201, answer.text
        file = answer.json()
        (path,) = [path for path in (directory / "files").iterdir() if path.stem == file["id"]]
        assert path.read_bytes() == ROWS
        assert (file["rows"], file["bytes"]) == (2, len(ROWS))
        assert house.ask("DELETE", f"/v1/files/{file['id']}").json() == {
            "id": file["id"],
            "object": "file",
            "deleted": True,
        }
        assert not path.exists()
    assert not Path("/tmp/motet-out.jsonl").exists()
    assert set(directory.parent.iterdir()) == beside
    house.refused(400, "POST", "/v1/files", data={"file": "text"})  # a form of another type


def names(folder: Path) -> set[str]:
    """Of what is in it."""
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


async def cut_off_while_written(house: House, sending: asyncio.Task[Any], folder: Path) -> None:
    """Cancel a request while its row waits for the database, in a thread that cannot be called back."""
    before = names(folder)
    with contextlib.closing(sqlite3.connect(house.storage.directory / "motet.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await until(lambda: not names(folder) <= before)  # its row comes after its file
        await asyncio.sleep(0.5)
        sending.cancel()
        await asyncio.sleep(0.2)
        other.execute("ROLLBACK")
    await asyncio.wait([sending])
    assert sending.cancelled()


def test_an_upload_that_is_cut_off_leaves_a_file_and_its_row(house: House) -> None:
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    folder = house.storage.directory / "files"

    async def form() -> dict[str, Any]:
        return {}

    async def cut_off() -> None:
        request = cast(Request, SimpleNamespace(form=form, receive=asyncio.Event().wait))
        file = UploadFile(io.BytesIO(ROWS), filename="cut.jsonl")
        sending = asyncio.create_task(upload(request, who, house.service, file))
        await cut_off_while_written(house, sending, folder)

    before = {path.stem for path in folder.iterdir()}
    asyncio.run(cut_off())
    listed = {file["id"] for file in house.ask("GET", "/v1/files").json()["data"]}
    (left,) = {path.stem for path in folder.iterdir()} - before
    assert left in listed
    house.ask("DELETE", f"/v1/files/{left}")


def test_an_adapter_that_is_cut_off_leaves_its_files_and_its_row(tmp_path: Path) -> None:
    weights = save({"base_model.model.q_proj.lora_A.weight": np.ones((1, 1), np.float32)})
    members = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}

    async def cut_off(house: House) -> None:
        hosts, who = house.part(Hosts), house.store.tenants.who(house.keys["ours"])
        assert who is not None
        (host,) = hosts.hosts
        host.ready = True
        hosts.there[host.base].set()
        sending = asyncio.create_task(upload_adapter(who, house.service, UploadFile(packed(members)), "cut"))
        await until(lambda: host.asked == 1)
        (key,) = host._open
        for answer in (AdapterExamined(key, 8, 16.0, ["q_proj"]), Answered(key)):
            host._open[key].put_nowait(answer)
        await cut_off_while_written(house, sending, house.storage.adapters)

    with open_house(tmp_path) as house:
        asyncio.run(cut_off(house))
        (listed,) = (one for one in house.ask("GET", "/v1/adapters").json()["data"] if one["name"] == "cut")
        assert (house.service.adapters.path(listed["id"]) / "adapter_config.json").exists()


def packed(members: dict[str, bytes]) -> io.BytesIO:
    """A .tar.gz of these files."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    text.seek(0)
    return text


# --- without keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_a_service_without_keys_stays_on_this_machine(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--no-keys"):
        serve(
            "small", tmp_path / "x", host=host, port=1, database=None, no_keys=True, hub=False,
            config=ServiceConfig(),
        )  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_without_keys_everyone_is_admin_also_many_at_once(tmp_path: Path) -> None:
    with open_house(tmp_path, open_to_all=True) as house:
        answers = at_once(lambda _: httpx2.get(f"{house.http.base_url}/v1/keys", timeout=PATIENCE).status_code, 8)
        assert answers == [200] * 8
        assert house.ask("GET", "/v1/keys", "wrong").status_code == 200


def test_a_service_starts_without_reading_what_describes_its_fields() -> None:
    read = "[name for name in linecache.cache if name.endswith('.py') and 'motet' in name.split('/')]"
    code = "import linecache, motet.service.app; from motet.config import RunConfig"
    code += f"; print({read}, RunConfig.__pydantic_complete__)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["[]", "False"]


def test_a_schema_describes_fields_by_their_docstrings() -> None:
    class Above(Described):
        one: int
        """The first,
        in two lines.
        """
        two: int = Field(2, description="Said by the field.")
        """Not this."""
        three: int = Field(3, validation_alias="Three")
        """By another name."""

    class Below(Above):
        one: int
        four: Above | None = None
        """Another model."""

    assert described(Above)["one"] == "The first,\nin two lines."
    above, below = Above.model_json_schema()["properties"], Below.model_json_schema()["properties"]
    assert [above[name]["description"] for name in above] == [
        "The first,\nin two lines.",
        "Said by the field.",
        "By another name.",
    ]
    assert "description" not in below["one"]
    assert [below[name]["description"] for name in ("Three", "four")] == ["By another name.", "Another model."]


# --- texts that a database cannot keep ----------------------------------------------------------------------------------

NUL, HALF = "\0", "\ud83d"


def test_an_idle_connection_is_kept_longer_than_clients_keep_it(house: House) -> None:
    """One that closes first closes under the request that its client sends just then."""
    assert house.ask("GET", "/v1/jobs").status_code == 200
    wait_until(lambda: bool(house.connections._half))  # a client has the answer before its connection waits again
    kept = [one.timeout_keep_alive for one in list(house.connections._half)]
    assert min(kept) > (httpx2.Limits().keepalive_expiry or math.inf)


@pytest.mark.parametrize("letter", [NUL, HALF], ids=["nul", "half"])
def test_no_body_has_a_text_that_a_database_cannot_keep(house: House, letter: str) -> None:
    """Whatever the route: the text may be a value, a field's name, or deep; one that is cut between two parts is found too."""
    job, json_type = {**tiny("odd"), "sampling": {"stop": ["a" + letter]}}, {"content-type": "application/json"}
    bodies: list[tuple[str, str, Any]] = [
        ("POST", "/v1/jobs", job),
        ("POST", "/v1/submissions", {"jobs": [{"job": job}]}),
        ("POST", "/v1/check", {"text": "a" + letter}),
        ("POST", "/v1/fine_tuning/jobs", {"model": "small", "training_file": "x", "metadata": {letter: "a"}}),
        ("POST", "/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": letter}]}),
        ("POST", "/v1/completions", {"model": "small", "prompt": ["a", {"b": [[letter]]}]}),
        ("PATCH", f"/v1/jobs/{house.job['name']}", {"tags": [letter]}),
        ("POST", "/v1/keys", {"name": letter}),
        ("POST", "/tinker/api/v1/create_session", {"user_metadata": {"a": letter}, "sdk_version": "1"}),
    ]
    for method, path, body in bodies:
        text = json.dumps(body)
        place = text.index(json.dumps(letter)[1:-1]) + 3
        for sent in (text.encode(), iter([text[:place].encode(), text[place:].encode()])):
            error = house.ask(method, path, content=sent, headers=json_type)
            assert error.status_code in (400, 422), (path, error.text)
            assert ("NUL character" if letter == NUL else "surrogate") in error.json()["error"]["message"], error.text
    assert not [one for one in house.ask("GET", "/v1/jobs").json()["data"] if one["name"] == "odd"]
    plain = {"model": "nothing", "messages": [{"role": "user", "content": "C:\\u0000 \\\\u0000 \\ud83d 🎻 \x01"}]}
    assert house.ask("POST", "/v1/chat/completions", json=plain).status_code == 404
    assert house.ask("POST", "/v1/chat/completions", content=json.dumps(plain), headers=json_type).status_code == 404


def test_what_a_worker_sends_has_no_text_that_a_database_cannot_keep() -> None:
    sent = {"results": [{"scores": [1.0, None, "fails: a\0b", {"extra": {HALF: ["x", HALF]}}]}]}
    assert storable(sent) == {"results": [{"scores": [1.0, None, "fails: ab", {"extra": {"?": ["x", "?"]}}]}]}
