"""One job's fault stays that job's: broken rewards, overflow, lying engines, failing devices. Others keep their bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.config import JobConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Segment, Trained
from motet.core.errors import EngineError, RankGone
from motet.core.types import AdapterRef, Chunk, GenerateRequest, JobState, Problem
from motet.observe.report.read import read_run
from motet.rewards.reward_pool import RewardPool
from motet.runtime.learner import Executed, Learner, unheard
from motet.runtime.progress import JobChanged
from motet.runtime.rundir import CONTROL, read_commands
from tests.support import inside
from tests.support.counting import calls
from tests.support.fake_base import FakeAdapter
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_run import FakeRun, Setting, job, metrics, records, run_jobs, weights
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import until


def check_company(path: Path, configs: list[JobConfig], setting: Setting | None = None) -> FakeRun:
    """Run all jobs, and job `good` alone: it succeeds with the same bytes."""
    run_jobs(path / "alone", [config for config in configs if config.name == "good"])
    run = run_jobs(path / "all", configs, setting)
    assert run.state("good") is JobState.SUCCEEDED
    assert metrics(path / "all", "good") == metrics(path / "alone", "good")
    assert weights(path / "all", "good", 4) == weights(path / "alone", "good", 4)
    return run


# --- rewards, in their processes -------------------------------------------------------------------------------------


def made(body: str, parameters: str = "problem, completion") -> Callable[[Problem, str], Any]:
    """A function that is sent to its process by value."""
    space: dict[str, Any] = {}
    exec(f"def reward({parameters}):\n{body}", space)  # noqa: S102
    function: Callable[[Problem, str], Any] = space["reward"]
    return function


FAULTS = {
    "raises": ("    raise KeyError('no such thing')", "KeyError"),
    "hangs": ("    while True: pass", "more than 0.2 s of CPU time"),
    "not-a-number": ("    return float('nan')", "returned nan, not a finite number"),
    "dies": ("    import os; os._exit(3)", "exit status 3"),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FakeRun]:
    """All of them in one run, with a reward that fails sometimes, one that cannot be loaded, and a good one."""
    few = {"group_size": 2, "groups_per_step": 1}
    rewards = {
        name: {"name": "broken", "function": made(body), "cpu_seconds": 0.2} for name, (body, _) in FAULTS.items()
    }
    jobs = [job(name, reward=reward, algorithm=few) for name, reward in rewards.items()]
    body = "    return {0: 1 / 0 if False else float('nan')}.get(len(completion) % 5, float(len(completion)))"
    jobs.append(job("flaky", reward=made(body), algorithm={"max_failed_fraction": 0.9}))
    jobs.append(job("nowhere", reward="nowhere.py:reward"))
    path = tmp_path_factory.mktemp("faulty")
    return path, check_company(path, [*jobs, job("good")], Setting(rewards=RewardPool))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_reward_fails_its_job_with_a_reason(fault: str, faulty: tuple[Path, FakeRun]) -> None:
    path, run = faulty
    assert run.state(fault) is JobState.FAILED
    message = run.jobs[fault].progress.message
    assert FAULTS[fault][1] in message
    assert message.startswith("2 of 2 rollouts have no reward")
    assert "(limit: algorithm.max_failed_fraction = 0.25)" in message
    assert json.loads((path / "all" / fault / "status.json").read_text())["message"] == message
    logs = [log.read_text() for log in (path / "all" / fault / "rollouts").glob("*.jsonl")]
    lost = [json.loads(line)["error"] for log in logs for line in log.splitlines()]
    assert any(lost), "what was answered can be read"


def test_a_reward_that_fails_sometimes_loses_these_rollouts_only(faulty: tuple[Path, FakeRun]) -> None:
    path, run = faulty
    assert run.state("flaky") is JobState.SUCCEEDED
    assert sum(record["failed"] for record in records(path / "all", "flaky")[:-1]) > 0
    logs = [(path / "all" / "flaky" / "rollouts" / f"{step}.jsonl").read_text() for step in range(4)]
    lost = [one for log in logs for line in log.splitlines() if (one := json.loads(line))["error"]]
    assert {one["error"] for one in lost} == {"reward reward: returned nan, not a finite number"}
    assert all(one["reward"] is None for one in lost)
    told = run.jobs["flaky"].progress.diagnoses.warnings["failed"]
    assert "rollouts have no reward, commonest: reward reward: returned nan, not a finite number" in told
    (read,) = [one for one in read_run(path / "all").jobs if one.name == "flaky"]
    assert told in read.warnings


PARTLY = "    return [None if len(text) % 3 else float(len(text)) for text in completions]"
"""Judges a third of the answers."""


@pytest.mark.parametrize("body", [*(body for body, _ in FAULTS.values()), "    return 1e300", "    return 0.5"])
def test_a_monitor_changes_no_byte_whatever_it_does(body: str, tmp_path: Path) -> None:
    partly = {"name": "partly", "function": made(PARTLY, "completions, **columns")}
    monitor = {"name": "monitor", "function": made(body), "weight": 0, "cpu_seconds": 0.2}
    few = {"group_size": 4, "groups_per_step": 2}
    for where, rewards in (("alone", [partly]), ("watched", [partly, monitor])):
        config = job("a", reward=rewards, algorithm=few, steps=2)
        run = run_jobs(tmp_path / where, [config], Setting(rewards=RewardPool))
        assert run.state("a") is JobState.SUCCEEDED, run.jobs["a"].progress.message
        assert not json.loads((tmp_path / where / "a" / "status.json").read_text())["inexact"]
    assert weights(tmp_path / "alone", "a", 2) == weights(tmp_path / "watched", "a", 2)
    alone, watched = (records(tmp_path / where, "a")[0] for where in ("alone", "watched"))
    for measured in (watched, watched["eval"]):
        measured["reward_parts"].pop("monitor", None)
    assert watched == alone


def test_an_answer_that_no_reward_judges_is_no_failure(tmp_path: Path) -> None:
    """Also where most are not judged; a group with fewer than two judged answers leaves."""
    partly = {"name": "partly", "function": made(PARTLY, "completions, **columns")}
    run = run_jobs(tmp_path, [job("a", reward=[partly])], Setting(rewards=RewardPool))
    assert run.state("a") is JobState.SUCCEEDED, run.jobs["a"].progress.message
    lines = records(tmp_path, "a")[:-1]
    assert max(line["failed"] / line["rollouts"] for line in lines) > 0.25, "above the limit of failures"


def test_a_reward_that_cannot_be_loaded_fails_its_job_only(faulty: tuple[Path, FakeRun]) -> None:
    _, run = faulty
    assert run.state("nowhere") is JobState.FAILED
    assert "nowhere.py" in run.jobs["nowhere"].progress.message
    assert not inside.slots(run.trainer)


def test_overflow_stays_with_its_job(tmp_path: Path) -> None:
    """Rewards that float32 cannot hold make every gradient infinite or NaN."""

    def huge(problem: Problem, completion: str) -> float:
        return 1e39 * (1 + len(completion))

    config = job("bad", reward=huge, steps=9, algorithm={"type": "grpo", "advantage": "none"})
    run = check_company(tmp_path, [config, job("good")])
    assert run.state("bad") is JobState.FAILED
    assert (
        "not finite in 5 steps in a row (optimizer.max_skipped); lower optimizer.lr" in run.jobs["bad"].progress.message
    )
    found = records(tmp_path / "all", "bad")
    assert [record["skipped"] for record in found] == [True] * 5
    assert all(record["loss"] is None or math.isfinite(record["loss"]) for record in found)
    assert weights(tmp_path / "all", "bad", 4) == weights(tmp_path / "all", "bad", 3), "a skipped step moved weights"


# --- the probe -------------------------------------------------------------------------------------------------------


class _ForgetfulEngine(FakeEngine):
    """Answers with the base under the name of every adapter of job `bad`."""

    def install(self, ref: AdapterRef, adapter: FakeAdapter) -> None:
        if ref.name.startswith("bad."):
            adapter = FakeAdapter.fresh(adapter.rank, adapter.alpha, 0)
        super().install(ref, adapter)


class _StaleEngine(FakeEngine):
    """Answers with version 1 from version 2 on."""

    first: FakeAdapter | None = None

    def install(self, ref: AdapterRef, adapter: FakeAdapter) -> None:
        if ref.name.startswith("bad."):
            self.first = adapter if ref.version == 1 else self.first
            adapter = adapter if ref.version < 2 or self.first is None else self.first
        super().install(ref, adapter)


class _MixedUpSync(FakeSync):
    """Publishes another job's weights under the name of `bad`."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        await super().publish("good" if name == "bad" and ref.version == 2 else name, ref)


