"""What pictures of jobs are drawn from: thinned steps, events of all jobs, job texts, tokens; and the page's files."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import motet
from motet.chat.template import Chat
from motet.core.errors import ConfigError
from motet.core.types import JobState
from motet.service.bases import Bases
from motet.service.database.tables import Event
from motet.service.events import EventBus, EventLog, within
from motet.service.jobs.validation import read_jobs
from motet.service.routes.events import READS_PER_SECOND
from tests.support.house import House
from tests.support.service_run import ROWS, Json, tiny
from tests.support.waiting import PATIENCE

MANY = 50
"""More streams than threads of the event loop."""

# --- steps ------------------------------------------------------------------------------------------------------------------


def told_job(house: House, name: str, steps: int) -> str:
    """A job of `ours` that has told so many steps and the last evaluation."""
    job = str(house.ask("POST", "/v1/jobs", json=tiny(name)).json()["id"])
    for step in range(steps):
        line = {"step": step, "loss": 0.0, "reward": step / steps, "entropy": 1.0}
        house.recorder.record_step(job, {**line, "eval": {"reward": 0.5}} if step == 7 else line)
    house.recorder.record_step(job, {"step": steps, "eval": {"reward": 0.9}})
    return job


def test_steps_are_thinned_and_evaluations_stay(house: House) -> None:
    job = told_job(house, "thinned", 100)
    whole = house.ask("GET", f"/v1/jobs/{job}/steps").json()
    assert [line["step"] for line in whole["data"]] == list(range(101))
    thin = house.ask("GET", f"/v1/jobs/{job}/steps?points=10").json()
    assert [line["step"] for line in thin["data"]] == [0, 7, 11, 22, 33, 44, 55, 66, 77, 88, 99, 100]
    assert thin["data"][-1]["eval"] == {"reward": 0.9}
    few = house.ask("GET", f"/v1/jobs/{job}/steps?field=reward&field=nothing&points=10").json()["data"]
    assert few[2] == {"step": 11, "reward": 0.11}


def test_long_answers_are_not_encoded_in_the_event_loop(house: House) -> None:
    job = told_job(house, "long", 2)
    values = {f"field-{number}": number / 7 for number in range(200)} | {"nothing": math.nan}
    with house.store.transaction() as session:
        session.add_all(Event(job_id=job, kind="step", key=str(n), data={"step": n, **values}) for n in range(3, 2000))

    async def clock() -> float:
        return time.thread_time()

    def spent(path: str) -> tuple[float, Any]:
        """The loop's CPU time for an answer, and what it says."""
        before, answer, after = (
            asyncio.run_coroutine_threadsafe(clock(), house.app.state.loop).result(),
            house.ask("GET", path),
            asyncio.run_coroutine_threadsafe(clock(), house.app.state.loop).result(),
        )
        return after - before, answer.json()

    for path, rows in ((f"/v1/jobs/{job}/steps?points=5000", 2000), (f"/v1/jobs/{job}/events?after=1", 500)):
        cpu, found = spent(path)
        assert len(found["data"]) == rows
        last = found["data"][-1]
        assert (last.get("data") or last)["nothing"] is None
        assert cpu < 0.05, path


def test_events_go_on_where_the_steps_end(house: House) -> None:
    job = told_job(house, "going-on", 3)
    after = house.ask("GET", f"/v1/jobs/{job}/steps?field=reward").json()["after"]
    assert after == house.ask("GET", f"/v1/jobs/{job}/events").json()["data"][-1]["id"]
    house.recorder.record_state(job, JobState.PAUSED, "")
    (event,) = house.ask("GET", f"/v1/jobs/{job}/events?after={after}").json()["data"]
    assert event["data"]["state"] == "paused"


# --- events of all jobs -----------------------------------------------------------------------------------------------------


