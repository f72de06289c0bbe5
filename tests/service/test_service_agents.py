"""Agents on a machine of their owner's, with a real service: what they make, what is refused, and workers that die."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import motet
from tests.support.processes import ending
from tests.support.service_run import Json, Service, serving
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

CONFIG = """
engine: {samplers: 0, threads: 1, slots: 1, dtype: float32}
lease_seconds: 5
patience_seconds: 2
rewards: {spoken: 'rewards.py:spoken'}
"""
REWARDS = '''
def spoken(problem, completion, transcript):
    """How much the model said in all its turns."""
    return float(sum(len(one["content"]) for one in transcript if one["role"] == "assistant"))
'''
WAITS = "waits for an agent worker"
AGENT = '''
import asyncio, json, os, openai

stock = openai.AsyncOpenAI(api_key="none")

def first_time(name):
    """Whether this is the first episode of all to come by here; there is no such time without MARKS."""
    try:
        open(os.path.join(os.environ["MARKS"], name), "x").close()
    except (KeyError, FileExistsError):
        return False
    return True

async def run(problem, base_url, api_key, doubt="Are you sure?"):
    """Two turns, the second one streamed; longer answers are better."""
    assert "MOTET_API_KEY" not in os.environ
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    first = await client.chat.completions.create(model="any", messages=messages)
    if first_time("killed"):
        await asyncio.sleep(3600)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": doubt}]
    said = []
    async for event in await client.chat.completions.create(model="any", messages=messages, stream=True):
        said += [choice.delta.content or "" for choice in event.choices]
    if "MARKS" in os.environ:
        with open(os.path.join(os.environ["MARKS"], "said"), "a") as out:
            out.write(json.dumps([first.choices[0].message.content, "".join(said)]) + "\\n")
    return {first.id: float(len(set(first.choices[0].message.content))), (await last_id(client, messages)): 0.0}

async def last_id(client, messages):
    return (await client.chat.completions.create(model="any", messages=messages)).id

async def hangs(problem, base_url, api_key):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    said = await client.chat.completions.create(model="any", messages=messages)
    if first_time("hung"):
        await asyncio.sleep(3600)
    return float(len(said.choices[0].message.content))

async def speaks(problem, base_url, api_key):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    said = await client.chat.completions.create(model="any", messages=messages)
    return float(len(said.choices[0].message.content))

async def boasts(problem, base_url, api_key):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "2+2?"}])
    return {f"answer-{n}": 1.0 for n in range(20_000)} if first_time("boasted") else 1.0

async def says_nothing(problem, base_url, api_key):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    for _ in range(2):
        said = await client.chat.completions.create(model="any", messages=messages)
        messages += [{"role": "assistant", "content": said.choices[0].message.content}, {"role": "user", "content": "More."}]
'''


def job(name: str, agent: str, **fields: Any) -> Json:
    """A job that takes a few seconds."""
    return {
        "name": name, "data": {"source": "toy:add", "size": 64, "holdout": 0}, "steps": 2, "sampling": {"max_tokens": 5},
        "environment": {"name": agent, "max_turns": 3}, "algorithm": {"group_size": 4, "groups_per_step": 2}, **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for the whole file, with keys of two tenants in `keys.json`."""
    directory = tmp_path_factory.mktemp("served")
    (directory / "agent.py").write_text(AGENT)
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "serve.yaml").write_text(CONFIG)
    with serving(directory, "--config", str(directory / "serve.yaml"), keys=True) as service:
        service.become(service.admin_key)
        keys = {who: service.key_for(who) for who in ("ours", "theirs")}
        (directory / "keys.json").write_text(json.dumps(keys))
        service.become(keys["ours"])
        yield service


def key_of(service: Service, tenant: str) -> str:
    """A tenant's key."""
    return str(json.loads((service.directory / "keys.json").read_text())[tenant])


def worker(service: Service, *words: object, **environment: str) -> subprocess.Popen[str]:
    """`motet agent` in a process of its own."""
    return service.motet("agent", *words, key=key_of(service, "ours"), cwd=service.directory, env=environment)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    with ending(process):
        out, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, out


def lease(service: Service, job: str, worker: str = "me", **fields: Any) -> Json:
    """What a worker by hand gets."""
    wanted = {"worker": worker, "most": 1, "wait_seconds": 20, **fields}
    found: Json = service.ask("POST", f"/v1/jobs/{job}/work/episodes/lease", json=wanted)
    return found


