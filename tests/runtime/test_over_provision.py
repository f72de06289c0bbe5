"""Steps that take the groups that are done first (`algorithm.over_provision`): nothing is lost, doubled or left behind."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from motet.config import JobConfig
from motet.core.batch import Batch, Trained
from motet.core.errors import EngineError
from motet.core.types import Chunk, GenerateRequest, JobState, Problem
from motet.data.dataset import Dataset
from motet.data.problems import Problems
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.rewards.reward_pool import RewardPool
from motet.runtime.checkpoint import Committed, JobDirectory
from tests.support import inside
from tests.support.fake_base import FakePolicy
from tests.support.fake_engine import FakeEngine
from tests.support.fake_run import (
    FakeRun,
    InlineRewards,
    Setting,
    job,
    metrics,
    problems,
    records,
    run_jobs,
    vowels,
    weights,
)
from tests.support.remembering import RememberingEngine, RememberingTrainer, check_samples
from tests.support.waiting import PATIENCE, until

_PACE = contextvars.ContextVar("pace", default=1)
"""How many suspensions a token takes; rows of a request have their request's."""


def place(request: GenerateRequest) -> int:
    """A training request's position in the sequence of problems."""
    return int(request.id.split("/")[3])


class UnevenEngine(RememberingEngine):
    """Of four groups of training one is slow, and one much slower."""

    paces: ClassVar[tuple[int, ...]] = (1, 30, 1, 4)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        _PACE.set(self.paces[place(request) % len(self.paces)] if "/train/" in request.id else 1)
        async for chunk in super().generate(request):
            yield chunk

    async def suspend(self) -> None:
        for _ in range(_PACE.get()):
            await super().suspend()


UNEVEN = Setting(engine=UnevenEngine, trainer=RememberingTrainer, capacity=40)


def over(name: str = "a", factor: float = 1.5, **fields: Any) -> JobConfig:
    """A job that begins more groups than it trains; its penalty keeps every sample in the batch."""
    algorithm = {"over_provision": factor, "kl": {"coef": 0.01}, **fields.pop("algorithm", {})}
    tree = {"steps": 5, "sampling": {"max_tokens": 20}, "checkpoint": {"keep": 50}, **fields}
    return job(name, algorithm=algorithm, **tree)