class _NaNTrainer(FakeTrainer):
    """Writes NaN into the third version of job `bad`."""

    def weights(self, name: str) -> FakeAdapter:
        found = super().weights(name)
        return found if name != "bad" else FakeAdapter(found.rank, found.alpha, found.a, found.b * np.nan)


LIES = {
    "base": (Setting(engine=_ForgetfulEngine), "with the base model: the adapter was not applied", 1),
    "stale": (Setting(engine=_StaleEngine), "version 2 of 'bad' is not what was trained", 2),
    "another adapter": (Setting(sync=_MixedUpSync), "version 2 of 'bad' is not what was trained", 2),
    "not finite": (Setting(trainer=_NaNTrainer), "version 0 of 'bad' is not what was trained", 0),
    "stale, within a tolerance": (
        Setting(engine=_StaleEngine, tolerance=1e-4),
        "version 2 of 'bad' is not what was trained",
        2,
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_probe_catches_an_engine_that_lies(lie: str, tmp_path: Path) -> None:
    setting, reason, version = LIES[lie]
    configs = [job("bad", eval={"every": 1}), job("good", steps=4)]
    run = check_company(tmp_path, configs, setting)
    assert run.state("bad") is JobState.FAILED
    assert reason in run.jobs["bad"].progress.message
    asked = {request.adapter.version for request in run.engine.requests if request.job == "bad" and request.adapter}
    assert version not in asked, "a rollout was sampled from a version that failed its probe"
    assert run.engine.loaded == frozenset()


# --- engine, trainer, device -----------------------------------------------------------------------------------------


class _RefusingEngine(FakeEngine):
    """Can never serve problem 7 of job `bad`."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if request.job == "bad" and "/0/0/" in request.id:
            raise EngineError("too long for this engine; shorten the prompt")
        async for chunk in super().generate(request):
            yield chunk


class _BrokenEngine(FakeEngine):
    """Breaks in the middle of requests of job `bad`."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            if request.job == "bad":
                raise RuntimeError("the accelerator is gone")
            yield chunk


class _BrokenTrainer(FakeTrainer):
    """Fails whenever segments of job `bad` are in a batch."""

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        if any(segment.adapter == "bad" for segment in batch.segments):
            raise MemoryError("out of memory")
        return super().forward_backward(batch)


class _PartedTrainer(FakeTrainer):
    """A rank of its base is gone after a while."""

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        if self.weights(name).b.any():
            raise RankGone("rank 1 of 2 ended")
        return super().optim_step(name, optimizer)


class _FullTrainer(FakeTrainer):
    """Has no room for job `bad`."""

    def add_adapter(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name == "bad":
            raise RuntimeError("no room")
        super().add_adapter(name, *args, **kwargs)


def test_requests_that_cannot_be_served_are_failed_rollouts(tmp_path: Path) -> None:
    bad = job("bad", algorithm={"max_failed_fraction": 0.5}, eval={"every": 0}, steps=2)
    run = check_company(tmp_path, [bad, job("good")], Setting(engine=_RefusingEngine))
    assert run.state("bad") is JobState.SUCCEEDED
    assert [(record["failed"], record["groups"]) for record in records(tmp_path / "all", "bad")[:2]] == [(4, 2), (4, 2)]


@pytest.mark.parametrize("part", ["engine", "trainer", "slots"])
def test_a_failing_device_is_reported_and_not_waited_for(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {
        "engine": (Setting(engine=_BrokenEngine), "the accelerator is gone"),
        "trainer": (Setting(trainer=_BrokenTrainer), "out of memory"),
        "slots": (Setting(trainer=_FullTrainer), "no room"),
    }
    setting, reason = parts[part]
    setting.train_tokens = 64  # several batches a step, none of them shared
    gc.freeze()  # what was there before is not looked through
    run = check_company(tmp_path, [job("bad"), job("good")], setting)
    message = run.jobs["bad"].progress.message
    assert run.state("bad") is JobState.FAILED
    assert reason in message
    assert "error.log" in message
    assert "Traceback" in (tmp_path / "all" / "bad" / "error.log").read_text()
    gc.collect()
    gc.unfreeze()
    assert not caplog.records, "asyncio complains of exceptions that nobody looked at"
    assert not inside.slots(run.trainer)
    assert run.engine.loaded == frozenset()


def test_a_failed_job_goes_on_after_the_cause_is_mended(tmp_path: Path) -> None:
    healthy = tmp_path / "healthy"

    def fails_at_first(problem: Problem, completion: str) -> float:
        if not healthy.exists() and problem.id % 2:
            raise ValueError("not yet")
        return float(len(completion))

    async def script(run: FakeRun) -> None:
        await until(lambda: run.state("a") is JobState.FAILED)
        healthy.touch()
        run.pipeline.resume("a")

    run = run_jobs(tmp_path / "run", [job("a", reward=fails_at_first), job("long", steps=40)], script=script)
    assert run.state("a") is JobState.SUCCEEDED
    run_jobs(tmp_path / "plain", [job("a", reward=fails_at_first)])
    assert metrics(tmp_path / "run", "a") == metrics(tmp_path / "plain", "a")


def test_a_rank_that_is_gone_is_no_fault_of_a_job(tmp_path: Path) -> None:
    """The run, or the host, ends by itself; whoever goes on with the job finds it as it was."""
    run = run_jobs(tmp_path / "run", [job("a")], Setting(trainer=_PartedTrainer))
    assert run.state("a") is JobState.RUNNING
    run_jobs(tmp_path / "run", [job("a")])
    run_jobs(tmp_path / "plain", [job("a")])
    assert metrics(tmp_path / "run", "a") == metrics(tmp_path / "plain", "a")


class _PickyTrainer(FakeTrainer):
    """Runs out of memory whenever `greedy` is in a batch, from the first shared one on."""

    def __init__(self, *, slots: int = 16) -> None:
        super().__init__(slots=slots)
        self.shared: list[set[str]] = []

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        stats = super().forward_backward(batch)
        names = {segment.adapter for segment in batch.segments}
        if "greedy" in names and (self.shared or len(names) > 1):
            self.shared.append(names)
            raise MemoryError("out of memory")
        return stats


class _GatheringLearner(Learner):
    """Trains nobody before three jobs wait for it, twice. Left alone, two groups of jobs may train by turns for ever."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._calls = 0
        self._gathered = [asyncio.Event(), asyncio.Event()]

    async def train(self, job: str, segments: tuple[Segment, ...], executed: Executed = unheard) -> tuple[Trained, ...]:
        call, self._calls = self._calls, self._calls + 1
        if call < 6:
            if call % 3 == 2:
                self._gathered[call // 3].set()
            await self._gathered[call // 3].wait()
        return await super().train(job, segments, executed)


def test_a_batch_that_fails_takes_only_its_own_job_down(tmp_path: Path) -> None:
    """Whoever shared the batch goes on from its last commit, with the same bytes; the one at fault fails, trained apart."""
    setting = Setting(trainer=_PickyTrainer, learner=_GatheringLearner, train_tokens=100_000)
    run = check_company(tmp_path, [job("greedy", steps=50), job("other"), job("good")], setting)
    assert isinstance(run.trainer, _PickyTrainer)
    assert run.trainer.shared == [{"greedy", "other", "good"}, {"greedy"}]
    assert run.state("greedy") is JobState.FAILED
    assert "out of memory" in run.jobs["greedy"].progress.message
    assert run.state("other") is JobState.SUCCEEDED


def test_a_job_that_resumes_does_not_hold_up_others_while_it_waits_for_the_disk(tmp_path: Path) -> None:
    """What is written at the start of a job is synced, and a host that takes over has hundreds of jobs to start."""
    run_jobs(tmp_path, [job("late", steps=2)])
    counts = list[int]()

    async def script(run: FakeRun) -> None:
        with calls(own_thread=True) as counted:
            await until(lambda: run.state("late") is JobState.SUCCEEDED)
        counts.append(counted["JobDirectory.restore"])

    run_jobs(tmp_path, [job("late", steps=2), job("other")], None, script)
    assert counts == [0]


def test_of_many_jobs_some_are_looked_at_for_commands_each_time(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        jobs = list(run.jobs.values())
        for one in jobs:
            (one.directory.path / CONTROL).write_text("pause")
        heard = list[str]()
        for turn in range(3):
            with calls() as counted:
                heard += [name for name, _ in read_commands(jobs, turn)]
            assert counted["Path.read_text"] <= 40
        assert sorted(heard) == sorted(run.jobs)
        run.pipeline.stop()

    run_jobs(tmp_path, [job(f"job-{number}") for number in range(101)], Setting(slots=1), script)


def test_a_command_that_cannot_be_read_is_told_once_and_the_next_is_obeyed(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        run.pipeline.pause("told")
        control, told = tmp_path / "told" / CONTROL, run.jobs["told"].progress
        heard: list[object] = []
        run.jobs["told"].observer = heard.append
        control.mkdir()
        await until(lambda: f"{control} is ignored: Is a directory; remove the file" in told.message)
        message = told.message
        await asyncio.sleep(0.7)  # it is looked for twice
        assert told.message == message
        assert heard == [JobChanged("told", JobState.PAUSED, message, [])]  # so it is told where a host has the job
        control.rmdir()
        control.write_text("cancel")

    run = run_jobs(tmp_path, [job("a"), job("told")], Setting(slots=1), script)
    assert run.state("told") is JobState.CANCELLED


def test_a_directory_that_is_gone_is_the_trouble_of_its_job_alone(tmp_path: Path) -> None:
    async def script(run: FakeRun) -> None:
        await until(lambda: run.state("a") is JobState.RUNNING)
        (tmp_path / "a" / "control").mkdir()  # a command that cannot be read, as another user's
        shutil.rmtree(tmp_path / "gone")
        shutil.rmtree(tmp_path / "paused")
        run.pipeline.pause("paused")
        await asyncio.sleep(0.5)  # commands are looked for meanwhile
        run.pipeline.cancel("paused")

    run = run_jobs(tmp_path, [job("a", steps=40), job("gone"), job("paused")], Setting(slots=1), script)
    assert run.state("a") is JobState.SUCCEEDED
    assert (run.state("gone"), run.state("paused")) == (JobState.FAILED, JobState.CANCELLED)
    assert "No such file or directory" in run.jobs["gone"].progress.message