def asked(service: Service, path: str, key: str, method: str = "POST", **body: Any) -> tuple[int, Any]:
    """Status and body of what an agent asks."""
    sent = body or {"model": "any", "messages": [{"role": "user", "content": "2+2?"}]}
    headers, url = {"Authorization": f"Bearer {key}"} if key else {}, f"{service.url}{path}"
    answer = httpx2.request(method, url, headers=headers, timeout=PATIENCE, json=None if method == "GET" else sent)
    return answer.status_code, answer.json()


@pytest.mark.cell("agent worker", "embedded")
def test_a_worker_that_is_killed_loses_its_episodes_to_another_and_the_bytes_are_those_of_motet_run(
    service: Service, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    file = tmp_path / "jobs.yaml"
    agent = f"{service.directory}/agent.py:run"
    file.write_text(json.dumps({"base": "small", "jobs": [job("own", agent)]}))
    with ending(worker(service, file, MARKS=str(marks))):
        wait_until((marks / "killed").exists, PATIENCE)
    code, out = ended(worker(service, file, MARKS=str(marks)))
    assert (code, "own  succeeded" in out, "episodes: " in out) == (0, True, True), out
    motet.run([job("own", agent)], directory=tmp_path / "run", engine={"samplers": 0, "dtype": "float32"}, quiet=True)
    alone = tmp_path / "run" / "own"
    assert service.weights("own") == (alone / "versions/v2/adapter_model.safetensors").read_bytes()
    (served,) = (service.directory / "run").glob("*/metrics.jsonl")
    assert served.read_bytes() == (alone / "metrics.jsonl").read_bytes()
    steps = [json.loads(line) for line in served.read_text().splitlines()]
    assert [(line["failed"], line["logprob_gap"]) for line in steps] == [(0, 0.0)] * 2
    # What went through the address is what is trained. An episode that the killed worker had ended is said twice.
    kept = [one["turns"] for step in (0, 1) for one in service.ask("GET", f"/v1/jobs/own/rollouts?step={step}")["data"]]
    assert [turns[:1] for turns in kept] == [turns[:1] for turns in kept if len(turns) == 3]
    said = [json.loads(line) for line in (marks / "said").read_text().splitlines()]
    trained, told = (Counter(json.dumps(turns) for turns in all_) for all_ in ([one[:2] for one in kept], said))
    assert trained <= told


def test_an_agent_that_hangs_costs_its_rollout(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    environment = {"name": f"{service.directory}/agent.py:run", "wall_seconds": 4}
    file.write_text(
        json.dumps({"base": "small", "jobs": [{**job("hung", "x:y"), "steps": 1, "environment": environment}]})
    )
    agent = f"{service.directory}/agent.py:hangs"
    code, out = ended(worker(service, file, "--agent", agent, MARKS=str(tmp_path)))
    assert code == 0, out
    assert "1 failed (the last: did not return in time" in out
    rollouts = service.ask("GET", "/v1/jobs/hung/rollouts?step=0")["data"]
    assert [one["error"] for one in rollouts if one["error"]] == [
        "the agent did not return in time (environment.wall_seconds)"
    ]
    (state,) = [one["data"] for one in service.events("hung") if one["data"].get("state") == "succeeded"]
    assert state["inexact"] == ["the environment ran into its wall-clock limit, or was killed"]


def test_a_result_that_the_service_refuses_costs_its_episode_alone(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(json.dumps({"base": "small", "jobs": [{**job("boasted", "x:y"), "steps": 1}]}))
    agent = f"{service.directory}/agent.py:boasts"
    code, out = ended(worker(service, file, "--agent", agent, MARKS=str(tmp_path)))
    assert (code, service.job("boasted")["state"]) == (0, "succeeded"), out
    rollouts = service.ask("GET", "/v1/jobs/boasted/rollouts?step=0")["data"]
    (error,) = [one["error"] for one in rollouts if one["error"]]
    assert error.startswith("the agent the service refuses what the agent returned: ")
    assert [one["reward"] for one in rollouts if not one["error"]] == [1.0] * 7


def test_an_agent_that_returns_nothing_is_judged_by_the_rewards_of_its_job(service: Service, tmp_path: Path) -> None:
    """By all that was said, here and in `motet run` alike."""
    file, agent = tmp_path / "jobs.yaml", f"{service.directory}/agent.py:says_nothing"
    own = {**job("judged", "agent"), "reward": "spoken"}
    file.write_text(json.dumps({"base": "small", "jobs": [own]}))
    code, out = ended(worker(service, file, "--agent", agent))
    assert (code, service.job("judged")["state"]) == (0, "succeeded"), out
    rollouts = [one for step in (0, 1) for one in service.ask("GET", f"/v1/jobs/judged/rollouts?step={step}")["data"]]
    assert [one["reward"] for one in rollouts] == [float(sum(map(len, one["turns"]))) for one in rollouts]
    assert len({one["reward"] for one in rollouts}) > 1
    here = {
        **own,
        "environment": {**own["environment"], "name": agent},
        "reward": f"{service.directory}/rewards.py:spoken",
    }
    motet.run([here], directory=tmp_path / "run", engine={"samplers": 0, "dtype": "float32"}, quiet=True)
    assert service.weights("judged") == (tmp_path / "run/judged/versions/v2/adapter_model.safetensors").read_bytes()


def test_a_job_waits_for_a_worker_says_so_and_lets_its_slot_go(service: Service) -> None:
    service.submit(job("waits", "agent"))
    service.until(lambda: (service.job("waits")["progress"] or {}).get("phase") == WAITS)
    code, listed = ended(service.motet("ls", key=key_of(service, "ours")))
    assert (code, f"running, {WAITS}" in listed) == (0, True), listed
    service.submit({**job("beside", "single"), "environment": "single", "reward": "exact", "steps": 1})
    assert service.ended("beside") == "succeeded"  # there is one slot
    assert service.job("waits")["step"] == 0
    service.becomes("waits", "running")
    service.until(lambda: (service.job("waits")["progress"] or {}).get("phase") == WAITS)
    service.steer("waits", "pause")
    service.becomes("waits", "paused")  # at once: nobody is there
    service.steer("waits", "cancel")


@pytest.fixture
def by_hand(service: Service, request: pytest.FixtureRequest) -> Iterator[str]:
    """A job that waits for whoever speaks HTTP; it is cancelled afterwards."""
    name = f"hand-{abs(hash(request.node.name)) % 10**6}"
    service.submit(job(name, "agent"))
    yield name
    service.steer(name, "cancel")
    service.becomes(name, "cancelled")


@pytest.mark.cell("agent gateway", "embedded")
def test_whoever_speaks_http_opens_an_episode_talks_and_hands_its_reward_in_once(
    service: Service, by_hand: str
) -> None:
    (episode,) = lease(service, by_hand)["units"]
    assert set(episode["problem"]) == {"id", "messages", "answer", "metadata", "conversational"}
    client = openai.OpenAI(base_url=f"{service.url}{episode['path']}", api_key=episode["key"])
    assert [model.id for model in client.models.list()] == [service.job(by_hand)["id"]]
    said = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "2+2?"}])
    assert said.usage is not None
    assert said.usage.completion_tokens > 0
    with client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "2+3?"}], stream=True
    ) as stream:
        assert any(event.choices[0].finish_reason for event in stream if event.choices)
    result = {"results": [{"id": episode["id"], "rewards": {said.id: 1.0}}, {"id": "ep-none", "reward": 1.0}]}
    path = f"/v1/jobs/{by_hand}/work/episodes/results"
    assert service.ask("POST", path, json=result) == {"counted": [episode["id"]], "known": [], "unknown": ["ep-none"]}
    assert service.ask("POST", path, json=result)["known"] == [episode["id"]]
    status, body = asked(service, f"{episode['path']}/chat/completions", episode["key"])
    assert (status, body["error"]["type"]) == (404, "not_found_error")


