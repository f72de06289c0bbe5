"""Limits, budgets and usage of `motet serve` with its engine: what is counted is what was done, once, whatever dies."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from motet.service.tinker.parts import PREFIX
from tests.support.commands import Motet
from tests.support.service_run import ENGINE, FINAL, LASTING, Json, Service, serving, tiny
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that is up for the whole file; steps are cut soon."""
    place = tmp_path_factory.mktemp("usage")
    (place / "serve.yaml").write_text(f"{ENGINE}\nstep_seconds: 0.2\n")
    with serving(place / "served", "--config", str(place / "serve.yaml")) as found:
        yield found


def used(service: Service, job: str) -> Json:
    """The ledger's line of a job."""
    (line,) = [one for one in service.ask("GET", "/v1/usage")["data"] if one["name"] == job]
    found: Json = line
    return found


def tokens(line: Json) -> tuple[int, int]:
    """Sampled and trained."""
    return line["tokens_sampled"], line["tokens_trained"]


def committed(service: Service, job: str) -> tuple[int, int]:
    """What the job itself knows."""
    states = service.directory / "run" / service.job(job)["id"] / "state"
    newest = max(states.iterdir(), key=lambda path: int(path.name))
    found: Json = json.loads((newest / "state.json").read_text())
    return tokens(found)


def test_usage_is_what_the_jobs_did_and_all_of_the_time(service: Service) -> None:
    for name in ("long", "short"):
        service.submit(tiny(name, 4 if name == "short" else 12))
    assert [service.ended(name) for name in ("long", "short")] == ["succeeded"] * 2
    assert tokens(used(service, "long")) == committed(service, "long")
    assert tokens(used(service, "short")) == committed(service, "short")
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any") as client:
        told = client.chat.completions.create(
            model="short@latest", messages=[{"role": "user", "content": "abc"}], max_tokens=9, n=2
        ).usage
    assert told is not None

    def completions() -> list[Json]:
        return [one for one in service.ask("GET", "/v1/usage")["data"] if one["kind"] == "completions"]

    service.until(lambda: bool(completions()) and completions()[0]["device_seconds"] > 0)
    service.until(lambda: completions()[0]["tokens_sampled"] == told.completion_tokens)
    assert completions()[0]["tokens_prompt"] == told.prompt_tokens
    lines = service.ask("GET", "/v1/usage")["data"]
    seconds = {one["name"] or one["kind"]: one["device_seconds"] for one in lines}
    assert seconds["long"] > seconds["short"] > 0

    def figures() -> tuple[float, float]:
        """The seconds that were charged, and those of the device's own clock, once neither rises."""
        seen = list[tuple[float, float]]()

        def settled() -> bool:
            charged = [
                one["device_seconds"] for one in service.ask("GET", "/v1/usage")["data"] if one["kind"] != "idle"
            ]
            clock = re.search(r"^motet_device_turns_seconds\S* (\S+)$", service.get("/metrics").text, re.M)
            seen.append((sum(charged), float(clock[1]) if clock is not None else 0.0))
            return len(seen) > 30 and len(set(seen[-30:])) == 1

        service.until(settled)
        return seen[-1]

    before = 0.0, 0.0
    for number in range(12):  # a busy machine may stop the device between two things that it does
        now = figures()
        charged, clock = (after - then for after, then in zip(now, before, strict=True))
        if charged == pytest.approx(clock, rel=0.05):
            return
        before = now
        service.submit(tiny(name := f"again-{number}", 4))
        assert service.ended(name) == "succeeded"
    pytest.fail("all of the time is never charged")


