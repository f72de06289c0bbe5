"""Code that others send to score their jobs: it runs behind the wall, alone in its process, and its limits hold."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem
from motet.process import wall
from motet.rewards.reward_answers import ScoreOutcome
from motet.rewards.reward_calls import PRINTED
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import NO_WALL, Walls
from motet.rewards.sent_rewards import faults_of
from motet.runtime.code_sums import CodeSums
from motet.workers.worker_link import LONGEST_FAULT
from tests.support.sent_code import AT_ONCE, BETWEEN, LIFTED, WAYS, WAYS_OUT, one, ways
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="walls are made of Landlock and seccomp, which Linux has"
)

PROBLEM = Problem(0, (Message("user", "?"),), "b", {})
PID = one("return float(os.getpid())")


def sent(code: str, **fields: Any) -> RewardConfig:
    return RewardConfig(name="mine.py:reward", code=code, **{"cpu_seconds": 5, "memory_mb": 256, **fields})


def run(scenario: Callable[[RewardPool], Awaitable[Any]], charged: Counter[str] | None = None, **walls: Any) -> Any:
    """With a pool as a service has it; `charged` counts microseconds by job."""
    used = Counter[str]() if charged is None else charged

    async def main() -> Any:
        required = Walls(required=True, **walls)
        pool = RewardPool(1, walls=required, charge=lambda job, seconds: used.update({job: round(1e6 * seconds)}))
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def scored(texts: Sequence[str], *rewards: RewardConfig, log: Path | None = None, **walls: Any) -> list[ScoreOutcome]:
    async def scenario(pool: RewardPool) -> Sequence[ScoreOutcome]:
        await pool.register("job", rewards, log=log)
        return await pool.score("job", PROBLEM, texts)

    return list(run(scenario, **walls))


# --- what holds -----------------------------------------------------------------------------------------------------------


def test_each_way_out_that_doctor_tries_is_held_from_code_that_was_sent() -> None:
    tried = [*wall.probe()]
    assert len(tried) >= 40
    outcomes = scored(tried, sent(WAYS_OUT, args={"process": os.getpid(), "group": os.getpgrp()}))
    assert {way: one.error or one.reward for way, one in zip(tried, outcomes, strict=True)} == dict.fromkeys(tried, 1.0)


def test_further_ways_out_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs := tmp_path / "theirs" / "motet.db").parent.mkdir()
    theirs.write_text("secret")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MOTET_SECRET_KEY", "secret")
    log = tmp_path / "rewards.log"
    reward = sent(ways(), args={"theirs": str(theirs), "process": os.getpid()})
    said = {way: outcome.error for way, outcome in zip(WAYS, scored([*WAYS], reward, log=log), strict=True)}
    assert {way: error for way, error in said.items() if not error or not re.search(WAYS[way][1], error)} == {}
    assert log.stat().st_size == PRINTED


def test_code_that_lifts_its_limits_is_ended_and_charged() -> None:
    used = Counter[str]()

    async def scenario(pool: RewardPool) -> str:
        await pool.register("job", [sent(LIFTED, cpu_seconds=0.5, wall_seconds=600)])
        (outcome,) = await pool.score("job", PROBLEM, ["x"])
        return outcome.error

    assert "took more CPU time than it may (reward field cpu_seconds)" in run(scenario, used)
    assert used["job"] > 3_000_000


def test_code_that_computes_between_calls_is_ended_and_the_next_call_has_a_fresh_process() -> None:
    used = Counter[str]()

    async def scenario(pool: RewardPool) -> tuple[float, float]:
        await pool.register("job", [sent(BETWEEN)])
        (first,) = await pool.score("job", PROBLEM, ["spin"])
        await until(lambda: not psutil.pid_exists(int(first.reward)))
        (second,) = await pool.score("job", PROBLEM, ["rest"])
        return first.reward, second.reward

    first, second = run(scenario, used)
    assert first != second
    assert used["job"] > 3_000_000


def test_code_that_waits_has_one_process_all_the_same() -> None:
    async def scenario(pool: RewardPool) -> set[float]:
        await pool.register("job", [sent(AT_ONCE)])
        every = await asyncio.gather(*(pool.score("job", PROBLEM, [text]) for text in "abcd"))
        return {outcome.reward for (outcome,) in every}

    assert len(run(scenario)) == 1


def test_sent_code_shares_its_process_with_no_other() -> None:
    def process(problem: Problem, completion: str) -> float:
        return float(os.getpid())

    theirs = RewardConfig(name="theirs", function=process, wall=True)
    (outcome,) = scored(["x"], theirs, sent(PID), sent(PID))
    parts = outcome.parts
    assert parts["theirs"] != parts["mine.py:reward"] == parts["mine.py:reward#2"]


def test_without_a_wall_nothing_is_run_and_doctors_words_say_why() -> None:
    with pytest.raises(RewardError, match=f"{NO_WALL}.*reading a file: was possible"):
        scored(["x"], sent(PID), missing=lambda: "reading a file: was possible")


def test_where_processors_or_memory_are_short_it_comes_last() -> None:
    def looked(process: int) -> tuple[int, str]:
        score = Path(f"/proc/{process}/oom_score_adj")
        return psutil.Process(process).nice(), score.read_text(encoding="utf-8").strip()

    async def scenario(pool: RewardPool) -> tuple[int, str]:
        await pool.register("job", [sent(PID)])
        (outcome,) = await pool.score("job", PROBLEM, ["x"])
        return await asyncio.to_thread(looked, int(outcome.reward))

    assert run(scenario) == (5, "1000")


# --- what its owner reads -------------------------------------------------------------------------------------------------


TAKES = """
import resource
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
X = bytearray(3 << 30)
"""
LONG = """
import os
for n in range(3, 20):
    try: os.write(n, b'{"type": "LoadRefused", "call": 0, "error": "' + b"x" * (5 << 20) + b'"}' + bytes([10]))
    except OSError: pass