def heard(house: House, key: str, start: int | None, wanted: int, begun: threading.Event | None = None) -> list[Json]:
    """So many events of the stream of all jobs; `begun` is set when it can miss none that comes."""
    found: list[Json] = []
    headers = {"Authorization": f"Bearer {house.keys[key]}"} | ({} if start is None else {"Last-Event-ID": str(start)})
    with house.http.stream("GET", "/v1/events/stream", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        number = ""
        for line in answer.iter_lines():
            number = line[4:] if line.startswith("id: ") else number
            if begun is not None:
                begun.set()
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                assert found[-1]["id"] == int(number)
                if len(found) == wanted:
                    break
    return found


def test_one_stream_tells_of_all_jobs_of_a_tenant_and_of_no_other(house: House) -> None:
    start = house.ask("GET", f"/v1/jobs/{told_job(house, 'before', 1)}/steps").json()["after"]
    first = told_job(house, "first", 2)
    theirs = house.ask("POST", "/v1/jobs", "theirs", json=tiny("secret")).json()["id"]
    house.recorder.record_step(theirs, {"step": 0, "loss": 0.0})
    second = told_job(house, "second", 1)
    found = heard(house, "ours", start, 7)
    assert [event["job"] for event in found] == [first] * 4 + [second] * 3
    assert [event["kind"] for event in found[:4]] == ["state", "step", "step", "step"]
    assert {event["job"] for event in heard(house, "admin", start, 9)} == {first, second, theirs}
    assert [event["job"] for event in heard(house, "theirs", start, 2)] == [theirs, theirs]


def test_the_stream_tells_at_once_and_begins_now(house: House) -> None:
    job = told_job(house, "quick", 1)
    newest = house.ask("GET", f"/v1/jobs/{job}/steps").json()["after"]
    headers = {"Authorization": f"Bearer {house.keys['ours']}"}
    with house.http.stream("GET", "/v1/events/stream", headers=headers) as answer:
        assert next(answer.iter_lines()) == f"id: {newest}"  # where to go on if the connection is lost now
    started = time.monotonic()
    with house.http.stream("GET", "/v1/events/stream", headers=headers) as answer:
        lines = answer.iter_lines()
        for step in range(20):
            house.recorder.record_step(job, {"step": 2 + step, "loss": 0.0})
            while not next(lines).startswith("data: "):  # twenty looks without being told would take five minutes
                assert time.monotonic() - started < PATIENCE
    assert time.monotonic() - started < PATIENCE


def test_the_log_gives_the_same_from_memory_and_from_the_database(house: House) -> None:
    who = house.store.tenants.who(house.keys["ours"])
    assert who is not None
    log = EventLog(house.store, house.part(EventBus), most=5)
    start = house.ask("GET", f"/v1/jobs/{told_job(house, 'old', 1)}/steps").json()["after"]
    assert log.since(who, start, 100) == []
    for round_ in range(4):
        told_job(house, f"new-{round_}", 1 + round_)
        found = log.since(who, start, 100)
        assert [one.id for one in found] == list(range(start + 1, found[-1].id + 1))
        assert len(found) == sum(3 + before for before in range(round_ + 1))
        for after in range(start, found[-1].id + 1):
            assert log.since(who, after, 100) == [one for one in found if one.id > after]
    assert [one.id for one in log.since(who, start, 2)] == [start + 1, start + 2]
    house.ask("POST", "/v1/jobs", "theirs", json=tiny("unseen"))
    assert log.since(who, found[-1].id, 100) == []
    admin = house.store.tenants.who(house.keys["admin"])
    assert admin is not None
    assert len(log.since(admin, found[-1].id, 100)) == 1


def test_whoever_begins_to_wait_while_the_service_stops_is_woken() -> None:
    """A stream checks whether the service stops, then whether its client is there, and only then waits for an event."""

    async def waits() -> bool:
        bus = EventBus()
        bus.close()
        await within(bus.next("a job"), 2 * PATIENCE)
        return bus.next("a job").is_set()

    started = time.monotonic()
    assert asyncio.run(waits())
    assert time.monotonic() - started < PATIENCE


# --- job texts --------------------------------------------------------------------------------------------------------------


def check(house: House, text: str) -> list[Json]:
    """The jobs that a text holds."""
    found: list[Json] = house.ask("POST", "/v1/check", json={"text": text}).json()["jobs"]
    return found


def test_a_job_text_is_read_as_motet_submit_reads_it(house: House) -> None:
    before = house.store.counts()
    (one,) = check(house, "name: a\ndata: toy:add\nreward: exact\n")
    assert one == {"name": "a", "data": "toy:add", "reward": "exact"}
    assert check(house, json.dumps(one)) == [one]
    defaults = "base: small\ndefaults: {steps: 7, data: 'toy:add', reward: exact}\n"
    text = f"{defaults}sweep: {{adapter.rank: [4, 8]}}\njobs: [{{name: b}}, {{name: c}}]"
    found = check(house, text)
    assert [job["name"] for job in found] == ["b-rank=4", "b-rank=8", "c-rank=4", "c-rank=8"]
    assert {job["steps"] for job in found} == {7}
    assert house.store.counts() == before
    assert house.ask("POST", "/v1/jobs", json=found[0]).status_code == 201


@pytest.mark.parametrize("opened", ["[", "{a: ", "- ", "? ", "[[a, "])
def test_a_text_of_many_lists_in_each_other_takes_no_time(opened: str) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError, match="more than 32 deep"):
        read_jobs("x: " * opened.startswith("[") + opened * 20_000, Bases({"small": "small"}))
    assert time.process_time() - started < 2


