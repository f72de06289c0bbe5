"""Agents that do everything wrong at once: what is theirs is lost, and nothing else; and runs that are played again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.adapter_files import run
from tests.support.hostile_agent import HOSTILE, assert_fair, in_use
from tests.support.run_decoder import assert_all_is_back, collected_late, decoders
from tests.support.service_run import Service, serving, tiny
from tests.support.waiting import PATIENCE


def bytes_of(directory: Path, job: str, version: int) -> list[bytes]:
    files = (f"versions/v{version}/adapter_model.safetensors", "metrics.jsonl")
    return [(directory / job / file).read_bytes() for file in files]


def rollouts(directory: Path, job: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / job / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def hostile_worker(service: Service, place: Path) -> subprocess.Popen[str]:
    """`motet agent`, which marks what it begins."""
    words = ("agent", place / "jobs.yaml", "--concurrency", "128")
    return service.motet(*words, out=subprocess.DEVNULL, err=None, env={"MARKS": str(place / "marks")})


@pytest.mark.parametrize("episodes", [24, pytest.param(80, marks=pytest.mark.soak)])
def test_hostile_episodes_cost_themselves_alone_and_leave_nothing(tmp_path: Path, episodes: int) -> None:
    (tmp_path / "agent.py").write_text(HOSTILE)
    hostile = {
        "name": "hostile", "data": {"source": "toy:add", "holdout": 0},
        "environment": {"name": f"{tmp_path}/agent.py:run", "wall_seconds": 6.0 if episodes < 50 else 60.0},
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 8, "groups_per_step": episodes // 8, "max_failed_fraction": 1.0}, "steps": 2,
    }  # fmt: skip
    neighbour = {
        "name": "neighbour", "data": {"source": "toy:add", "holdout": 4}, "reward": "exact", "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 4, "groups_per_step": 2}, "steps": 2,
    }  # fmt: skip
    run(tmp_path / "alone", neighbour)
    before = in_use()
    with collected_late() as others:
        done = run(tmp_path / "together", neighbour, hostile)
        (decoder,) = decoders(others)
        assert_all_is_back(decoder)
        del decoder
    after = in_use()
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    assert bytes_of(tmp_path / "together", "neighbour", 2) == bytes_of(tmp_path / "alone", "neighbour", 2)
    assert after.pop("descriptors") <= before.pop("descriptors")
    assert set(after.pop("children")) <= set(before.pop("children")), "one of another test may have ended meanwhile"
    assert after == before
    lines = [line for step in range(2) for line in rollouts(tmp_path / "together", "hostile", step)]
    assert len(lines) == 2 * episodes
    assert_fair(lines)


@pytest.mark.soak
def test_hostile_episodes_of_a_service_go_on_elsewhere_when_their_worker_is_killed(tmp_path: Path) -> None:
    """Eighty at once on two workers, of which one dies in the middle."""
    (tmp_path / "agent.py").write_text(HOSTILE)
    (tmp_path / "serve.yaml").write_text("engine: {samplers: 0, threads: 1}\nlease_seconds: 10\n")
    hostile = {
        "name": "hostile", "data": {"source": "toy:add", "holdout": 0}, "sampling": {"max_tokens": 4}, "steps": 1,
        "environment": {"name": f"{tmp_path}/agent.py:run", "wall_seconds": 60.0},
        "algorithm": {"group_size": 8, "groups_per_step": 10, "max_failed_fraction": 1.0},
    }  # fmt: skip
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base": "small", "jobs": [hostile]}))
    with serving(tmp_path / "served", "--config", str(tmp_path / "serve.yaml")) as service:
        assert service.process is not None
        service.submit(tiny("alone", seed=7))
        service.ended("alone")
        watched = [psutil.Process(service.process.pid), service.engine()]
        before = [in_use(one) for one in watched]
        marks = tmp_path / "marks"
        marks.mkdir()

        def begun() -> int:
            return sum(one.stat().st_size for one in marks.iterdir())

        workers = []
        try:
            workers.append(hostile_worker(service, tmp_path))
            service.until(lambda: begun() >= 24)
            workers.append(hostile_worker(service, tmp_path))
            service.until(lambda: begun() >= 60)
            service.submit(tiny("neighbour", seed=7))
            workers[0].kill()
            service.ended("neighbour")
            service.ended("hostile")
            workers[1].wait(PATIENCE)
        finally:
            for one in workers:
                one.kill()
                one.wait()
        assert service.weights("neighbour") == service.weights("alone")
        lines = service.ask("GET", "/v1/jobs/hostile/rollouts?step=0&limit=500")["data"]
        assert len(lines) == 80
        assert_fair(lines)
        after = [in_use(one) for one in watched]
        for now, then in zip(after, before, strict=True):
            assert now["children"] == then["children"]
            assert now["connections"] <= then["connections"]
            # a pool of connections to the database may have grown: those are files
            assert now["descriptors"] - now["files"] <= then["descriptors"] - then["files"], (before, after)


@pytest.mark.soak
@pytest.mark.parametrize(("killed", "episodes"), [("service", 80), ("engine", 80)])
def test_hostile_episodes_of_a_service_begin_anew_when_what_serves_them_is_killed(
    tmp_path: Path, killed: str, episodes: int
) -> None:
    """In the middle of a step, beside a neighbour; who runs the agents waits until it is there again."""
    (tmp_path / "agent.py").write_text(HOSTILE)
    (tmp_path / "serve.yaml").write_text("engine: {samplers: 0, threads: 1}\nlease_seconds: 10\n")
    hostile = {
        "name": "hostile", "data": {"source": "toy:add", "holdout": 0}, "sampling": {"max_tokens": 4}, "steps": 1,
        "environment": {"name": f"{tmp_path}/agent.py:run", "wall_seconds": 60.0},
        "algorithm": {"group_size": 8, "groups_per_step": episodes // 8, "max_failed_fraction": 1.0},
    }  # fmt: skip
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base": "small", "jobs": [hostile]}))
    marks = tmp_path / "marks"
    marks.mkdir()

    def begun() -> int:
        return sum(one.stat().st_size for one in marks.iterdir())

    with serving(tmp_path / "served", "--config", str(tmp_path / "serve.yaml")) as service:
        service.submit(tiny("alone", seed=7))
        service.ended("alone")
        worker = hostile_worker(service, tmp_path)
        try:
            service.until(lambda: begun() >= episodes // 2)
            service.submit(tiny("neighbour", seed=7))
            if killed == "engine":
                service.engine().kill()
            else:
                service.kill()
                service.start()
            service.ended("neighbour")
            service.ended("hostile")
            assert worker.wait(PATIENCE) == 0
        finally:
            worker.kill()
            worker.wait()
        assert begun() > episodes, "those that had begun did so again"
        assert service.weights("neighbour") == service.weights("alone")
        lines = service.ask("GET", "/v1/jobs/hostile/rollouts?step=0&limit=500")["data"]
        assert len({(line["problem"], line["index"]) for line in lines}) == len(lines) == episodes
        assert_fair(lines)


ERRATIC = """
import asyncio, json, os, random
from pathlib import Path
import openai