def trained(path: Path, config: JobConfig, steps: int) -> list[list[int]]:
    """The ids of the problems that each step trained, in the order of its log."""
    found = []
    for step in range(steps):
        lines = (path / config.name / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        found.append(list(dict.fromkeys(json.loads(line)["problem"] for line in lines)))
        assert len(lines) == len(found[-1]) * config.rl.group_size
    return found


def sequence(config: JobConfig, n: int) -> list[int]:
    """The ids of the first problems that a job owns."""
    data = Dataset(Problems.of(problems(20)), Problems.of(()), None, shuffle=config.data.shuffle)
    return [problem.id for problem in (data.window(0, n, config.effective_seed, n) if n else [])]


def check_commits(path: Path, config: JobConfig) -> Committed:
    """At each commit, what was trained and what is pending are the problems that were begun: no doubles and no gaps."""
    commits = sorted((path / config.name / "state").iterdir(), key=lambda item: int(item.name))
    assert len(commits) > config.steps // 2
    for item in commits:
        committed = JobDirectory(path / config.name).committed(int(item.name))
        ids = sequence(config, committed.position)
        done = trained(path, config, committed.step)
        assert all(len(step) == config.rl.groups_per_step for step in done)
        pending = [ids[position] for position in committed.pending]
        assert Counter(number for step in done for number in step) + Counter(pending) == Counter(ids), item
    assert committed.step == config.steps
    return committed


def check_quiet(run: FakeRun) -> None:
    """Nothing is loaded, in flight or held."""
    assert run.engine.loaded == frozenset()
    assert run.engine.loads == run.engine.unloads
    assert run.engine._asked == 0
    assert run.services.scheduler.in_flight == 0
    assert not inside.slots(run.trainer)


def lateness(run: FakeRun, path: Path, config: JobConfig) -> list[int]:
    """How many steps after it was begun each problem was trained; no problem may come twice."""
    asked = [request for request in run.engine.requests if request.job == config.name and "/train/" in request.id]
    begun = {place(request): int(request.id.split("/")[2]) for request in asked}
    places = {number: position for position, number in enumerate(sequence(config, len(begun)))}
    assert len(places) == len(begun), "take fewer steps: ids come again"
    steps = [[places[number] for number in step] for step in trained(path, config, config.steps)]
    assert all(step == sorted(step) for step in steps), "groups of a step are in data order"
    return [number - begun[position] for number, step in enumerate(steps) for position in step]


def test_a_step_takes_what_is_done_first_and_the_next_one_the_rest(tmp_path: Path) -> None:
    configs = [over(), job("good")]
    run_jobs(tmp_path / "alone", [configs[1]])
    run = run_jobs(tmp_path / "all", configs, UNEVEN)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    committed = check_commits(tmp_path / "all", configs[0])
    assert set(lateness(run, tmp_path / "all", configs[0])) == {0, 1}
    assert 0 < len(committed.pending) <= 2
    assert [record["staleness"] for record in records(tmp_path / "all", "a")[:-1]].count(1) >= 2
    assert run.jobs["a"].progress.inexact == ["steps take the groups that are done first (algorithm.over_provision)"]
    assert metrics(tmp_path / "all", "good") == metrics(tmp_path / "alone", "good")
    assert weights(tmp_path / "all", "good", 4) == weights(tmp_path / "alone", "good", 4)
    check_quiet(run)


@dataclass
class Middle:
    """Of each step: when one of the groups that it need not wait for is in the middle of an answer."""

    turn: int
    """In which answer."""
    newest: int = 0
    """The version of the step."""
    reached: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """By version."""


_ANSWER: contextvars.ContextVar[tuple[list[Chunk], asyncio.Event] | None] = contextvars.ContextVar(
    "answer", default=None
)
"""Of a row that may stay in the middle: its tokens, and whether it is aborted."""


class MiddleEngine(UnevenEngine):
    """One row of each step, of the last two groups that it begins, stays in the middle until it is put aside."""

    def __init__(self, middle: Middle, **fields: Any) -> None:
        super().__init__(**fields)
        self.middle = middle

    async def _complete(
        self,
        policy: FakePolicy,
        request: GenerateRequest,
        index: int,
        emit: Callable[[Chunk], None],
        aborted: asyncio.Event,
    ) -> None:
        answer = list[Chunk]()

        def emitted(chunk: Chunk) -> None:
            answer.append(chunk)
            emit(chunk)

        _, purpose, step, position, turn, _ = request.id.split("/")
        if purpose == "train" and request.adapter is not None:
            self.middle.newest = version = request.adapter.version
            if (version, int(turn)) == (int(step), self.middle.turn) and int(position) - 3 * version in (3, 4):
                _ANSWER.set((answer, aborted))
        await super()._complete(policy, request, index, emitted, aborted)

    async def suspend(self) -> None:
        await super().suspend()
        if (row := _ANSWER.get()) is None:
            return
        answer, aborted = row
        reached = self.middle.reached[self.middle.newest]
        if answer and answer[-1].finish_reason is None and not reached.is_set():
            reached.set()
            await aborted.wait()


class MiddleRewards(InlineRewards):
    """Scores no last answer before the step has got there, so that no step ends before."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        turn = len(context.transcripts[0]) // 2 - 1 if context.transcripts else 0
        if problem.id < 100 and turn == self.middle.turn:  # others are held out
            await self.middle.reached[self.middle.newest].wait()
        return await super().score(job, problem, completions)


@pytest.mark.parametrize(("environment", "capacity"), [("single", 40), ("retry", 40), ("retry", 5)])
def test_groups_that_were_put_aside_keep_their_tokens(environment: str, capacity: int, tmp_path: Path) -> None:
    config = over(environment=environment, steps=6)
    middle = Middle(turn=int(environment == "retry"))
    engine, rewards = functools.partial(MiddleEngine, middle), functools.partial(MiddleRewards, middle)
    setting = Setting(capacity=capacity, engine=engine, trainer=RememberingTrainer, rewards=rewards)
    run = run_jobs(tmp_path, [config], setting)
    assert run.state("a") is JobState.SUCCEEDED
    assert isinstance(run.engine, RememberingEngine)
    assert isinstance(run.trainer, RememberingTrainer)
    committed = check_commits(tmp_path, config)
    samples = [sample for step in run.trainer.samples["a"] for sample in step]
    check_samples(samples, run.engine, "a")
    assert len(samples) == 6 * 3 * 4
    assert committed.tokens_sampled == run.engine.sampled["a"], "tokens were sampled twice, or counted so"
    asked = [request for request in run.engine.requests if "/train/" in request.id and request.adapter]
    continued = [request for request in asked if request.sampling.max_tokens < 20]
    whole = [request for request in continued if place(request) not in committed.pending]
    assert {request.adapter.version for request in whole if request.adapter} == {1, 2, 3, 4, 5}
    for request in whole:
        prefix, n_partial = request.prompt_ids.tolist(), 20 - request.sampling.max_tokens
        versions = [one.versions for one in samples if one.token_ids[: len(prefix)].tolist() == prefix]
        assert versions, "the tokens that were sampled before are not in what was trained"
        assert request.adapter is not None
        before = {request.adapter.version - 1}
        assert any(set(one[len(prefix) - n_partial : len(prefix)].tolist()) == before for one in versions)
    if environment == "retry":
        assert any(request.id.split("/")[4] == "1" for request in continued), "no second turn was put aside"
    check_quiet(run)


class _FallingEngine(UnevenEngine):
    """Of three steps that are sampled at one time, the last is done first; each has a group that is far behind."""

    paces = (9, 90, 9, 4, 50, 4, 1, 20, 1)


@pytest.mark.parametrize("engine", [UnevenEngine, _FallingEngine])
@pytest.mark.parametrize(("lag", "in_flight"), [(0, "finish"), (2, "finish"), (2, "continue")])
def test_nothing_is_left_behind_when_several_steps_are_under_way(
    lag: int, in_flight: str, engine: type[FakeEngine], tmp_path: Path
) -> None:
    algorithm = {"groups_per_step": 2, "max_off_policy_steps": lag, "in_flight": in_flight}
    config = over(steps=5, algorithm=algorithm)
    run = run_jobs(tmp_path, [config], Setting(engine=engine, trainer=RememberingTrainer, capacity=40))
    assert run.state("a") is JobState.SUCCEEDED
    assert isinstance(run.engine, RememberingEngine)
    assert isinstance(run.trainer, RememberingTrainer)
    check_samples([sample for step in run.trainer.samples["a"] for sample in step], run.engine, "a")
    committed = check_commits(tmp_path, config)
    late = lateness(run, tmp_path, config)
    assert max(late) <= 1 + lag, "whoever was begun first is waited for first"
    assert any(late)
    assert not [position for position in committed.pending if position < 4], "a group of an early step was lost"
    check_quiet(run)


@pytest.mark.parametrize("factor", [1.25, 2.0, 4.0])
def test_as_many_groups_as_asked_for(factor: float, tmp_path: Path) -> None:
    """Also four times as many, which are trained in the order they were begun."""
    config = over(factor=factor, steps=4, algorithm={"groups_per_step": 2, "group_size": 2}, eval={"every": 0})
    run = run_jobs(tmp_path, [config], UNEVEN)
    check_commits(tmp_path, config)
    begun = {place(one) for one in run.engine.requests if "/train/" in one.id and one.id.split("/")[2] == "0"}
    assert begun == set(range(math.ceil(2 * factor)))
    assert max(lateness(run, tmp_path, config)) <= factor
    check_quiet(run)


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 2])
def test_a_pause_loses_no_problem(lag: int, tmp_path: Path) -> None:
    config = over(steps=6, algorithm={"max_off_policy_steps": lag})

    async def script(run: FakeRun) -> None:
        for step in (1, 3):
            await until(lambda step=step: run.jobs["a"].progress.step >= step)  # type: ignore[misc]
            run.pipeline.pause("a")
            await until(lambda: run.state("a") is JobState.PAUSED)
            committed = run.jobs["a"].directory.newest()
            assert committed is not None
            assert committed.position - len(committed.pending) == 3 * committed.step
            run.pipeline.resume("a")

    run = run_jobs(tmp_path, [config], UNEVEN, script)
    assert run.state("a") is JobState.SUCCEEDED
    check_commits(tmp_path, config)
    check_quiet(run)


class _CrashingTrainer(RememberingTrainer):
    """Fails in the fourth step."""

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        if len(self.samples["a"]) == 4:
            raise RuntimeError("the power is gone")
        return super().forward_backward(batch)


@pytest.mark.parametrize(("lag", "every"), [(0, 1), (0, 2), (2, 1)])
def test_a_crash_loses_no_problem(lag: int, every: int, tmp_path: Path) -> None:
    checkpoint = {"every": every, "keep": 50}
    config = over(steps=6, algorithm={"max_off_policy_steps": lag}, checkpoint=checkpoint, eval={"every": 0})
    crashed = run_jobs(tmp_path, [config], Setting(engine=UnevenEngine, trainer=_CrashingTrainer, capacity=40))
    assert crashed.state("a") is JobState.FAILED
    check_quiet(crashed)
    committed = crashed.jobs["a"].directory.newest()
    assert committed is not None
    assert (committed.step, bool(committed.pending)) == (3 - 3 % every, True)
    run = run_jobs(tmp_path, [config], UNEVEN)
    assert run.state("a") is JobState.SUCCEEDED
    check_commits(tmp_path, config)
    asked = [place(request) for request in run.engine.requests if "/train/" in request.id]
    assert set(committed.pending) <= set(asked[: 5 + len(committed.pending)]), "what was begun is taken up first"
    check_quiet(run)


def test_a_cancelled_job_leaves_nothing_behind(tmp_path: Path) -> None:
    for turns in range(0, 240, 12):

        async def script(run: FakeRun, turns: int = turns) -> None:
            await until(lambda: len(run.engine.requests) > 0)
            for _ in range(turns):
                await asyncio.sleep(0)
            run.pipeline.cancel("a")

        config = over(
            steps=50, environment="retry", eval={"every": 0}, algorithm={"max_off_policy_steps": turns % 24 // 12}
        )
        run = run_jobs(tmp_path / str(turns), [config], UNEVEN, script)
        assert run.state("a") is JobState.CANCELLED, turns
        check_quiet(run)


class _SilentRewards(InlineRewards):
    """Never answers for problems with odd numbers."""

    every: ClassVar[int] = 2

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        if problem.id % self.every:
            await asyncio.sleep(3600)
        return await super().score(job, problem, completions)


class _MoreSilentRewards(_SilentRewards):
    """Never answers but for one problem."""

    every = 100


@pytest.mark.parametrize("rewards", [_SilentRewards, _MoreSilentRewards])
def test_cancelling_waits_for_no_reward(rewards: type[RewardPool], tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        await until(lambda: run.services.scheduler.in_flight == 0 and len(run.engine.requests) == 5)
        run.pipeline.cancel("a")
        async with asyncio.timeout(PATIENCE):
            await until(lambda: run.state("a") is JobState.CANCELLED)

    check_quiet(run_jobs(tmp_path, [over()], Setting(rewards=rewards, holdout=0), script))


class _GatedEngine(FakeEngine):
    """Each job's requests wait at its gate."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.gates = {name: asyncio.Event() for name in ("a", "hog")}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        await self.gates[request.job].wait()
        async for chunk in super().generate(request):
            yield chunk


def test_a_step_does_not_wait_for_groups_whose_turn_has_not_come(tmp_path: Path) -> None:
    """They are put aside without a permit, which another job may hold for long."""

    async def script(run: FakeRun) -> None:
        assert isinstance(run.engine, _GatedEngine)
        accounts, gates = run.services.scheduler._accounts, run.engine.gates
        run.pipeline.pause("hog")
        await until(lambda: run.state("hog") is JobState.PAUSED and "a" in accounts and accounts["a"].running == 1)
        run.pipeline.resume("hog")
        await until(lambda: "hog" in accounts and bool(accounts["hog"].waiting))
        gates["a"].set()
        async with asyncio.timeout(PATIENCE):
            await until(lambda: run.jobs["a"].progress.step == 1)
        assert accounts["hog"].running == 1
        gates["hog"].set()

    config = over(steps=2, factor=2.0, algorithm={"groups_per_step": 1})
    setting = Setting(engine=_GatedEngine, capacity=4, holdout=0)
    run = run_jobs(tmp_path, [config, job("hog", steps=1)], setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    check_commits(tmp_path, config)
    check_quiet(run)


# --- faults ----------------------------------------------------------------------------------------------------------


class _RefusingEngine(UnevenEngine):
    """Can never serve the groups at positions 1 and 2."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if "/train/" in request.id and place(request) in (1, 2):
            raise EngineError("too long for this engine; shorten the prompt")
        async for chunk in super().generate(request):
            yield chunk


def _broken_for(numbers: Sequence[int]) -> Callable[[Problem, str], float]:
    def reward(problem: Problem, completion: str) -> float:
        if problem.id in numbers:
            raise ValueError("not this one")
        return vowels(problem, completion)

    return reward


@pytest.mark.parametrize("fault", ["engine", "reward"])
def test_groups_that_fail_are_failed_rollouts_and_no_more(fault: str, tmp_path: Path) -> None:
    numbers = sequence(over(), 3)[1:]
    config = over(reward=vowels if fault == "engine" else _broken_for(numbers), algorithm={"max_failed_fraction": 0.9})
    engine = _RefusingEngine if fault == "engine" else UnevenEngine
    run = run_jobs(tmp_path, [config], Setting(engine=engine, trainer=RememberingTrainer, capacity=40))
    assert run.state("a") is JobState.SUCCEEDED
    check_commits(tmp_path, config)
    assert sum(record["failed"] for record in records(tmp_path, "a")[:-1]) == 8
    logs = [path.read_text().splitlines() for path in (tmp_path / "a" / "rollouts").glob("[0-9]*.jsonl")]
    failed = {one["problem"] for log in logs for line in log if (one := json.loads(line))["error"]}
    assert failed == set(numbers)
    check_quiet(run)


class _BrokenEngine(UnevenEngine):
    """Breaks in the middle of a request of step 2, one of several second turns."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            if "a/train/2/" in request.id and request.id.split("/")[4] == "1":
                raise RuntimeError("the accelerator is gone")
            yield chunk


def test_a_broken_engine_fails_the_job_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_jobs(tmp_path / "alone", [job("good")])
    run = run_jobs(tmp_path / "all", [over(environment="retry"), job("good")], Setting(engine=_BrokenEngine))
    assert (run.state("a"), run.state("good")) == (JobState.FAILED, JobState.SUCCEEDED)
    assert "the accelerator is gone" in run.jobs["a"].progress.message
    assert metrics(tmp_path / "all", "good") == metrics(tmp_path / "alone", "good")
    check_quiet(run)
