"""What code of a person sees of the machine: the same in each process and on each machine, so that its results are too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from motet.config import EnvironmentConfig, RewardConfig
from motet.environments.agent_processes import AgentProcesses
from motet.environments.environments import EnvironmentWorkers
from motet.rewards.reward_pool import RewardPool

SEEN = """
import locale, pathlib, time

def seen():
    order = list(set("abcdefghijklmnopqrstuvwxyz"))
    return f"{locale.getpreferredencoding(False)} {time.localtime(0).tm_hour} h {order.index('a')} of {order.index('z')}"

pathlib.Path(__file__).with_name("seen").write_text(seen())

def reward(problem, completion):
    return 1.0

def agent(problem, base_url, api_key):
    return 1.0

class Environment:
    def step(self, text):
        return "", 1.0, True
"""
MACHINES: list[dict[str, str]] = [
    {"TZ": "Asia/Kolkata", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONHASHSEED": "1"},
    {"TZ": "America/New_York", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "0", "PYTHONHASHSEED": "random"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "world.py").write_text(SEEN)
    return tmp_path / "world.py"


async def of_reward(file: Path) -> None:
    pool = RewardPool(1)
    try:
        await pool.register("job", [RewardConfig(name=f"{file}:reward")])
    finally:
        await pool.close()


async def of_environment(file: Path) -> None:
    workers = EnvironmentWorkers(EnvironmentConfig(name=f"{file}:Environment"), file.parent / "log", 1)
    try:
        await workers.open()
    finally:
        await workers.close()


async def of_agent(file: Path) -> None:
    processes = AgentProcesses(f"{file}:agent", {}, file.parent / "log")
    try:
        await processes.usable()
    finally:
        await processes.close()


@pytest.mark.parametrize("process", [of_reward, of_environment, of_agent])
def test_code_sees_the_same_on_each_machine(
    process: Callable[[Path], Coroutine[Any, Any, None]], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[str]()
    for machine in MACHINES:
        for name, value in machine.items():
            monkeypatch.setenv(name, value)
        asyncio.run(process(file))
        found.append(file.with_name("seen").read_text())
    assert found[0] == found[1]
    assert found[0].lower().startswith("utf-8 0 h ")