"""
"""Answers, before it is asked, by a line that is too long."""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (TAKES, "does not load: MemoryError .*; raise memory_mb of the reward"),
        ("import helpers", "No module named 'helpers'; one file is sent, and imports what is installed"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(mine.py:1\)"),
        ("import os; os._exit(3)", "ended with exit status 3"),
        ("reward = 3", "is int, not a function"),
        (LONG, "wrote something that is not a reply"),
    ],
)
def test_a_file_that_does_not_load_says_why(code: str, why: str) -> None:
    with pytest.raises(RewardError, match=why):
        scored(["x"], sent(code))


def test_a_long_fault_is_cut() -> None:
    lie = (
        """b'{"type": "Scores", "call": 1, "values": [null], "errors": ["' + b"x" * 10**6 + b'"], "failed": true}\\n'"""
    )
    (outcome,) = scored(
        ["x"], sent(one(f"for n in range(3, 20):\n    try: os.write(n, {lie})\n    except OSError: pass"))
    )
    assert "xxxx" in outcome.error
    assert len(outcome.error) < LONGEST_FAULT + 100


FAULTS = [
    ("a.py:reward", "x = 1\ndef reward(:", r"reward file 'a.py' does not load: SyntaxError: .*\(a.py, line 2\)"),
    ("a.py:reward", "return 1", r"SyntaxError: 'return' outside function \(a.py, line 1\)"),
    ("a.py:reward", "(" * 5000, "does not load: "),
    ("a.py:rewrd", "def reward(problem, completion): return 1", "a.py has no 'rewrd'; did you mean 'reward'?"),
    ("a.py:far", "def reward(problem, completion): return 1", "a.py has no 'far'; it has reward"),
    ("a.py:far", "", "a.py has no 'far'; it has nothing to call"),
    ("a.py:inner", "def reward(): \n  def inner(): pass", "has no 'inner'"),
    ("a.py:reward", "if True:\n  from x import y as reward", ""),
    ("a.py:reward", "reward = lambda problem, completion: 1", ""),
    ("a.py:reward", "from x import *", ""),
    ("a.py:reward", "globals()['reward'] = print", ""),
    ("a.py:reward", "1 / 0\ndef reward(problem, completion): return 1", ""),
]


def test_what_is_wrong_with_a_file_is_seen_without_running_it() -> None:
    used = list[float]()
    faults = faults_of([(name, text) for name, text, _ in FAULTS], used.append)
    assert [
        (fault, why) for fault, (*_, why) in zip(faults, FAULTS, strict=True) if not re.search(why or r"\A\Z", fault)
    ] == []
    assert sum(used) > 0


def test_a_text_counts_in_a_jobs_identity_as_its_file_does(tmp_path: Path) -> None:
    text = "import math\n# a comment\ndef other(): return 2\n\ndef reward(problem, completion):\n    return other()\n"
    (tmp_path / "mine.py").write_text(text)
    of_file, of_text, of_another, both = CodeSums(), CodeSums(), CodeSums(), CodeSums()
    of_file.add(f"{tmp_path / 'mine.py'}:reward")
    of_text.add_text("mine.py:reward", text)
    of_another.add_text("mine.py:reward", text.replace("return 2", "return 3"))
    assert of_text.entries() == of_file.entries() != of_another.entries()
    both.add_text("mine.py:reward", text)
    both.add_text("mine.py:other", "def other(): return 5")
    assert [*both.entries()] == ["mine.py", "mine.py'"]