def test_each_key_opens_what_is_its_own_and_nothing_else(service: Service, by_hand: str) -> None:
    """Those of tenants open leases and rewards of their jobs, an episode's the model's answers in it."""
    episode, other = (lease(service, by_hand)["units"][0] for _ in range(2))
    routes = ("chat/completions", "responses", "messages", "models")
    strangers = [other["key"], key_of(service, "ours"), key_of(service, "theirs"), "ek-wrong", ""]
    for route in routes:
        method = "GET" if route == "models" else "POST"
        for key in strangers:
            status, body = asked(service, f"{episode['path']}/{route}", key, method)
            assert (status, body["error"]["type"]) == (401, "authentication_error"), (route, key)
        assert asked(service, f"/episodes/ep-none/v1/{route}", episode["key"], method)[0] == 404
        for own in (episode, other):  # which keeps them
            assert asked(service, f"{own['path']}/models", own["key"], "GET")[0] == 200
    base = f"/v1/jobs/{by_hand}/work/episodes"
    result = {"results": [{"id": episode["id"], "reward": 1.0}]}
    for method, path, sent in (
        ("POST", "/lease", {"worker": "me"}),
        ("POST", "/results", result),
        ("DELETE", "/workers/me", None),
    ):
        for key, status in ((episode["key"], 401), (key_of(service, "theirs"), 404)):
            answer = httpx2.request(
                method, f"{service.url}{base}{path}", headers={"Authorization": f"Bearer {key}"}, json=sent
            )
            assert answer.status_code == status, (path, answer.text)
    assert asked(service, f"/v1/jobs/{by_hand}", episode["key"], "GET")[0] == 401
    for bearer, path, status in (
        ("EMPTY", f"{episode['path']}/models", 200),
        (key_of(service, "ours"), f"/v1/jobs/{by_hand}", 200),
    ):
        both = {"Authorization": f"Bearer {bearer}", "x-api-key": episode["key"]}
        assert httpx2.get(f"{service.url}{path}", headers=both, timeout=PATIENCE).status_code == status
    assert asked(service, f"{episode['path']}/models", episode["key"], "GET")[0] == 200
    assert service.ask("POST", f"{base}/results", json=result)["counted"] == [episode["id"]]


