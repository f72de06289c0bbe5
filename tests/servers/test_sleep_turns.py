"""Servers on the trainer's GPU sleep while it works: requests and the trainer take turns."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.config import LaunchConfig
from motet.config.jobfile import validate
from motet.hosts.running import run_config
from motet.hosts.servers import memory_beside
from motet.rollout.server import ServerEngine
from motet.rollout.server_process import ServerProcess
from tests.support.base_servers import stand_in
from tests.support.protocol_server import ProtocolServer
from tests.support.server_run import asking, drive, engine_on, in_process, long_request, publish, request, trainer_of
from tests.support.vllm_server import vllm_python
from tests.support.waiting import until

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


@both
@pytest.mark.parametrize("stream", [False, True])
def test_the_trainer_waits_for_requests_and_requests_for_the_trainer(
    dialect: Any, stream: bool, tmp_path: Path
) -> None:
    """A server that is asked while it sleeps, or put to sleep while it answers, would fail the test."""
    trainer = trainer_of("job")

    async def test(engine: ServerEngine) -> None:
        version, older = [await publish(engine, trainer, number) for number in (1, 0)]
        server.faults.token_seconds = 0.002
        running = asking(engine, long_request(version, id="a", stream=stream))
        await until(lambda: bool(server.engine.requests))
        entered, end = asyncio.Event(), asyncio.Event()

        async def train() -> None:
            async with engine.fleet.asleep():
                entered.set()
                await end.wait()

        training = asyncio.create_task(train())
        await entered.wait()
        assert running.done(), "it was not cut off"
        slept, asked = server.asleep, len(server.counts.asked)
        later = asking(engine, request(version, id="b", stream=stream))
        newer = asyncio.create_task(publish(engine, trainer, 2))
        await engine.unload_adapter(older)
        await asyncio.sleep(0.05)
        assert (len(server.counts.asked), later.done(), newer.done()) == (asked, False, False)
        end.set()
        await training
        assert (slept, server.asleep) == (True, False)
        assert await later == [await in_process(request(version, id="b"), trainer)]
        await newer

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path, sleep=True), test)


def test_a_server_that_does_not_wake_up_is_started_again(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), tmp_path / "log")

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        (replica,), before = engine.fleet.replicas, process.pid
        server.faults.errors["wake"] = 1
        async with engine.fleet.asleep():
            assert server.asleep
        server.stop()  # what its process would take along
        server.start()
        await until(lambda: replica.up and process.alive and process.pid != before)
        assert await asking(engine, request()) == [await in_process(request())]

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, processes={server.url: process}, sleep=True), test)


def test_requests_that_wait_for_a_server_to_start_do_not_hold_up_its_start(tmp_path: Path) -> None:
    """The trainer waits for the publish, which waits for the server."""
    trainer = trainer_of("job")

    async def test(engine: ServerEngine) -> None:
        await engine.ready()
        server.faults.hangs = True
        publishing = asyncio.create_task(publish(engine, trainer, 0))
        await until(lambda: bool(server.counts.requests["/v1/load_lora_adapter"]))

        async def train() -> bool:
            async with engine.fleet.asleep():
                return publishing.done()

        training = asyncio.create_task(train())
        server.stop()
        await until(lambda: not engine.fleet.up)
        server.faults.hangs = False
        server.start()
        assert await training
        await publishing

    with ProtocolServer() as server:
        drive(engine_on([server], tmp_path, sleep=True), test)


@pytest.mark.parametrize("server", ["stand-in", pytest.param("vLLM", marks=pytest.mark.soak)])
def test_jobs_sample_on_a_server_that_sleeps_in_each_step(server: str, tmp_path: Path) -> None:
    """A real vLLM for CPUs stops its scheduler only. Rewards differ between answers: without signal a step trains nothing."""
    (tmp_path / "own.py").write_text(
        "def spread(problem, completion):\n    return sum(completion.encode()) % 97 / 97\n"
    )
    job = {
        "data": {"source": "toy:reverse", "holdout": 2},
        "reward": f"{tmp_path / 'own.py'}:spread",
        "steps": 3,
        "sampling": {"max_tokens": 8},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
    }
    python = vllm_python() if server == "vLLM" else str(stand_in(tmp_path / "python"))
    tree = {
        "base": "small",
        "run": str(tmp_path / "run"),
        "engine": {"threads": 1, "dtype": "float32"},
        "rollout": {"engine": "vllm", "launch": {"python": python, "sleep": True}},
        "jobs": [{"name": name, "seed": seed, **job} for seed, name in enumerate(("one", "two"))],
    }
    done = run_config(validate(tree, "the test"))
    assert {one.state for one in done.jobs.values()} == {"succeeded"}
    said = (tmp_path / "run" / "server-0.log").read_text()
    assert said.count("POST /sleep?level=0" if server == "vLLM" else "sleeps") >= 3
    assert "asked for" not in said


def test_the_memory_of_servers_on_the_trainers_gpu_is_counted() -> None:
    assert memory_beside(None, 100) == 0
    assert memory_beside(LaunchConfig(devices=["1"]), 100) == 0
    assert memory_beside(LaunchConfig(devices=["0"], sleep=True, gpu_memory_utilization=0.4), 100) == 40
    assert memory_beside(LaunchConfig(replicas=2, gpu_memory_utilization=0.4), 100) == 80
    assert memory_beside(LaunchConfig(), 100) == 90
