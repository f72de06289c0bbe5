"""Motet's own rewards run in a few processes for all jobs: none is a job's own, and nobody's calls hold another's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import JobConfig, RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem
from motet.data.shared import Sources
from motet.hosts.checks import check_files
from motet.rewards import mathematics
from motet.rewards.reward_pool import RewardPool
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import Given
from tests.support.waiting import until

PROBLEM = Problem(3, (Message("user", "What is 6 · 7?"),), "42", {"tests": ["assert x == 42"]})
ANSWERS = ["42", "The answer is 42.", "\\boxed{\\frac{84}{2}}", "x = 42", "forty-two", "a" * 40, ""]
GRADER = {
    "type": "text_similarity", "name": "a", "input": "{{sample.output_text}}", "reference": "42",
    "evaluation_metric": "fuzzy_match",
}  # fmt: skip
BUILT_IN = {
    "exact": {}, "contains": {}, "numeric": {}, "math": {}, "regex": {"pattern": "4.*{answer}|4"},
    "length": {"target": 2}, "grader": GRADER, "code": {},
}  # fmt: skip
SLOW = {"pattern": "(a|a)*b"}
"""It takes for ever for many letters."""


def run(scenario, workers=1, charge=lambda job, seconds: None):
    async def main():
        pool = RewardPool(workers, charge=charge)
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def processes():
    """The processes of rewards, without their children."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "motet.workers.worker" in process.cmdline():
                found.append(process)
    return found


def built_in(name, **fields):
    return RewardConfig(name=name, args=BUILT_IN[name], **fields)


def test_jobs_with_rewards_of_motet_have_no_process_each() -> None:
    async def scenario(pool):
        for number in range(30):
            names = ["exact", "contains", "numeric", "regex", "length"]
            await pool.register(f"job{number}", [built_in(name) for name in names])
        light = len(processes())
        await pool.register("mathematics", [built_in("math"), built_in("math", weight=0.5)])
        await pool.register("other mathematics", [built_in("math"), built_in("grader")])
        together = [pool.score(f"job{number}", PROBLEM, ANSWERS) for number in range(30)]
        scored = await asyncio.gather(*together, pool.score("mathematics", PROBLEM, ANSWERS))
        return light, len(processes()), scored

    light, all_kinds, scored = run(scenario)
    assert (light, all_kinds) == (1, 1)
    assert [one.parts["exact"] for one in scored[0]] == [1, 0, 0, 0, 0, 0, 0]
    assert [one.parts["math"] for one in scored[-1]] == [1, 1, 1, 1, 0, 0, 0]
    assert [scores == scored[0] for scores in scored[:-1]] == [True] * 30


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_score_does_not_depend_on_who_else_asks(name: str) -> None:
    """Alone, after and between calls of others of every kind, and in company of other answers."""

    async def alone(pool):
        await pool.register("job", [built_in(name)])
        return [(await pool.score("job", PROBLEM, [answer]))[0] for answer in ANSWERS]

    async def among_others(pool):
        for other in {name, "math", "grader", "regex"}:
            await pool.register(other, [built_in(other)])
            await pool.score(
                other, Problem(1, (), "1", PROBLEM.metadata), [*reversed(ANSWERS), "1", "\\boxed{x + True}"]
            )
        await pool.register("job", [built_in(name)])
        others = [pool.score("regex", PROBLEM, ANSWERS) for _ in range(3)]
        return (await asyncio.gather(pool.score("job", PROBLEM, ANSWERS), *others))[0]

    assert str(run(alone)) == str(run(among_others, workers=2))


def test_a_call_that_never_ends_holds_nobody_else() -> None:
    charged = Counter[str]()

    def charge(job, seconds):
        charged[job] += round(1000 * seconds)

    async def scenario(pool):
        for owner in ("us", "them"):
            fields = {"cpu_seconds": 4} if owner == "them" else {}
            await pool.register(f"job of {owner}", [RewardConfig(name="regex", args=SLOW, **fields)])
        starts = charged.total()
        hangs = [asyncio.create_task(pool.score("job of them", PROBLEM, ["a" * 60, "b"])) for _ in range(2)]
        await asyncio.sleep(0)
        ours = [await pool.score("job of us", PROBLEM, ["ab", "a", "b"]) for _ in range(20)]
        waited = not any(task.done() for task in hangs)
        return starts, ours, waited, await asyncio.gather(*hangs)

    starts, ours, waited, theirs = run(scenario, charge=charge)
    assert waited, "we did not wait for the end of their calls"
    assert [[one.reward for one in scores] for scores in ours] == [[1.0, 0.0, 1.0]] * 20
    for slow, quick in theirs:
        assert "took more than 4 s of CPU time (reward field cpu_seconds)" in slow.error
        assert (quick.reward, quick.error, slow.clock_limited) == (1.0, "", False)
    assert starts < 300, "who comes first does not pay for the process of all"
    assert charged["job of them"] > 2 * 4 * 900
    assert charged["job of us"] < 500