stock = openai.AsyncOpenAI(api_key="none")
chance = random.SystemRandom()

async def say(client, messages):
    return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content

async def draws(base_url, api_key, seed, record):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages, asked = [], []
    for _ in range(chance.randint(1, 3)):
        messages = [*messages, {"role": "user", "content": f"What is {chance.randint(1, 9)} + {chance.randint(1, 9)}?"}]
        asked.append(messages)
        await asyncio.sleep(chance.random() / 20)
        messages = [*messages, {"role": "assistant", "content": await say(client, messages)}]
    reward = chance.random()
    Path(record, f"{seed}.json").write_text(json.dumps([asked, reward]))
    return reward

async def replays(base_url, api_key, seed, record):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    asked, reward = json.loads(Path(record, f"{seed}.json").read_text())
    for messages in asked:
        await say(client, messages)
    return reward
"""


@pytest.mark.soak
def test_what_an_erratic_agent_did_can_be_played_again_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ERRATIC)
    results = {}
    for name, function, record in (("first", "draws", "a"), ("again", "replays", "a"), ("other", "draws", "b")):
        (tmp_path / record).mkdir(exist_ok=True)
        environment = {"name": f"{tmp_path}/agent.py:{function}", "args": {"record": str(tmp_path / record)}}
        job = {
            "name": "erratic", "data": {"source": "toy:add", "holdout": 0}, "environment": environment,
            "sampling": {"max_tokens": 4}, "algorithm": {"group_size": 4, "groups_per_step": 2}, "steps": 2,
        }  # fmt: skip
        run(tmp_path / name, job)
        results[name] = bytes_of(tmp_path / name, "erratic", 2)
    assert results["again"] == results["first"]
    assert results["other"][0] != results["first"][0]
