"""What a job does in one turn of the event loop does not grow with the numbers that its owner chooses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.policy_gradient import OfTokens, PolicyGradient
from motet.algorithms.supervised import Supervised
from motet.config import AdapterConfig, RewardConfig
from motet.core.batch import Sample, Segment
from motet.core.device import Device
from motet.core.errors import JobFailed
from motet.core.types import Group, JobState, Message, Problem, Rollout
from motet.data.dataset import Dataset
from motet.data.problems import Problems
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.rewards.reward_elsewhere import MOST_TOGETHER, in_parts
from motet.rewards.reward_pool import RewardPool
from motet.runtime.learner import Learner
from motet.runtime.rollout_loop import check_failures
from motet.runtime.sampling import _UNDER_WAY
from motet.runtime.scheduler import FairScheduler
from tests.support.fake_run import FakeRun, InlineRewards, Setting, job, problems, run_jobs
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import until


class _SilentRewards(InlineRewards):
    """Never answers, and counts who waits."""

    waiting, most = 0, 0

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        self.waiting += 1
        type(self).most = max(self.most, self.waiting)
        try:
            await asyncio.sleep(3600)
        finally:
            self.waiting -= 1
        raise AssertionError


@pytest.mark.parametrize("lag", [0, 3])
def test_so_many_groups_of_a_job_are_under_way(lag: int, tmp_path: Path) -> None:
    """All that wait for scores end in one turn when their job is cancelled."""

    async def script(run: FakeRun) -> None:
        rewards = run.services.rewards
        assert isinstance(rewards, _SilentRewards)
        await until(lambda: rewards.waiting == _UNDER_WAY)
        for _ in range(200):
            await asyncio.sleep(0)
        run.pipeline.cancel("a")
        await until(lambda: run.state("a") is JobState.CANCELLED)

    _SilentRewards.most = 0
    algorithm = {"group_size": 2, "groups_per_step": 2 * _UNDER_WAY, "max_off_policy_steps": lag}
    config = job("a", sampling={"max_tokens": 1}, algorithm=algorithm, eval={"every": 0})
    run_jobs(tmp_path, [config], Setting(rewards=_SilentRewards, jitter=None, capacity=64), script)
    assert _SilentRewards.most == _UNDER_WAY


class _Watched(PolicyGradient):
    """Notes in which thread a step's rollouts become samples."""

    def _note(self) -> None:
        THREADS.add(threading.current_thread() is threading.main_thread())

    def advantages(self, groups: Sequence[Group], max_tokens: int) -> Sequence[Sequence[OfTokens]]:
        self._note()
        return super().advantages(groups, max_tokens)

    def weighed(self, batch: StepBatch) -> StepBatch:
        self._note()
        return super().weighed(batch)


THREADS = set[bool]()


def test_a_step_becomes_samples_outside_the_event_loop(tmp_path: Path) -> None:
    THREADS.clear()
    config = job("a", steps=1).model_copy(update={"algorithm": _Watched(group_size=4, groups_per_step=3)})
    assert run_jobs(tmp_path, [config]).state("a") is JobState.SUCCEEDED
    assert {False} == THREADS


class _Dying(dict[str, str]):
    """Notes in which thread it is freed."""

    def __del__(self) -> None:
        THREADS.add(threading.current_thread() is threading.main_thread())


class _DyingRewards(InlineRewards):
    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        scored = await super().score(job, problem, completions, context)
        return [replace(one, extra=_Dying()) for one in scored]


def test_a_step_is_freed_outside_the_event_loop(tmp_path: Path) -> None:
    """So many objects at once would keep it for long."""
    THREADS.clear()
    run_jobs(tmp_path, [job("a", steps=2, eval={"every": 1})], Setting(rewards=_DyingRewards))
    assert {False} == THREADS


def test_few_passes_of_a_call_wait_for_the_device_at_a_time() -> None:
    """Each turn looks at all that wait."""
    tokens, mask = np.arange(8, dtype=np.int32), np.arange(8) > 3
    zeros = np.zeros(8, np.float32)
    sample = Sample(tokens, mask, zeros, mask.astype(np.float32), np.zeros(8, np.int32))
    most = 0

    async def run() -> None:
        trainer, device, scheduler = FakeTrainer(slots=1), Device(), FairScheduler(8)
        trainer.add_adapter("a", AdapterConfig(rank=4), seed=1)
        scheduler.join("a", 1.0)
        learner = Learner(trainer, device, 16, scheduler)

        def executed(work: int) -> None:
            nonlocal most
            most = max(most, len(learner._waiting))

        try:
            segments = tuple(Segment("a", (sample,), Supervised(), 1.0) for _ in range(500))
            assert len(await learner.train("a", segments, executed)) == 500
            assert len(await learner.score("a", segments, executed)) == 500
        finally:
            device.close()

    asyncio.run(run())
    assert 0 < most <= 8


def _one(problem: Problem, completion: str) -> float:
    """A reward of one answer at a time."""
    return float(len(completion))


def test_few_calls_for_the_answers_of_a_group_begin_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        pool = RewardPool(1)
        rewards = [RewardConfig(name=f"mine{n}", function=_one) for n in range(4)]
        try:
            await pool.register("job", rewards)
            before = len(asyncio.all_tasks())
            texts = ["x" * (n % 7) for n in range(200)]
            scoring = asyncio.create_task(pool.score("job", Problem(1, (Message("user", "a"),), "b"), texts))
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) - before < 30
            assert [one.reward for one in await scoring] == [4.0 * (n % 7) for n in range(200)]
        finally:
            await pool.close()

    asyncio.run(run())


class _Counted(list[int]):
    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def test_answers_are_put_into_messages_in_one_pass() -> None:
    sizes = _Counted([MOST_TOGETHER // 3] * 2 + [10] * 500 + [MOST_TOGETHER])
    parts = list(in_parts([*range(len(sizes))], sizes, MOST_TOGETHER))
    assert [len(part) for part in parts] == [502, 1]
    assert sizes.looks <= 2 * len(sizes)


def test_the_seed_of_an_evaluation_is_that_of_all_its_facts_as_one_text() -> None:
    rows = Problems.of([*problems(5), Problem(9, (Message("system", "é"), Message("user", '"')), "")])
    facts = [[one.id, one.answer, *([text.role, text.content] for text in one.messages)] for one in rows]
    wanted = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest()
    assert Dataset(rows, rows, None).evaluation_seed == int.from_bytes(wanted, "little")


class _Reason(str):
    compared = 0

    def __eq__(self, other: object) -> bool:
        _Reason.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_the_commonest_of_many_reasons_is_counted_in_one_pass() -> None:
    problem = Problem(1, (), "")
    reasons = [_Reason(f"reason {n}") for n in range(300)] + [_Reason("reason 7")]
    rollouts = tuple(Rollout(problem, n, (), (), error=reason) for n, reason in enumerate(reasons))
    with pytest.raises(JobFailed, match=r"301 of 301 rollouts.*reason: reason 7"):
        check_failures([Group(problem, 0, 0, rollouts)], 0.25)
    assert _Reason.compared < 5000