def test_a_text_that_means_much_by_naming_it_again_is_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 6)]
    started = time.process_time()
    with pytest.raises(ConfigError, match="aliases"):
        read_jobs("\n".join(lines), Bases({"small": "small"}))
    assert time.process_time() - started < 2


def test_the_client_asks_for_steps_tokens_and_checks(house: House) -> None:
    job = told_job(house, "asked", 3)
    with motet.Client(str(house.http.base_url), house.keys["ours"]) as client:
        assert client.steps(job, ["reward"])[1] == {"step": 1, "reward": 1 / 3}
        assert client.steps("asked")[2]["entropy"] == 1.0
        assert client.check("{name: a, data: 'toy:add', reward: exact}") == [
            {"name": "a", "data": "toy:add", "reward": "exact"}
        ]
        assert client.rollouts("ended", step=0, tokens=True).data[0]["reward"] == 0.0
        with pytest.raises(motet.core.errors.ServiceError, match="no evaluation"):
            client.rollouts("asked", purpose="eval")


# --- rollouts ---------------------------------------------------------------------------------------------------------------


def test_rollouts_of_a_problem_an_evaluation_and_with_tokens(house: House) -> None:
    directory = house.storage.job(house.job["id"])
    lines = [
        {"problem": problem, "reward": 1.0, "token_texts": ["a", "b"], "logprobs": [-0.5, None]} for problem in (3, 4)
    ]
    for_replay = {"trained_on": {"error": "/the/path/of/the/service"}, "sums": {"reward": "0" * 8}}
    directory.write_rollouts("eval-2", [{**line, **for_replay} for line in lines])
    path = "/v1/jobs/ended/rollouts?purpose=eval"
    found = house.ask("GET", path).json()
    assert (found["step"], found["steps"]) == (2, [2])
    assert found["data"] == [{"problem": 3, "reward": 1.0}, {"problem": 4, "reward": 1.0}]
    assert house.ask("GET", f"{path}&problem=4&tokens=true").json()["data"] == lines[1:]
    assert house.ask("GET", "/v1/jobs/ended/rollouts").json()["steps"] == [0, 1]
    assert "the evaluation of version 9" in house.refused(404, "GET", f"{path}&step=9")["message"]
    started = house.ask("POST", "/v1/jobs", json=tiny("young")).json()["id"]
    assert "no evaluation" in house.refused(404, "GET", f"/v1/jobs/{started}/rollouts?purpose=eval")["message"]


