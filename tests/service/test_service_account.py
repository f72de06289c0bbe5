"""The account against the clock: the device works for nobody uncharged, by any door, and for nobody without limits left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.openai_requests import JUDGE
from tests.support.service_run import Json, Service, serving, tiny
from tests.support.tenants import CHAT, Tenants, agent_worker, of_agent
from tests.support.tinker_requests import Client
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Of a service for the whole file."""
    with serving(tmp_path_factory.mktemp("account") / "served", keys=True) as service:
        found = Tenants(service)
        yield found
        found.close()


def clock(service: Service) -> float:
    """Seconds that the device worked, by its own clock."""
    found = re.search(r"^motet_device_turns_seconds\S* (\S+)$", service.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def settled(tenants: Tenants) -> tuple[float, dict[str, float]]:
    """The device's clock, and what each tenant was charged, once nothing more is told."""
    seen: list[tuple[float, dict[str, float]]] = [(-1.0, {})]
    while len(seen) < 3 or seen[-1] != seen[-3]:
        time.sleep(1.1)
        charged = {who: line["device_seconds"] for who, line in tenants.used().items() if who}
        seen.append((round(clock(tenants.service), 2), charged))
    return seen[-1]


def gradients(http: httpx2.Client) -> None:
    """Gradients and steps of a client."""
    client = Client(http)
    for _ in range(3):
        client.gradient([200] * 4, 4)
        client.wait(client.step())
    client.finish()


def looks(http: httpx2.Client) -> None:
    """Losses without a gradient."""
    client = Client(http)
    for _ in range(3):
        client.wait(client.gradient([200] * 4, 4, forward_only=True))
    client.finish()


def samples(http: httpx2.Client) -> None:
    """Samples of a client."""
    client = Client(http)
    for one in [client.sample([5, 6, 7], 40, num_samples=4) for _ in range(3)]:
        client.wait(one)
    client.finish()


def scores(http: httpx2.Client) -> None:
    """Logprobs of prompts, and their likeliest tokens."""
    client = Client(http)
    for _ in range(3):
        client.wait(client.sample([5] * 600, 1, prompt_logprobs=True, topk_prompt_logprobs=5))
    client.finish()


def completions(http: httpx2.Client) -> None:
    """Completions, and chat."""
    for path, body in (("completions", {"model": "small", "prompt": "Sort", "n": 8}), ("chat/completions", CHAT)):
        http.post(f"/v1/{path}", json={**body, "max_tokens": 60}).raise_for_status()


def streams(http: httpx2.Client) -> None:
    """The same, streamed."""
    for path, body in (("completions", {"model": "small", "prompt": "Sort", "n": 8}), ("chat/completions", CHAT)):
        http.post(f"/v1/{path}", json={**body, "max_tokens": 60, "stream": True}).raise_for_status()


def judge(http: httpx2.Client) -> None:
    """A model that grades."""
    body = {"grader": JUDGE, "model_sample": "a", "item": {}}
    http.post("/v1/fine_tuning/alpha/graders/run", json=body).raise_for_status()


def job(http: httpx2.Client) -> None:
    """Rollouts, steps, probes and evaluations."""
    wanted = tiny("sort", 4, eval={"every": 1})
    http.post("/v1/jobs", json=wanted).raise_for_status()
    ended(http, "sort")


def rows(http: httpx2.Client) -> None:
    """Steps on rows."""
    wanted = tiny("rows", 4, algorithm={"type": "sft", "rows_per_step": 16})
    del wanted["reward"]
    http.post("/v1/jobs", json=wanted).raise_for_status()
    ended(http, "rows")


def agent(http: httpx2.Client) -> None:
    """An agent's calls."""
    http.post("/v1/jobs", json=of_agent("agent", 2)).raise_for_status()
    with agent_worker(http, "agent", lambda model, path: float(len(asked(model, path)))):
        ended(http, "agent")


def asked(model: httpx2.Client, path: str) -> str:
    """What the model says in an episode."""
    answer = model.post(f"{path}/chat/completions", json={**CHAT, "max_tokens": 20})
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def ended(http: httpx2.Client, name: str) -> None:
    """Wait until a job has succeeded."""
    until = time.monotonic() + PATIENCE
    while (state := http.get(f"/v1/jobs/{name}").json())["state"] not in ("succeeded", "failed", "cancelled"):
        assert time.monotonic() < until, state
        time.sleep(0.1)
    assert state["state"] == "succeeded", state


DOORS: tuple[Callable[[httpx2.Client], None], ...] = (
    gradients, looks, samples, scores, completions, streams, judge, job, rows, agent,
)  # fmt: skip
"""Every way to have the device work."""


@pytest.mark.soak
@pytest.mark.alone
def test_what_tenants_are_charged_is_what_the_device_did(tenants: Tenants) -> None:
    """Tenant by tenant: while one works, its account grows with the device's clock, and nobody else's does."""
    for door in DOORS:
        who = door.__name__
        begun, before = settled(tenants)
        door(tenants.http(who))
        clocked, charged = settled(tenants)
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in charged.items()}
        mine, others = spent.pop(who), sum(spent.values())
        print(who, round(mine, 3), round(others, 3), round(clocked - begun, 3))
        assert mine > 0
        assert mine == pytest.approx(clocked - begun, rel=0.02, abs=0.03)
        assert others == pytest.approx(0.0, abs=0.03)


