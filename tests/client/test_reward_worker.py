"""A reward worker keeps processes of the rewards that it used last, and of those that it is using."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import motet
from motet.client.reward_files import RewardFiles
from motet.client.scoring import RewardWorker
from motet.rewards.reward_elsewhere import to_wire
from motet.service.schemas.workers import ScoringWork

OWN = """
import time


def reward(problem, completion, number=0, seconds=0.0):
    time.sleep(seconds)
    return float(number)
"""
LIMITS = {"cpu_seconds": 10.0, "wall_seconds": 300.0, "memory_mb": 1024}
PROBLEM = {"id": 0, "messages": [{"role": "user", "content": "Say a."}], "answer": "a", "metadata": {}}


def work(**args: Any) -> ScoringWork:
    reward = {"args": {"function": "own.py:reward", "args": args}, **LIMITS}
    return ScoringWork(id=str(args), reward=reward, problem=PROBLEM, completions=["a"], handed_out=1)


def processes() -> set[int]:
    found = set()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "motet.workers.worker" in one.cmdline():
                found.add(one.pid)
    return found


def test_a_worker_can_send_an_error_with_half_of_a_character(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text('def reward(problem, completion):\n    raise ValueError("a cut \\ud83d")\n')

    async def main() -> None:
        async with motet.AsyncClient("http://127.0.0.1:1", "key") as client:
            worker = RewardWorker(client, RewardFiles(tmp_path / "own.py"))
            try:
                scores = to_wire(await worker.score(work()))
            finally:
                await worker._pool.close()
            assert "a cut ?" in scores[0]
            assert client._request("POST", "/v1/jobs/a/work/rewards/results", json={"results": scores}).content

    asyncio.run(main())


def test_a_worker_ends_the_processes_of_rewards_that_it_used_longest_ago(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    others = processes()  # of services that other tests of this process keep

    async def main() -> None:
        async with motet.AsyncClient("http://127.0.0.1:1", "key") as client:
            worker = RewardWorker(client, RewardFiles(tmp_path / "own.py"), most_loaded=2)
            try:
                slow = asyncio.create_task(worker.score(work(number=9, seconds=5.0)))
                await asyncio.sleep(0)
                for number in range(4):
                    assert await worker.score(work(number=number)) == [float(number)]
                    assert len(processes() - others) <= 2
                assert await slow == [9.0]
                assert await worker.score(work(number=0)) == [0.0]  # loaded again
            finally:
                await worker._pool.close()

    asyncio.run(main())
    assert sys.platform != "linux" or processes() <= others