def test_open_answers_are_charged_as_they_are_sampled_and_once_where_they_are_repeated(service: Service) -> None:
    """Nothing is streamed. A sample is repeated when the engine dies."""

    def charged() -> Counter[str]:
        lines = [one for one in service.ask("GET", "/v1/usage")["data"] if one["kind"] == "completions"]
        return Counter({kind: sum(one[kind] for one in lines) for kind in ("tokens_prompt", "tokens_sampled")})

    def begun(rows: int = 16) -> tuple[Counter[str], Counter[str], str]:
        """What was charged before a sample that is not done, what it will cost, and its id."""
        assert rows < 1000, "nothing is charged before the end"
        before, whole = charged(), Counter(tokens_prompt=3, tokens_sampled=rows * 1000)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 16, 27]}]}
        asked = {"base_model": "small", "num_samples": rows, "prompt": prompt}
        asked |= {"sampling_params": {"max_tokens": 1000, "stop": []}}
        promise = service.ask("POST", f"{PREFIX}/asample", json=asked)["request_id"]
        service.until(lambda: charged()["tokens_sampled"] > before["tokens_sampled"])
        if charged() - before < whole:
            return before, whole, promise
        return begun(4 * rows)  # usage is stored once a second, and this machine is fast

    before, whole, promise = begun()  # no answer of an earlier test is open
    service.engine().kill()
    poll = functools.partial(httpx2.post, f"{service.url}{PREFIX}/retrieve_future", timeout=PATIENCE, trust_env=False)
    service.until(lambda: b"try_again" not in poll(json={"request_id": promise}).content)
    service.until(lambda: charged() - before >= whole)
    assert charged() - before == whole
    begun()
    counted = charged()
    service.http().kill()
    service.until(lambda: service.answers("/readyz"))
    assert charged() >= counted


def test_prompts_of_a_job_are_charged_those_of_held_out_rows_too(service: Service) -> None:
    """Each group's once, however many completions it has; held-out rows are read before the first step and after the last."""

    def read(name: str) -> int:
        return sum(one["tokens_prompt"] for one in service.ask("GET", "/v1/usage")["data"] if one["name"] == name)

    for name, n, held_out in (("few", 4, 4), ("many", 8, 4), ("held-out", 4, 24)):
        fields = {"data": {"source": "toy:sort_letters", "size": 64, "holdout": held_out}, "eval": {"every": 0, "n": 2}}
        service.submit(tiny(name, 1, **fields, algorithm={"group_size": n, "groups_per_step": 2}))
        assert service.ended(name) == "succeeded"
        service.until(lambda name=name, held_out=held_out: read(name) == 20 * (2 + 2 * held_out))  # type: ignore[misc]


def test_tokens_of_an_answer_that_nobody_waits_for_are_counted(service: Service) -> None:
    """The chat is not streamed: the service has no token of it before its end."""

    def sampled() -> int:
        return sum(one["tokens_sampled"] for one in service.ask("GET", "/v1/usage")["data"] if not one["job"])

    before = sampled()
    asked = {"model": "small", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2000, "n": 16}
    asked |= {"response_format": {"type": "json_object"}, "temperature": 2}

    seconds = 1.0

    def counted_after_leaving() -> bool:
        """A slow machine may have sampled nothing when the first client leaves: each is more patient than the last."""
        nonlocal seconds
        with contextlib.suppress(httpx2.ReadTimeout):
            httpx2.post(f"{service.url}/v1/chat/completions", json=asked, timeout=seconds, trust_env=False)
        seconds *= 1.5
        return sampled() > before

    service.until(counted_after_leaving)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 3])
def test_a_crash_counts_no_token_twice_and_loses_none(service: Service, kills: int) -> None:
    name, calm = f"killed-{kills}", {**tiny(f"calm-{kills}", 10), "seed": 5, "checkpoint": {"every": 4}}
    service.submit(calm)
    assert service.ended(calm["name"]) == "succeeded"
    service.submit({**calm, "name": name})
    for step in (2, 5, 7)[:kills]:
        service.reaches(name, step)
        if step == 5:
            service.kill()
            service.start()
        else:
            service.engine().kill()
    assert service.ended(name) == "succeeded"
    crashed = tokens(used(service, name))
    assert crashed == committed(service, name)
    assert crashed == tokens(used(service, calm["name"]))


