"""Agents that do everything wrong at once: what is theirs is lost, and nothing else; and runs that are played again."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import motet
from tests.run_decoder import assert_all_is_back, collected_late, decoders

HOSTILE = """
import asyncio, os, random, signal, subprocess, sys, time
import openai

stock = openai.AsyncOpenAI(api_key="none", max_retries=0)
KINDS = ("plain", "twice", "again", "parallel", "raises", "hangs", "stuck", "killed", "late", "leaves early")

async def run(problem, base_url, api_key, seed, deadline):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    async def ask(text, retry=0):
        said = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], extra_headers={"x-stainless-retry-count": str(retry)})
        return said.id, said.usage.prompt_tokens
    kind = KINDS[seed % len(KINDS)]
    if kind == "twice":
        first, second = await asyncio.gather(ask("hi"), ask("hi"))
        assert first != second
        return 2.0
    if kind == "again":
        answers = [await ask("hi"), await ask("hi", 1), await ask("hi", 2)]
        assert len(set(answers)) == 1, answers
        return 3.0
    if kind == "parallel":
        answers = await asyncio.gather(*(ask("A " * (n + 1)) for n in reversed(range(4))))
        read = [tokens for _, tokens in answers]
        assert sorted(set(read), reverse=True) == read, read  # each has the answer to its own question
        return 4.0
    if kind == "leaves early":
        task = asyncio.create_task(ask("hi"))
        await asyncio.sleep(0.01)
        return 5.0
    await ask("hi")
    if kind == "raises":
        raise RuntimeError("no luck")
    if kind == "hangs":
        await asyncio.sleep(3600)
    if kind == "stuck":
        await asyncio.to_thread(time.sleep, deadline - time.time() + 14)
    if kind == "killed":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.kill()
        child.wait()
        raise RuntimeError("its helper was killed")
    if kind == "late":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            try:
                await ask("is it too late?")
            except openai.APIError:
                return 6.0
            return 7.0
    return 1.0
"""


def run(directory: Path, *jobs: dict[str, Any]) -> Any:
    return motet.run(list(jobs), directory=directory, engine={"samplers": 0}, quiet=True)


def bytes_of(directory: Path, job: str, version: int) -> list[bytes]:
    files = (f"versions/v{version}/adapter_model.safetensors", "metrics.jsonl")
    return [(directory / job / file).read_bytes() for file in files]


def rollouts(directory: Path, job: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / job / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def in_use() -> dict[str, Any]:
    """What this process holds that others could be left without."""
    gc.collect()
    me = psutil.Process()
    connections = [one for one in me.net_connections() if one.status != psutil.CONN_NONE]
    return {
        "files": len(me.open_files()),
        "descriptors": me.num_fds(),
        "connections": len(connections),
        "children": sorted(child.pid for child in me.children(recursive=True)),
    }


@pytest.mark.parametrize("episodes", [24, pytest.param(200, marks=pytest.mark.soak)])
def test_hostile_episodes_cost_themselves_alone_and_leave_nothing(tmp_path: Path, episodes: int) -> None:
    (tmp_path / "agent.py").write_text(HOSTILE)
    hostile = {
        "name": "hostile", "data": {"source": "toy:add", "holdout": 0},
        "environment": {"name": f"{tmp_path}/agent.py:run", "wall_seconds": 6.0 if episodes < 100 else 60.0},
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 8, "groups_per_step": episodes // 8, "max_failed_fraction": 1.0}, "steps": 2,
    }  # fmt: skip
    neighbour = {
        "name": "neighbour", "data": {"source": "toy:add", "holdout": 4}, "reward": "exact", "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 4, "groups_per_step": 2}, "steps": 2,
    }  # fmt: skip
    run(tmp_path / "alone", neighbour)
    before = in_use()
    with collected_late():
        done = run(tmp_path / "together", neighbour, hostile)
        (decoder,) = decoders()
        assert_all_is_back(decoder)
        del decoder
    after = in_use()
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    assert bytes_of(tmp_path / "together", "neighbour", 2) == bytes_of(tmp_path / "alone", "neighbour", 2)
    assert after.pop("descriptors") <= before.pop("descriptors")
    assert after == before
    lines = [line for step in range(2) for line in rollouts(tmp_path / "together", "hostile", step)]
    assert len(lines) == 2 * episodes
    turns = {(line["reward"], len(line["turns"])) for line in lines if not line["error"]}
    assert turns <= {(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 4)}, "each counted once, and nothing after its end"
    assert len(turns) == 4
    errors = Counter(line["error"].rpartition(" (")[0] or line["error"] for line in lines if line["error"])
    told = " ".join(errors)
    for reason in ("no luck", "did not return in time", "its helper was killed"):
        assert reason in told, errors
    assert set(errors) <= {
        "the agent RuntimeError: no luck", "the agent RuntimeError: its helper was killed", "the agent did not return in time",
        "the agent never called the model",
    }, errors  # fmt: skip


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