SPENT = {"tokens_per_day": 1, "device_seconds_per_day": 0.001}


def refused(answer: httpx2.Response, limit: str) -> None:
    """It names the limit and when to come back."""
    assert (answer.status_code, limit in answer.text) == (429, True), (limit, answer.text)
    assert int(answer.headers["retry-after"]) > 0


def charged(tenants: Tenants, who: str) -> float:
    """Seconds of the device that a tenant was charged; what it did last is told within three seconds."""
    time.sleep(4.0)
    return float(tenants.used()[who]["device_seconds"])


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("limit", SPENT)
def test_who_has_nothing_left_of_the_day_gets_nothing_more_of_the_device(tenants: Tenants, limit: str) -> None:
    """Doors that answer at once refuse; what waits, waits: samples, gradients, jobs, and episodes that an agent has open."""
    who = f"spent-{limit[:6]}"
    http, service = tenants.http(who), tenants.service
    client = Client(http)
    client.wait(client.gradient([9]))
    http.post("/v1/jobs", json=of_agent("agent", 50)).raise_for_status()
    path, lease = "/v1/jobs/agent/work/episodes", {"worker": "by-hand", "most": 1, "wait_seconds": 20}
    episodes = http.post(f"{path}/lease", json=lease).raise_for_status().json()["units"]
    with httpx2.Client(base_url=service.url, timeout=PATIENCE, trust_env=False) as model:
        model.headers["Authorization"] = f"Bearer {episodes[0]['key']}"
        assert asked(model, episodes[0]["path"])
        tenants.limit(who, **{limit: SPENT[limit]})
        service.until(lambda: "spent" in (http.get(f"/v1/jobs/{client.job}").json()["message"] or ""))
        with agent_worker(http, "agent", lambda model, path: float(len(asked(model, path)))):  # of the step under way
            results = [{"id": one["id"], "reward": 1.0} for one in episodes]
            http.post(f"{path}/results", json={"results": results}).raise_for_status()
            service.until(lambda: http.get("/v1/jobs/agent").json()["state"] == "paused", PATIENCE)
        assert http.post(f"{path}/lease", json={**lease, "wait_seconds": 0}).json()["units"] == []
        for route in ("chat/completions", "responses", "messages"):
            body = {**CHAT, "max_tokens": 4, "input": "a"}
            assert model.post(f"{episodes[0]['path']}/{route}", json=body).status_code == 404, route

    before = charged(tenants, who)
    for stream in (False, True):
        refused(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}), limit)
        refused(http.post("/v1/completions", json={"model": "small", "prompt": "a", "stream": stream}), limit)
    refused(
        http.post("/v1/fine_tuning/alpha/graders/run", json={"grader": JUDGE, "model_sample": "a", "item": {}}), limit
    )
    refused(http.post("/v1/jobs/agent/resume"), limit)
    http.post("/v1/jobs", json=tiny("held", eval={"every": 1})).raise_for_status()
    waiting = [client.sample([5, 6], 4), client.sample([5, 6], 1, prompt_logprobs=True)]
    for only in (False, True):
        answer = client.send_gradient([9], forward_only=only)
        assert answer.status_code in ((403,) if limit == "tokens_per_day" else (200,)), answer.text
        waiting += [answer.json()["request_id"]] if answer.is_success else []
    waiting.append(client.step())
    assert charged(tenants, who) == before, "the device worked for it"

    def wait(future: str) -> Json:
        found: Json = http.post("/tinker/api/v1/retrieve_future", json={"request_id": future}).json()
        return found

    with ThreadPoolExecutor(len(waiting)) as threads:  # each waits for a while
        for said in threads.map(wait, waiting):
            assert (said["type"], said["queue_state"]) == ("try_again", "paused_rate_limit"), said
    for future in waiting:
        client.cancel(future)
    for name in ("held", "agent", client.job):
        http.post(f"/v1/jobs/{name}/cancel").raise_for_status()