def test_steps_that_were_told_after_a_crash_have_their_tokens(service: Service) -> None:
    """The database is older than the commits; steps are told from these, with what they cost, and none is charged twice."""
    service.submit(tiny("lost", 60))
    service.reaches("lost", 3)
    older = sqlite3.connect(":memory:")
    with contextlib.closing(older), contextlib.closing(sqlite3.connect(service.directory / "motet.db")) as database:
        database.backup(older)  # all that the ledger knew at one moment, also of a step that had begun
        before = service.job("lost")["step"]
        service.reaches("lost", before + 2)
        service.kill()
        older.backup(database)
    service.start()
    assert service.ended("lost") == "succeeded"  # a job that is cancelled has also paid for its open step
    found = [event["data"] for event in service.events("lost") if event["kind"] == "step"]
    assert [one["step"] for one in found] == list(range(len(found)))
    assert found[before]["tokens_trained"] > 0
    sums = tuple(sum(one[name] for one in found) for name in ("tokens_sampled", "tokens_trained"))
    assert tokens(used(service, "lost")) == sums == committed(service, "lost")


def test_a_budget_pauses_a_job_and_a_larger_one_lets_it_go_on(service: Service) -> None:
    service.submit({**tiny("whole", 8), "seed": 3})
    assert service.ended("whole") == "succeeded"
    sampled, trained = committed(service, "whole")
    budget = (sampled + trained) // 2
    service.submit({**tiny("paid", 8), "seed": 3, "budget": budget})
    paused = service.becomes("paid", "paused", "succeeded")
    assert (paused["state"], 0 < paused["step"] < 8) == ("paused", True)
    assert f"its budget of {budget} tokens is spent" in paused["message"]
    assert sum(tokens(used(service, "paid"))) >= budget
    assert service._http.post("/v1/jobs/paid/resume").status_code == 409
    service.ask("PATCH", "/v1/jobs/paid", json={"budget": 10 * budget})
    service.steer("paid", "resume")
    assert service.ended("paid") == "succeeded"
    assert service.weights("paid") == service.weights("whole")


def test_a_day_that_is_spent_holds_the_tenant_until_the_limit_is_raised(service: Service) -> None:
    used_today = service.ask("GET", "/v1/limits")["tokens_today"]
    service.submit(tiny("daily", LASTING))
    service.reaches("daily", 1)
    service.ask("PUT", "/v1/tenants/local/limits", json={"tokens_per_day": used_today + 1})
    held = service.becomes("daily", "paused")
    assert "tokens_per_day" in held["message"]
    assert "00:00 UTC" in held["message"]
    service.submit(tiny("later", 2))
    assert "tokens_per_day" in service.becomes("later", "paused")["message"]
    assert service._http.post("/v1/jobs/daily/resume").status_code == 429
    service.engine().kill()  # the next one hears of it with the jobs
    service.until(lambda: service.answers("/readyz"))
    assert service.job("daily")["state"] == "paused"
    service.ask("PUT", "/v1/tenants/local/limits", json={})
    assert service.ended("later") == "succeeded"
    service.reaches("daily", held["step"] + 1)
    service.steer("daily", "cancel")


def test_a_long_step_is_charged_while_it_lasts_and_a_limit_cuts_it_without_changing_a_byte(service: Service) -> None:
    long = {**tiny("undisturbed", 1), "seed": 7, "sampling": {"max_tokens": 24}}
    long |= {"algorithm": {"group_size": 8, "groups_per_step": 288}, "eval": {"every": 0}}
    service.submit(long)
    assert service.ended("undisturbed") == "succeeded"

    def one_more() -> None:
        """The next token that is charged ends what the tenant may use today."""
        used_today = service.ask("GET", "/v1/limits")["tokens_today"]
        service.ask("PUT", "/v1/tenants/local/limits", json={"tokens_per_day": used_today + 1})

    one_more()
    service.submit({**long, "name": "cut"})
    cuts = 0
    while (held := service.becomes("cut", "paused", *FINAL))["state"] == "paused":
        assert "tokens_per_day" in held["message"]
        cuts += held["step"] == 0
        one_more()
    service.ask("PUT", "/v1/tenants/local/limits", json={})
    assert service.ended("cut") == "succeeded"
    assert cuts, "the test of cuts never saw one"
    assert service.weights("cut") == service.weights("undisturbed")
    (sampled, trained), once = tokens(used(service, "cut")), committed(service, "cut")
    assert sampled > once[0], "what was sampled for a step that was dropped is charged too"
    assert (trained, once) == (once[1], committed(service, "undisturbed"))