def test_a_new_lease_begins_the_episode_anew_under_another_key(service: Service, by_hand: str) -> None:
    (old,) = lease(service, by_hand)["units"]
    chat = f"{old['path']}/chat/completions"
    status, first = asked(service, chat, old["key"])
    assert status == 200
    service.ask("DELETE", f"/v1/jobs/{by_hand}/work/episodes/workers/me")
    assert asked(service, chat, old["key"])[0] == 404
    (new,) = lease(service, by_hand, "another")["units"]
    assert (new["handed_out"], new["seed"], new["problem"]) == (2, old["seed"], old["problem"])
    assert not {new["id"], new["key"]} & {old["id"], old["key"]}
    assert asked(service, f"{new['path']}/chat/completions", old["key"])[0] == 401
    results = {"results": [{"id": old["id"], "reward": 1.0}]}
    assert service.ask("POST", f"/v1/jobs/{by_hand}/work/episodes/results", json=results)["unknown"] == [old["id"]]
    # as if it were the first time: the same question has the same answer, which the old one's does not count for
    status, again = asked(service, f"{new['path']}/chat/completions", new["key"])
    assert (status, again["id"]) == (200, first["id"])
    assert again["choices"] == first["choices"]
    assert lease(service, by_hand, "another", most=0, holds=[])["held"] == []


def test_calls_beyond_the_jobs_limits_are_refused_with_the_reason(service: Service, by_hand: str) -> None:
    (episode,) = lease(service, by_hand)["units"]
    chat = f"{episode['path']}/chat/completions"
    long = {"role": "user", "content": "word " * 20_000}  # more than anybody may send without a key
    status, body = asked(service, chat, episode["key"], model="any", messages=[long])
    assert status == 400
    assert re.search(r"\d+ tokens|room|positions", body["error"]["message"]), body
    for number in range(2):
        assert asked(service, chat, episode["key"])[0] == 200, number
    status, body = asked(service, chat, episode["key"])
    assert (status, "environment.max_turns" in body["error"]["message"]) == (400, True)


def test_what_an_agent_was_answered_is_charged_though_its_job_is_cancelled_before_its_step_ends(
    service: Service,
) -> None:
    """Each answer, to the token; again and again it would cost nothing otherwise."""
    service.submit(job("left", "agent", environment={"name": "agent", "max_turns": 9, "wall_seconds": 600}))
    try:
        episodes = list[Json]()
        while not episodes:
            episodes = lease(service, "left")["units"]
        chat, key = f"{episodes[0]['path']}/chat/completions", episodes[0]["key"]
        answers = [asked(service, chat, key) for _ in range(9)]
        assert [status for status, _ in answers] == [200] * 9
    finally:
        service.steer("left", "cancel")
    assert service.becomes("left", "cancelled")["step"] == 0
    (line,) = [one for one in service.ask("GET", "/v1/usage")["data"] if one["name"] == "left"]
    told = sum(body["usage"]["completion_tokens"] for _, body in answers)
    assert line["tokens_sampled"] == told > 0
