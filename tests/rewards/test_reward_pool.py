"""A tenant's fault stays the tenant's: each way in which a reward goes wrong costs its own rollout, nothing else."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from motet.config import DataConfig, RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem, ToolCall
from motet.data.dataset import load_dataset
from motet.process import wall
from motet.process.channel import LONGEST_LINE
from motet.rewards.reward_answers import AnswerContext
from motet.rewards.reward_elsewhere import from_wire, to_wire
from motet.rewards.reward_messages import REWARD_CALLS, LoadRewards
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_workers import WorkerGroup, load_request
from motet.workers.worker_link import WorkerLink, WorkerSlot
from tests.support.faulty_rewards import (
    computes,
    counting,
    in_company,
    in_company_batched,
    in_company_later,
    in_threes,
    misbehave,
    none_of_my_business,
    relative,
)
from tests.support.processes import ending
from tests.support.waiting import wait_until

PROBLEM = Problem(3, (Message("user", "What is 6 · 7?"),), "42", {"level": "easy"})


def reward(function=misbehave, **fields):
    return RewardConfig(name="mine", function=function, **{"cpu_seconds": 0.3, "wall_seconds": 20, **fields})


def run(scenario, workers=1):
    """Run with a pool; afterwards no process of it may be left, not even as a zombie."""

    async def main():
        pool = RewardPool(workers)
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    before = set(psutil.Process().children(recursive=True))
    gc.freeze()  # what was there before is not looked through
    result = asyncio.run(main())
    gc.collect()  # an unclosed transport would warn here
    gc.unfreeze()
    assert set(psutil.Process().children(recursive=True)) <= before
    return result


def scores(completions, *rewards, problem=PROBLEM, workers=1):
    async def scenario(pool):
        await pool.register("job", rewards or [reward()])
        return await pool.score("job", problem, completions)

    return run(scenario, workers)


FAULTS = [
    ("loop", r"took more than 0\.3 s of CPU time \(reward field cpu_seconds\)$"),
    ("swallow", r"took more than 0\.3 s of CPU time"),
    ("flood", "took more than 1024 MB of memory"),
    ("raise", r"KeyError: 'no such thing' \(.*faulty_rewards\.py:\d+\)"),
    ("long message", "ValueError: xxx"),
    ("exit", "exit status 3"),
    ("sys.exit", "SystemExit"),
    ("segfault", "SIGSEGV"),
    ("killed", "SIGKILL"),
    ("value nan", "returned nan, not a finite number"),
    ("value inf", "returned inf"),
    ("value none", "returned None"),
    ("value text", r"returned str, not a number: return a float, such as float\(text\)"),
    ("value huge", "returned int that is not a number: OverflowError"),
]


def test_a_fault_fails_its_own_rollout():
    faults = [fault for fault, _ in FAULTS]
    completions = [text for fault in faults for text in (fault, "fine")]
    scored = scores(completions, workers=2)
    for (fault, reason), bad, good in zip(FAULTS, scored[::2], scored[1::2], strict=True):
        assert good.reward == 1.0, fault
        assert math.isnan(bad.reward), fault
        assert re.search(f"reward mine: .*{reason}", bad.error), (fault, bad.error)
        assert len(bad.error) < 1000
        assert bad.clock_limited is reason.startswith("SIG")  # another run may have another result
        assert bad.parts == {}


DIES = """
import os
import signal
from pathlib import Path


def dies(where, times):
    died = Path(where)
    before = died.read_text() if died.exists() else ""
    if len(before) < times:
        died.write_text(before + "x")
        os.kill(os.getpid(), signal.SIGKILL)


def reward(problem, completion):
    where, _, times = completion.partition(" ")
    dies(where, int(times))
    return 1.0