@pytest.mark.parametrize(
    "text", ["The answer is 42.\n", " two  spaces ", "naïve → 🐈‍⬛ 漢字", "<|im_start|>x<|im_end|>", ""]
)
def test_token_texts_together_are_the_text(small_base_dir: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_base_dir)
    chat = Chat(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = chat.token_texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert chat.token_texts(ids) == texts  # also from what it remembers


# --- the page's files -------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_allows_nothing_from_elsewhere(house: House) -> None:
    page = httpx2.get(f"{house.http.base_url}/", trust_env=False, timeout=PATIENCE)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {"'self'"} == {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")}
    assert not [word for word in ("http", "unsafe", "*", "data:") if word in page.headers["content-security-policy"]]
    for word in ("<script>", "style=", "onclick", "http:", "https:"):
        assert word not in page.text
    assert (
        httpx2.get(f"{house.http.base_url}/dashboard/service.json", trust_env=False, timeout=PATIENCE).json()["keys"]
        is True
    )


def test_only_the_files_of_the_page_are_served_and_only_when_they_changed(house: House) -> None:
    for name in ("../app.py", "..%2Fapp.py", "%2e%2e/storage.py", "", "x", "index.html%00", ".", "__init__.py"):
        assert house.ask("GET", f"/dashboard/{name}", "none").status_code in (404, 422), name
    style = house.ask("GET", "/dashboard/base.css", "none")
    assert style.headers["content-type"].startswith("text/css")
    again = house.ask("GET", "/dashboard/base.css", "none", headers={"If-None-Match": style.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    with house.http.stream("GET", "/dashboard/plotly.js", headers={"Accept-Encoding": "gzip"}) as answer:
        packed = b"".join(answer.iter_raw())
    assert len(packed) < 2e6
    assert b"plotly.js v" in gzip.decompress(packed)[:200]
    assert b'createElement("style")' not in gzip.decompress(packed)


def test_streams_of_a_tenant_hold_up_nobody_else_however_many_read(house: House) -> None:
    headers, opened = {"Authorization": f"Bearer {house.keys['ours']}"}, threading.Semaphore(0)

    def watch() -> None:
        with house.http.stream("GET", "/v1/events/stream", headers=headers, timeout=PATIENCE) as answer:
            next(answer.iter_lines())
            opened.release()

    with ThreadPoolExecutor(MANY) as threads:
        with house.service.log._lock:  # as long as all of them read
            watching = [threads.submit(watch) for _ in range(MANY)]
            for _ in watching:
                assert opened.acquire(timeout=PATIENCE)
            answer = house.ask("POST", "/v1/files", "theirs", files={"file": ("a.jsonl", ROWS)}, timeout=PATIENCE)
        assert answer.is_success, answer.text


def test_many_streams_of_a_tenant_read_seldom_and_miss_nothing(house: House) -> None:
    job, headers = told_job(house, "paced", 1), {"Authorization": f"Bearer {house.keys['ours']}"}
    opened, pieces = threading.Semaphore(0), Counter[int]()

    def watch(number: int) -> set[int]:
        found = ""
        with house.http.stream("GET", "/v1/events/stream", headers=headers, timeout=PATIENCE) as answer:
            for text in answer.iter_text():
                opened.release()
                found, pieces[number] = found + text, pieces[number] + 1
                if '"step":99' in found:
                    break
        return {json.loads(line[6:])["data"]["step"] for line in found.splitlines() if line.startswith("data: ")}

    with ThreadPoolExecutor(MANY) as threads:
        watching = [threads.submit(watch, number) for number in range(MANY)]
        for _ in watching:
            assert opened.acquire(timeout=PATIENCE)
        started = time.monotonic()
        for step in range(2, 100):
            house.recorder.record_step(job, {"step": step, "loss": 0.0})
            time.sleep(0.02)
        assert all(one.result(PATIENCE) == set(range(2, 100)) for one in watching)
        seconds = time.monotonic() - started
    assert pieces.total() < 2 * MANY + 1.3 * READS_PER_SECOND * seconds