def test_running_jobs_of_a_tenant_are_limited(service: Service) -> None:
    service.ask("PUT", "/v1/tenants/local/limits", json={"running_jobs": 1})
    names = ["one", "two", "three"]
    for name in names:
        service.submit(tiny(name, 3))
    seen: list[int] = []

    def all_ended() -> bool:
        jobs = service.ask("GET", "/v1/jobs")["data"]  # all at one moment: one may end while the next is asked for
        states = [job["state"] for job in jobs if job["name"] in names]
        seen.append(states.count("running"))
        return all(state == "succeeded" for state in states)

    service.until(all_ended)
    assert max(seen) == 1
    service.ask("PUT", "/v1/tenants/local/limits", json={})


def test_usage_and_tenants_from_the_command_line(service: Service, monkeypatch: Any, says: Motet) -> None:
    monkeypatch.setenv("MOTET_URL", service.url)
    monkeypatch.setenv("COLUMNS", "160")
    service.submit(tiny("counted", 2))
    assert service.ended("counted") == "succeeded"
    assert "counted" in says("usage")[1]
    code, out, _ = says("usage", "--by", "day", "--by", "job", "--csv")
    assert (code, out.splitlines()[0].split(",")[:4]) == (0, ["day", "tenant", "job", "name"])
    found = json.loads(says("usage", "--json")[1])
    assert [one["tokens_trained"] for one in found if one["name"] == "counted"] == [committed(service, "counted")[1]]
    code, out, _ = says("tenants", "limit", "local", "--running-jobs", "3", "--storage-mb", "100", "--priority", "high")
    assert (code, "running_jobs 3" in out) == (0, True)
    assert "running_jobs none" in says("tenants", "limit", "local", "--running-jobs", "none")[1]
    (local,) = json.loads(says("tenants", "ls", "--json")[1])
    assert (local["limits"]["running_jobs"], sorted(local["own"])) == (None, ["priority", "running_jobs", "storage_mb"])
    assert "local" in says("tenants", "ls")[1]
    for name in ("running-jobs", "storage-mb", "priority"):
        assert says("tenants", "limit", "local", f"--{name}", "default")[0] == 0
    assert json.loads(says("tenants", "ls", "--json")[1])[0]["own"] == []
    for words in (("limit", "local"), ("limit", "nobody", "--rank", "3"), ("limit", "local", "--rank", "many")):
        code, _, err = says("tenants", *words)
        assert (code, err.startswith("motet: ")) == (2, True)
    service.submit({**tiny("poor", 6), "budget": 1})
    service.becomes("poor", "paused")
    assert says("resume", "poor")[0] == 2
    assert says("resume", "poor", "--budget", "1000000")[0] == 0
    assert service.ended("poor") == "succeeded"


def test_all_lines_sum_to_the_time_that_the_engine_was_up(service: Service) -> None:
    """The last test of the file: the service stops, and its ledger says what was done since the test began."""

    def seconds() -> dict[str, float]:
        """Of each job, and of nobody."""
        with contextlib.closing(sqlite3.connect(service.directory / "motet.db")) as database:
            spent: Counter[str] = Counter()
            for name, tenant, microseconds in database.execute("SELECT job_name, tenant_id, microseconds FROM usage"):
                spent[name or ("completions" if tenant else "idle")] += microseconds
        return {line: microseconds / 1e6 for line, microseconds in spent.items()}

    before, began = seconds(), time.monotonic()
    service.submit(tiny("timed", 3))
    assert service.ended("timed") == "succeeded"
    least = time.monotonic() - began
    service.terminate()
    most = time.monotonic() - began
    used = {line: spent - before.get(line, 0.0) for line, spent in seconds().items()}
    assert least - 1 <= sum(used.values()) <= most + 6  # some was not told when it began, and it takes a while to stop
    assert used["idle"] > 0
    assert used.get("completions", 0.0) == 0
    assert 0.02 * least < used["timed"] <= sum(used.values())
