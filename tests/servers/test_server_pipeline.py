"""Whole jobs on servers: they end with the bytes of a quiet run when a server is killed, or loses one request in twenty."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from motet.core.types import JobState
from motet.rollout.file_sync import FileSync
from motet.runtime.rundir import RunDirectory
from tests.support.fake_run import FakeRun, Setting, job, metrics, records, run_jobs, weights
from tests.support.fake_trainer import FakeTrainer
from tests.support.protocol_server import ProtocolServer
from tests.support.server_run import IMPATIENT, engine_on

STEPS = 6
Act = Callable[[FakeRun], Awaitable[None]]
both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


def run_on(servers: list[ProtocolServer], path: Path, act: Act | None = None) -> FakeRun:
    """Two jobs to their end, one of them two steps off-policy."""
    trainers: list[FakeTrainer] = []
    directory = RunDirectory(path / "run")
    directory.close()
    engine = engine_on(servers, path, run=directory.run_id, wait_seconds=10.0, clocks=IMPATIENT)

    def trainer(**options: Any) -> FakeTrainer:
        trainers.append(FakeTrainer(**options))
        return trainers[0]

    async def script(run: FakeRun) -> None:
        try:
            if act is not None:
                await act(run)
            while not all(one.state.final for one in run.jobs.values()):
                await asyncio.sleep(0.005)
        finally:
            await engine.close()

    setting = Setting(
        engine=cast(Any, lambda **_: engine),
        sync=cast(Any, lambda engine, _: FileSync(engine, trainers[0])),
        trainer=trainer,
        tolerance=1e-6,
    )
    jobs = [job("a", steps=STEPS), job("b", steps=STEPS, algorithm={"max_off_policy_steps": 2})]
    run = run_jobs(path / "run", jobs, setting, script)
    assert {name: one.state for name, one in run.jobs.items()} == dict.fromkeys("ab", JobState.SUCCEEDED), [
        one.progress.message for one in run.jobs.values()
    ]
    assert not (path / "served").exists()
    return run


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, FakeRun]]:
    """The runs that nothing disturbs, by dialect: SGLang's seeds are shorter."""
    found = {}
    for dialect in ("vllm", "sglang"):
        path = tmp_path_factory.mktemp(dialect)
        with ProtocolServer(cast(Any, dialect)) as server:
            found[dialect] = (path, run_on([server], path))
            assert server.entries == ()
            assert server.counts.loads.total() == server.counts.unloads.total() == 2 * (STEPS + 1)
    return found


def check_the_same(quiet: tuple[Path, FakeRun], path: Path, run: FakeRun) -> None:
    for name in "ab":
        assert metrics(path / "run", name) == metrics(quiet[0] / "run", name)
        assert weights(path / "run", name, STEPS) == weights(quiet[0] / "run", name, STEPS)
        lines = records(path / "run", name)
        assert [line["step"] for line in lines if "loss" in line] == list(range(STEPS))
    trained = [Counter(name for batch in one.trainer.batches for name in batch) for one in (run, quiet[1])]
    assert trained[0] == trained[1]  # nothing was trained twice


async def step_of(run: FakeRun, name: str, step: int) -> None:
    while run.jobs[name].progress.step < step:
        await asyncio.sleep(0.001)


@pytest.mark.cell("single turn, publish by files", "SGLang (fake)")
@both
def test_a_quiet_run(dialect: str, quiet: dict[str, tuple[Path, FakeRun]]) -> None:
    path, run = quiet[dialect]
    check_the_same(quiet[dialect], path, run)
    assert weights(path / "run", "a", STEPS) != weights(path / "run", "a", STEPS - 1)


@both
def test_a_server_that_is_killed_costs_only_time(
    dialect: Any, quiet: dict[str, tuple[Path, FakeRun]], tmp_path: Path
) -> None:
    async def act(run: FakeRun) -> None:
        for step in (1, 3, 4):
            await step_of(run, "a", step)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.05 * step)
            await asyncio.to_thread(server.start)

    with ProtocolServer(dialect) as server:
        run = run_on([server], tmp_path, act)
        assert server.entries == ()
    check_the_same(quiet[dialect], tmp_path, run)


def test_one_of_two_servers_is_killed(quiet: dict[str, tuple[Path, FakeRun]], tmp_path: Path) -> None:
    async def act(run: FakeRun) -> None:
        await step_of(run, "a", 2)
        await asyncio.to_thread(first.stop)
        await step_of(run, "b", 4)
        await asyncio.to_thread(first.start)
        first.faults.hangs, second.faults.hangs = False, True
        await step_of(run, "b", 5)
        second.faults.hangs = False

    with ProtocolServer() as first, ProtocolServer() as second:
        run = run_on([first, second], tmp_path, act)
    check_the_same(quiet["vllm"], tmp_path, run)


@both
def test_one_request_in_twenty_is_lost(dialect: Any, quiet: dict[str, tuple[Path, FakeRun]], tmp_path: Path) -> None:
    with ProtocolServer(dialect) as server:
        server.faults.drop_share = 0.05
        run = run_on([server], tmp_path)
        assert server.counts.drops > 5
        assert server.entries == ()
    check_the_same(quiet[dialect], tmp_path, run)
