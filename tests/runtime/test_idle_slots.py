"""A job that only waits for scores loses its slot where another has a use for it, and ends with the same bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from motet.core.types import JobState, Problem
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.runtime.slot_turns import SlotTimeouts
from tests.support.fake_run import FakeRun, InlineRewards, Setting, job, metrics, run_jobs, weights
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1


class Late(InlineRewards):
    """Scores nothing of the job `late` in its third step and after, until somebody comes."""

    def __init__(self) -> None:
        super().__init__()
        self.somebody = asyncio.Event()
        self.asked = 0

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        """Wait for somebody, then score."""
        if job == "late":
            self.asked += 1
            if self.asked > 11:
                await self.somebody.wait()
        return await super().score(job, problem, completions)


def test_a_job_that_waits_for_scores_gives_its_slot_away(tmp_path: Path) -> None:
    """`late` came first and has the only slot; the others of its tenant get it, and it goes on when somebody scores."""
    jobs = [job("late"), job("next"), job("last")]

    async def script(run: FakeRun) -> None:
        rewards = run.services.rewards
        assert isinstance(rewards, Late)
        await until(
            lambda: run.state("next") is JobState.SUCCEEDED and run.state("last") is JobState.SUCCEEDED, PATIENCE
        )
        assert not run.jobs["late"].state.final
        rewards.somebody.set()
        await until(lambda: run.jobs["late"].state.final, PATIENCE)
        run.pipeline.stop()

    found = run_jobs(tmp_path / "beside", jobs, Setting(slots=1, max_idle=0.5, rewards=Late), script)
    assert found.state("late") is JobState.SUCCEEDED
    assert found.jobs["late"].starts > 1
    sampled = Counter(request.id.rsplit("/", 1)[0] for request in found.engine.requests if request.job == "late")
    assert set(sampled.values()) == {1}, "neither what was scored nor what waited for it is sampled again"
    alone = run_jobs(tmp_path / "alone", [job("late")])
    assert set(sampled) == {request.id.rsplit("/", 1)[0] for request in alone.engine.requests}
    commits = [run.jobs["late"].directory.newest() for run in (found, alone)]
    assert len({one.tokens for one in commits if one is not None}) == 1, "nor counted again"
    assert metrics(tmp_path / "beside", "late") == metrics(tmp_path / "alone", "late")
    assert weights(tmp_path / "beside", "late", 4) == weights(tmp_path / "alone", "late", 4)


def test_a_job_that_is_to_pause_does_not_wait_for_scores_that_do_not_come(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        rewards = run.services.rewards
        assert isinstance(rewards, Late)
        await until(lambda: rewards.asked > 11, PATIENCE)
        run.pipeline.pause("late")
        await until(lambda: run.state("late") is JobState.PAUSED, PATIENCE)
        run.pipeline.stop()

    run_jobs(tmp_path, [job("late")], Setting(slots=1, max_idle=0.5, rewards=Late), script)


def test_whoever_is_slow_is_given_twice_as_long() -> None:
    now = 0.0
    timeouts = SlotTimeouts(10.0, lambda: now)

    def waits_until_sent(step: int) -> float:
        nonlocal now
        began = now
        while not timeouts.expired("slow", step, waits=True):
            now += 1.0
        timeouts.preempted("slow", step)
        return now - began

    assert [waits_until_sent(0) for _ in range(4)] == [10, 20, 40, 80]
    assert waits_until_sent(1) == 10  # it got on
    for _ in range(100):
        now += 1.0
        assert not timeouts.expired("busy", 0, waits=now % 5 > 0)
    timeouts.forget("slow")
    assert waits_until_sent(1) == pytest.approx(10)