def test_a_call_that_floods_memory_fails_alone_and_others_go_on() -> None:
    large = "É" * 2**23

    async def scenario(pool):
        small = RewardConfig(name="exact", memory_mb=64, args={"ignore_case": True})
        await pool.register("them", [small])
        await pool.register("us", [built_in("exact")])
        first = pool.score("them", PROBLEM, [large, "42"])
        return await asyncio.gather(first, *(pool.score("us", PROBLEM, ["42"]) for _ in range(5)))

    (flooded, fine), *ours = run(scenario)
    assert "took more than 64 MB of memory (reward field memory_mb)" in flooded.error
    assert (fine.reward, fine.error) == (1.0, "")
    assert [one.reward for scores in ours for one in scores] == [1.0] * 5


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_process_that_is_killed_from_outside_is_tried_again_at_most_twice(times: int) -> None:
    reward, answer = RewardConfig(name="regex", args=SLOW, cpu_seconds=60), "a" * 23 + "c"

    async def scenario(pool):
        await pool.register("job", [reward])
        calls = asyncio.create_task(pool.score("job", PROBLEM, [answer]))
        killed = set[int]()
        while len(killed) < times and not calls.done():
            await asyncio.sleep(0.01)
            for process in processes():
                with contextlib.suppress(psutil.Error):
                    if process.pid not in killed and sum(process.cpu_times()[:2]) > 0.6:
                        process.kill()
                        killed.add(process.pid)
        return len(killed), (await calls)[0]

    killed, scored = run(scenario)
    assert killed == times
    assert scored.clock_limited is bool(scored.error) is (times == 3)
    assert scored.reward == 0.0 or ("SIGKILL, which Motet did not send" in scored.error and times == 3)


def test_arguments_that_are_wrong_are_told_at_the_start() -> None:
    async def scenario(pool):
        with pytest.raises(RewardError, match=r"reward 'regex': args .*unterminated"):
            await pool.register("job", [RewardConfig(name="regex", args={"pattern": "["})])
        with pytest.raises(RewardError, match="must be JSON values"):
            await pool.register("job", [RewardConfig(name="length", args={"target": {1}})])
        await pool.register("job", [built_in("exact")])
        return await pool.score("job", PROBLEM, ["42"])

    assert run(scenario)[0].reward == 1.0


def test_processes_too_many_end_when_nobody_waits_for_them() -> None:
    async def scenario(pool):
        for owner in ("a", "b", "c"):
            await pool.register(owner, [RewardConfig(name="regex", args=SLOW, cpu_seconds=3)])
        most = 0
        calls = asyncio.gather(*(pool.score(owner, PROBLEM, ["a" * 60]) for owner in ("a", "b", "c")))
        while not calls.done():
            await asyncio.sleep(0.05)
            most = max(most, len(processes()))
        await calls
        await until(lambda: len(processes()) <= 1)
        return most

    assert run(scenario) == 3


def test_mathematics_remembers_no_call() -> None:
    """What sympy has kept of a call could change what it makes of the next."""
    from sympy.core import random as sympy_random  # type: ignore[import-untyped]
    from sympy.core.cache import CACHE  # type: ignore[import-untyped]

    def state() -> tuple[object, int, object]:
        cached = sum(function.cache_info().currsize for function in CACHE)
        return sympy_random.rng.getstate(), cached, mathematics.expressions.cache_info().currsize

    mathematics.forget()
    before = state()
    assert mathematics.equal("x + 1", "$1 + x$")
    sympy_random.rng.random()
    assert state() != before
    mathematics.forget()
    assert state() == before


def test_a_check_of_own_code_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(problem, completion): return 1.0\n")
    data, rewards = {"source": "toy:sort_letters", "size": 8}, ["exact", f"{tmp_path}/own.py:score"]
    config = JobConfig.model_validate({"name": "job", "data": data, "reward": rewards})
    before = set(processes())
    check_files([Given(config, JobDirectory(tmp_path / "job"))], Sources(), RewardPool())
    assert set(processes()) == before