"""


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_call_whose_process_is_killed_from_outside_is_tried_again_at_most_twice(tmp_path, first, times):
    (tmp_path / "own.py").write_text(DIES)

    async def scenario(pool):
        await pool.register("job", [RewardConfig(name=f"{tmp_path}/own.py:reward", wall_seconds=60, cpu_seconds=60)])
        for _ in range(not first):
            await pool.score("job", PROBLEM, [f"{tmp_path}/never 0"])
        return await pool.score("job", PROBLEM, [f"{tmp_path}/died {times}", f"{tmp_path}/never 0"])

    killed, fine = run(scenario)
    assert (fine.reward, fine.error, fine.clock_limited) == (1.0, "", False)
    assert math.isnan(killed.reward) is killed.clock_limited is (times == 3)
    assert "SIGKILL, which Motet did not send" in killed.error if times == 3 else killed.error == ""
    assert (tmp_path / "died").read_text() == "x" * times


@pytest.mark.parametrize("times", [2, 3])
def test_a_process_that_is_killed_while_it_loads_is_started_again_at_most_twice(tmp_path, times):
    (tmp_path / "own.py").write_text(f'{DIES}\n\ndies("{tmp_path}/died", {times})\n')

    async def scenario(pool):
        await pool.register("job", [RewardConfig(name=f"{tmp_path}/own.py:reward", wall_seconds=60, cpu_seconds=60)])
        return await pool.score("job", PROBLEM, [f"{tmp_path}/never 0"])

    if times == 3:
        with pytest.raises(RewardError, match=r"'job' cannot be.*was killed with SIGKILL"):
            run(scenario)
    else:
        assert [one.reward for one in run(scenario)] == [1.0]


def test_a_loop_that_cannot_be_interrupted_meets_the_kernel():
    (bad,) = scores(["stubborn loop"])
    assert "CPU time" in bad.error
    assert not bad.clock_limited


def test_an_answer_that_is_too_long_for_a_process_fails_alone():
    async def scenario(pool):
        await pool.register("job", [reward()])
        long, short = await pool.score("job", PROBLEM, ["x" * LONGEST_LINE, "fine"])
        assert re.fullmatch(r"reward mine: cannot be sent to its process: \d+ MB; the limit is \d+ MB", long.error), (
            long.error
        )
        assert (short.error, math.isnan(short.reward)) == ("", False)

    run(scenario)


def lengths(completions, **columns):
    return [float(len(one)) for one in completions]


def test_answers_that_are_too_long_together_are_scored_alone():
    long = "x" * (LONGEST_LINE // 2)
    first, second = scores([long, long], reward(lengths, cpu_seconds=20))
    assert (first.reward, second.reward) == (len(long), len(long))


def test_the_wall_clock_is_a_backstop_and_says_so():
    bad, good = scores(["sleep", "fine"], reward(wall_seconds=1.5))
    assert (bad.clock_limited, good.clock_limited, good.reward) == (True, False, 1.0)
    assert "1.5 s by the clock (reward field wall_seconds)" in bad.error


def test_prints_and_forks_do_not_reach_the_protocol(tmp_path):
    async def scenario(pool):
        await pool.register("job", [reward()], log=tmp_path / "log")
        first = await pool.score("job", PROBLEM, ["print", "fork", "input"])
        return first + await pool.score("job", PROBLEM, ["fine"])

    assert [scored.reward for scored in run(scenario)] == [1.0, 1.0, 0.0, 1.0]
    assert (tmp_path / "log").read_text().count("99.0") == 2


def test_one_jobs_hanging_reward_does_not_hold_up_another():
    async def scenario(pool):
        await pool.register("stuck", [reward()])
        await pool.register("well", [reward()])
        hanging = [asyncio.create_task(pool.score("stuck", PROBLEM, ["sleep"] * 3)) for _ in range(3)]
        await asyncio.sleep(0.05)
        scored = await pool.score("well", PROBLEM, ["fine"] * 8)
        hang = [not one.done() for one in hanging]
        await pool.unregister("stuck")
        ended = await asyncio.gather(*hanging)
        return scored, hang, ended

    scored, hang, ended = run(scenario)
    assert [s.reward for s in scored] == [1.0] * 8
    assert all(hang)
    assert all(s.error for group in ended for s in group)


def test_a_cancelled_caller_leaves_no_late_reply_behind():
    async def scenario(pool):
        await pool.register("job", [reward()])
        calls = [asyncio.create_task(pool.score("job", PROBLEM, [text])) for text in ("sleep", "fine", "value nan")]
        await asyncio.sleep(0.1)
        calls[0].cancel()
        calls[1].cancel()
        late = await asyncio.gather(*calls, return_exceptions=True)
        return late, await pool.score("job", PROBLEM, ["fine", "value nan"])

    late, (good, bad) = run(scenario)
    assert isinstance(late[0], asyncio.CancelledError)
    assert (good.reward, math.isnan(bad.reward)) == (1.0, True)


def test_a_process_whose_killer_is_cancelled_ends_all_the_same():
    async def scenario(_):
        link = await WorkerLink.start(REWARD_CALLS, load_request([reward()], None, walled=False), None)
        killing = asyncio.create_task(link.kill())
        await asyncio.sleep(0)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        return link._remains

    assert run(scenario).returncode == 0


def test_an_outcome_does_not_depend_on_what_the_process_did_before():
    """Each call takes 80 MB and keeps them: without replacement the second or third would fail, the first not."""
    scored = scores(["leak"] * 4, reward(memory_mb=128))
    assert [s.error for s in scored] == [""] * 4
    drawn = [scores(texts)[-1].reward for texts in (["random"], ["fine", "random"], ["loop", "random"])]
    assert len(set(drawn)) == 1
    assert len({scores(["hash"])[0].reward for _ in range(2)}) == 1


def test_parts_weights_and_names():
    rewards = [
        RewardConfig(name="exact", weight=2),
        RewardConfig(name="length", weight=0.5, args={"target": 1}),
        RewardConfig(name="length", args={"target": 2, "unit": "characters"}),
    ]
    right, wrong = scores(["42", "a b"], *rewards, workers=2)
    assert right.parts == {"exact": 1.0, "length": 1.0, "length#2": 1.0}
    assert right.reward == 3.5
    assert wrong.parts == {"exact": 0.0, "length": 0.5, "length#2": 2 / 3}
    assert wrong.reward == pytest.approx(0.25 + 2 / 3)
    (partly,) = scores(["value nan"], RewardConfig(name="exact"), reward())
    assert partly.parts == {"exact": 0.0}
    assert math.isnan(partly.reward)
    (large,) = scores(["value large"], reward())
    assert large.error == "the weighted sum of the rewards is 1e+308: give smaller weights or rewards"


def test_trl_rewards_see_the_group_and_lose_only_the_completion_at_fault():
    assert [s.reward for s in scores(["ab", "abcd"], reward(relative))] == [0.5, 1.0]
    good, bad = scores(["ab", "bad"], reward(relative))
    assert (good.reward, "ValueError: bad completion" in bad.error) == (1.0, True)
    good, bad = scores(["ab", "loop"], reward(relative))
    assert (good.reward, "CPU time" in bad.error) == (1.0, True)
    (column,) = scores(["a"], reward(relative), problem=Problem(0, PROBLEM.messages, "", {"other": 1}))
    assert "asks for the column 'level'; the data's columns are other" in column.error


def test_a_list_of_another_length_is_an_error_for_all_and_nothing_is_asked_again(tmp_path):
    calls = tmp_path / "calls"
    for says, told in (
        ([1.0], "1 value"),
        ([1.0] * 5, "5 values"),
        (1.0, "float"),
        ("1234", "str"),
        (None, "NoneType"),
    ):
        calls.unlink(missing_ok=True)
        scored = scores(["a", "b", "c", "d"], reward(counting, args={"says": says, "calls": str(calls)}))
        assert {s.error for s in scored} == {
            f"reward mine: returned {told}, not a list of 4 numbers, one for each completion"
        }
        assert calls.read_text() == "4\n"
    assert [s.reward for s in scores(["a"], reward(counting, args={"says": [1.0], "calls": str(calls)}))] == [1.0]


def test_none_from_a_trl_reward_means_that_it_does_not_count():
    other = RewardConfig(name="length", weight=2, args={"target": 1})
    applies, does_not = scores(["ab", "none"], reward(none_of_my_business), other)
    assert (applies.reward, dict(applies.parts)) == (3.0, {"mine": 1.0, "length": 1.0})
    assert (does_not.reward, dict(does_not.parts), does_not.error) == (2.0, {"length": 1.0}, "")
    good, bad = scores(["ab", "none"], reward(none_of_my_business))
    assert good.reward == 1.0
    assert bad.error.startswith("no reward applies: mine returned None, which means that it does not judge this answer")
    (ours,) = scores(["value none"], reward(), other)
    assert ours.error.startswith("reward mine: returned None, not a number: return 0.0 for no reward")

    async def scenario(pool):
        await pool.register("job", [reward(none_of_my_business)])
        return await pool.scores("job", asdict(PROBLEM), ["ab", "none"])

    found = run(scenario)
    assert from_wire(json.loads(json.dumps(to_wire(found))), 2) == found == [1.0, None]
    assert from_wire([""], 1) == ["gave no score"]


def test_a_worker_may_say_that_its_reward_does_not_apply():
    async def worker(job, reward, problem, completions, seen):
        return from_wire([1.0, None], 2)

    async def main():
        pool = RewardPool(1, {"worker": worker})
        await pool.register("job", [RewardConfig(name="worker"), RewardConfig(name="exact")])
        try:
            return await pool.score("job", PROBLEM, ["no", "42"])
        finally:
            await pool.close()

    assert [(s.reward, s.error) for s in asyncio.run(main())] == [(1.0, ""), (1.0, "")]


@pytest.mark.parametrize(
    "says", [[1.0, 1.0], [None, None], ["no reason", "none"], [{"chance": "the clock"}] * 2, [1e300] * 2]
)
def test_a_reward_of_weight_zero_decides_nothing(says):
    async def worker(job, reward, problem, completions, seen):
        return from_wire(says, 2)

    async def main(*monitors):
        pool = RewardPool(1, {"worker": worker})
        await pool.register("job", [reward(none_of_my_business), *monitors])
        try:
            return await pool.score("job", PROBLEM, ["ab", "none"])
        finally:
            await pool.close()

    alone, watched = asyncio.run(main()), asyncio.run(main(RewardConfig(name="worker", weight=0)))
    for one, other in zip(alone, watched, strict=True):
        assert (str(one.reward), one.error, one.clock_limited) == (str(other.reward), other.error, other.clock_limited)
        assert set(other.parts) - set(one.parts) == ({"worker"} if says == [1.0, 1.0] else set())
        assert ("reward worker" in other.extra) == (says not in ([1.0, 1.0], [None, None]))


def test_half_of_a_character_in_a_tool_call_is_sent_to_who_scores_elsewhere():
    talks = []

    async def score(job, reward, problem, completions, seen):
        talks.extend(seen.transcripts)
        return [1.0]

    async def main():
        pool = RewardPool(1, {"worker": score})
        await pool.register("job", [RewardConfig(name="worker")])
        call = Message("assistant", "", (ToolCall("look", {"for": "\ud83d"}),))
        try:
            return await pool.score("job", PROBLEM, ["42"], AnswerContext([[*PROBLEM.messages, call]]))
        finally:
            await pool.close()

    assert [one.reward for one in asyncio.run(main())] == [1.0]
    assert talks[0][-1]["tool_calls"][0]["arguments"] == {"for": "\ud83d"}


def test_a_judge_model_is_sent_no_conversations():
    async def count(job, reward, problem, completions, seen):
        return [float(len(seen.transcripts))] * len(completions)

    async def main():
        pool = RewardPool(1, {"worker": count, "judge": count})
        grader = {"type": "score_model", "name": "g", "model": "m", "input": [{"role": "user", "content": "?"}]}
        await pool.register("job", [RewardConfig(name="worker"), RewardConfig(name="judge", args=grader)])
        try:
            return await pool.score(
                "job", PROBLEM, ["42"], AnswerContext([[*PROBLEM.messages, Message("assistant", "42")]])
            )
        finally:
            await pool.close()

    assert [dict(one.parts) for one in asyncio.run(main())] == [{"worker": 1.0, "judge": 0.0}]


def test_rewards_of_files_are_called_by_the_files_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("def score(problem, completion): return float(completion)\n")
    names = [RewardConfig(name=f"{tmp_path}/{folder}/mine.py:score") for folder in "ab"]
    good, bad = scores(["1", "x"], *names)
    assert dict(good.parts) == {"mine.py:score": 1.0, "mine.py:score#2": 1.0}
    assert bad.error.startswith("reward mine.py:score: ValueError: could not convert")


def test_what_motet_says_itself_comes_without_a_place_in_its_source():
    (bad,) = scores(["x"], RewardConfig(name="exact"), problem=Problem(0, PROBLEM.messages, "", {}))
    assert bad.error.startswith("reward exact: the problem has no reference answer: name its column")
    (column,) = scores(["a"], reward(relative), problem=Problem(0, PROBLEM.messages, "", {"other": 1}))
    assert column.error == "reward mine: it asks for the column 'level'; the data's columns are other"
    for error in (bad.error, column.error):
        assert ".py" not in error


def test_async_rewards_wait_together():
    async def scenario(pool):
        await pool.register("job", [reward(in_threes)])
        return await pool.score("job", PROBLEM, ["a", "raise", "abc", "abcd"])

    scored = run(scenario)
    assert [s.reward for s in scored if not s.error] == [1.0, 3.0, 4.0]
    assert "ValueError: no" in scored[1].error


def of(number):
    return Problem(number, (Message("user", "?"),), "", {"id": number})


@pytest.mark.parametrize("function", [in_company, in_company_batched])
def test_async_rewards_of_many_problems_wait_together(tmp_path, function):
    """No call ends before six have begun; results are by place, and the same as alone."""

    def scored(n, problems, place):
        async def scenario(pool):
            (tmp_path / place).mkdir()
            args = {"place": str(tmp_path / place), "n": n}
            await pool.register("job", [reward(function, args=args, wall_seconds=60, cpu_seconds=10)])
            many = [pool.score("job", of(number), ["raise" if number == 3 else "abc"]) for number in problems]
            return [outcome for (outcome,) in await asyncio.gather(*many)]

        return run(scenario)

    together = scored(6 - (function is in_company), range(6), "together")
    alone = [scored(1, [number], f"alone{number}")[0] for number in (5, 2)]
    assert [math.floor(one.reward) for one in together if not one.error] == [
        0,
        1,
        2,
        *[3] * (not together[3].error),
        4,
        5,
    ]
    assert [together[number].reward for number in (5, 2)] == [one.reward for one in alone]
    assert ("ValueError: no" in together[3].error) is (function is in_company)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process waits")
def test_functions_that_wait_are_called_for_many_problems_at_once(tmp_path):
    async def scenario(pool):
        args = {"place": str(tmp_path), "n": 6}
        await pool.register("job", [reward(in_company_later, args=args, wall_seconds=60, cpu_seconds=10)])
        await pool.score("job", PROBLEM, ["first"])
        many = [pool.score("job", of(number), ["abc"]) for number in range(6)]
        return [outcome.reward for (outcome,) in await asyncio.gather(*many)], pool.load("job")

    rewards, load = run(scenario)
    assert rewards == [0, 1, 2, 3, 4, 5]
    assert load.each >= 1
    assert (load.together, load.at_once) == (0, 16)


def test_functions_that_compute_get_no_more_processes():
    async def scenario(pool):
        await pool.register("job", [reward(computes, cpu_seconds=10)])
        await pool.score("job", PROBLEM, ["a"])
        return len(pool._jobs["job"].groups[0].workers), pool.load("job").at_once

    assert run(scenario) == (1, 1)


@pytest.mark.skipif(bool(wall.missing()), reason="this machine has no walls")
@pytest.mark.parametrize(("walled", "at_once"), [(True, 1), (False, 16)])
def test_what_a_process_behind_a_wall_says_of_its_waiting_is_not_believed(tmp_path, walled, at_once):
    """Its code may set its clock: it would get more processes, each with limits of its own."""
    (tmp_path / "hurries.py").write_text(
        "import itertools\nfrom motet.rewards import reward_calls\nhours = itertools.count()\n"
        "reward_calls._idle_seconds = lambda: 3600.0 * next(hours)\n"
        "def score(problem, completion): return 1.0\n"
    )

    async def scenario(pool):
        await pool.register("job", [RewardConfig(name=f"{tmp_path}/hurries.py:score", wall=walled)])
        return [(await pool.score("job", PROBLEM, ["a"]))[0].reward, pool.load("job").at_once]

    assert run(scenario) == [1.0, at_once]


def test_rewards_that_do_not_load_are_told_at_the_start(tmp_path):
    (tmp_path / "exits.py").write_text("import os\nos._exit(5)\n")
    lock = threading.Lock()
    for config, message in [
        (RewardConfig(name="exakt"), "did you mean 'exact'"),
        (RewardConfig(name=f"{tmp_path}/none.py:score"), "does not exist"),
        (RewardConfig(name=f"{tmp_path}/exits.py:score"), "cannot be loaded: the process ended with exit status 5"),
        (RewardConfig(name="length", args={"target": {1}}), "must be JSON values"),
        (reward(lambda problem, completion: lock), "cannot be sent to its process"),
    ]:
        with pytest.raises(RewardError, match=message):
            scores(["x"], config)

    async def unknown(pool):
        await pool.score("nobody", PROBLEM, ["x"])

    with pytest.raises(RewardError, match="'nobody' has no rewards registered"):
        run(unknown)


def test_the_datas_own_scorer():
    # arc_agi compares its answers with tuples, which do not survive JSON: the entry must be made again from its index.
    data = load_dataset(DataConfig(source="reasoning-gym:arc_agi", size=3, holdout=0))

    async def scenario(pool):
        await pool.register("job", [RewardConfig(name="scorer")], data.scorer)
        return await pool.score("job", data.train[2], [data.train[2].answer, "1 2 3"])

    right, wrong = run(scenario)
    assert right.reward == 1.0
    assert wrong.reward < 0.1


def test_a_process_loads_little():
    """Every job has one, and a host that takes over hundreds of jobs starts them all."""
    code = "import sys, motet.workers.worker, motet.rewards.reward_calls; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"yaml", "pydantic", "torch", "csv", "motet.data.row_files", "motet.config"}.isdisjoint(loaded)
    assert "numpy.random" in loaded, "numpy imports it when it is first used, and that would be behind the wall"


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, psutil, time\n"
        "from motet.config import RewardConfig\n"
        "from motet.rewards.reward_pool import RewardPool\n"
        "from motet.core.types import Message, Problem\n"
        "def hang(problem, completion):\n"
        "    while True: time.sleep(1)\n"
        "async def main():\n"
        "    pool = RewardPool()\n"
        "    await pool.register('a', [RewardConfig(name='hang', function=hang)])\n"
        "    await pool.register('b', [RewardConfig(name='exact')])\n"
        "    task = asyncio.create_task(pool.score('a', Problem(0, (Message('user', ''),), ''), ['x']))\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, script]
    with ending(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 4  # two workers, and what removes their remains
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children))


def ordered(problem, completions):
    if "fail" in completions:
        raise ValueError("cannot compare")
    assert problem.answer == "42"
    return [sorted(completions).index(text) / (len(completions) - 1) for text in completions]


def test_a_reward_may_compare_all_answers_to_a_problem():
    assert [one.reward for one in scores(["b", "c", "a"], reward(ordered))] == [0.5, 1.0, 0.0]
    failed = scores(["b", "fail"], reward(ordered))
    assert all("cannot compare" in one.error for one in failed)  # asked about one alone it would divide by zero


def test_the_call_that_waits_longest_gets_the_next_process() -> None:
    async def work() -> list[str]:
        group = WorkerGroup(LoadRewards([], None, 1, import_path=[]), None, {}, lambda: False)
        group.give_back(WorkerSlot())
        order: list[str] = []

        async def call(name: str, times: int) -> None:
            for _ in range(times):
                worker = await group.take()
                order.append(name)
                await asyncio.sleep(0)
                group.give_back(worker)

        await asyncio.gather(call("many", 5), call("one", 1), call("another", 1))
        return order

    assert asyncio.run(work())[:3] == ["many", "one", "another"]
