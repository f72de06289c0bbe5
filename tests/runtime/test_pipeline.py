"""Several jobs over one engine and one trainer, on the fakes: order, company, pause and cancel, staleness, evaluation."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.config import AdapterConfig, EnvironmentConfig, JobConfig
from motet.core.batch import Batch, Trained
from motet.core.errors import DeviceError
from motet.core.types import AdapterRef, Chunk, GenerateRequest, JobState, Problem
from motet.environments.episode_messages import AskEpisode, BeginEpisode, OfferEpisode
from motet.environments.remote_agents import AgentsElsewhere, EpisodesElsewhere
from motet.process.channel import ChannelMessage
from motet.runtime.progress import JobChanged, JobEvent, JobWorked
from tests.support import inside
from tests.support.cases import few
from tests.support.fake_base import FakePolicy
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_run import FakeRun, Setting, job, metrics, records, run_jobs, vowels, weights
from tests.support.fake_trainer import FakeTrainer
from tests.support.scheduling_policy import rows_between_turns
from tests.support.sending import sending
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1


def rollouts(path: Path, name: str, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name / "rollouts" / f"{log}.jsonl").read_text().splitlines()]


def result(path: Path, name: str, version: int = 4) -> tuple[bytes, bytes]:
    return metrics(path, name), weights(path, name, version)


def alone(path: Path, config: JobConfig, setting: Setting | None = None) -> tuple[bytes, bytes]:
    """What a job leaves when nobody else is there."""
    run_jobs(path / f"alone-{config.name}", [config], setting)
    return result(path / f"alone-{config.name}", config.name, config.steps)


def test_several_jobs_complete(tmp_path: Path) -> None:
    configs = [job("a"), job("b", steps=2), job("c", algorithm="dr_grpo", environment="retry")]
    run = run_jobs(tmp_path, configs)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert [record["step"] for record in records(tmp_path, "a")] == [0, 1, 2, 3, 4]
    assert len(records(tmp_path, "b")) == 3
    assert all(record["logprob_gap"] == 0 for record in records(tmp_path, "a")[:-1])
    assert run.engine.loaded == frozenset(), "a version stayed behind"
    assert run.engine.loads == run.engine.unloads
    assert not inside.slots(run.trainer)


def test_rewards_rise(tmp_path: Path) -> None:
    run_jobs(tmp_path, [job("a", steps=20)])
    found = [record["reward"] for record in records(tmp_path, "a")[:-1]]
    assert sum(found[-5:]) > 1.5 * sum(found[:5])


def test_more_jobs_than_slots_wait_by_priority(tmp_path: Path) -> None:
    ranks = {"plain": 0, "first": 20, "second": 10, "plain-2": 0}
    run = run_jobs(tmp_path, [job(name, steps=1, priority=rank) for name, rank in ranks.items()], Setting(slots=1))
    order = list(dict.fromkeys(request.job for request in run.engine.requests))
    assert order == ["first", "second", "plain", "plain-2"]
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}


SETTINGS = {
    "another order of events": Setting(jitter=1),
    "yet another": Setting(jitter=2),
    "no jitter": Setting(jitter=None),
    "one after another": Setting(slots=1),
    "two slots": Setting(slots=2),
    "a narrow engine": Setting(capacity=1),
    "batches of one job": Setting(train_tokens=64),
}


def test_bytes_do_not_depend_on_company_or_order(tmp_path: Path) -> None:
    configs = [
        job("a"),
        job("late", algorithm={"max_off_policy_steps": 2}),
        job("b", algorithm={"type": "dr_grpo", "updates_per_batch": 2}, environment="retry"),
        job("c", adapter={"rank": 16}, sampling={"max_tokens": 12}, algorithm={"kl": {"coef": 0.1}}),
    ]
    expected = {config.name: alone(tmp_path, config) for config in configs}
    for number, setting in enumerate(SETTINGS.values()):
        run = run_jobs(tmp_path / str(number), configs, setting)
        assert {name: result(tmp_path / str(number), name) for name in run.jobs} == expected, list(SETTINGS)[number]


def test_jobs_share_batches(tmp_path: Path) -> None:
    slow = functools.partial(FakeTrainer, seconds=0.1)  # while one batch is trained, others gather
    jobs = [job(name, steps=1, eval={"every": 0}) for name in "abcd"]
    run = run_jobs(tmp_path, jobs, Setting(trainer=slow, train_tokens=1024))
    assert any(len(set(names)) > 1 for names in run.trainer.batches), "the test of company never saw company"


@pytest.mark.slow
def test_others_have_their_turn_between_the_parts_of_a_large_group(tmp_path: Path) -> None:
    config, found = job("a", steps=1, algorithm={"group_size": 1024, "groups_per_step": 1}), list[int]()

    async def script(run: FakeRun) -> None:
        found.append(await rows_between_turns(run.services.scheduler, run.engine, lambda: run.state("a").final))

    run = run_jobs(tmp_path, [config], Setting(capacity=64, holdout=0), script)
    assert sum(len(request.seeds) for request in run.engine.requests) == 1024
    assert found[0] <= 64


def test_a_job_that_is_resumed_before_it_has_paused_goes_on(tmp_path: Path) -> None:
    config = job("a", steps=6)
    seen: list[JobState] = []

    async def change_of_mind(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 2)
        run.pipeline.pause("a")
        run.pipeline.resume("a")
        while not run.state("a").final:
            seen.append(run.state("a"))
            await asyncio.sleep(0.001)

    run = run_jobs(tmp_path / "changed", [config], script=change_of_mind)
    assert run.state("a") is JobState.SUCCEEDED
    assert JobState.PAUSED not in seen
    assert run.jobs["a"].starts == 1
    assert result(tmp_path / "changed", "a", 6) == alone(tmp_path, config)


class HeldTrainer(FakeTrainer):
    """Takes no slot back before it may, and breaks once when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves, self.may, self.breaks = threading.Event(), threading.Event(), False
        self.computes, self.goes_on = threading.Event(), threading.Event()

    def remove_adapter(self, name: str) -> None:
        self.leaves.set()
        self.may.wait(PATIENCE)
        super().remove_adapter(name)

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        if self.breaks:
            self.breaks = False
            self.computes.set()
            self.goes_on.wait(PATIENCE)
            raise DeviceError("it broke")
        return super().forward_backward(batch)


def test_a_job_that_is_resumed_while_it_leaves_its_slot_goes_on(tmp_path: Path) -> None:
    trainer, config = HeldTrainer(), job("a", steps=6)

    async def script(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 2)
        run.pipeline.pause("a")
        await until(trainer.leaves.is_set)
        run.pipeline.resume("a")
        trainer.may.set()
        await until(lambda: run.state("a").final)

    run = run_jobs(tmp_path / "changed", [config], Setting(trainer=lambda slots: trainer), script=script)
    assert run.state("a") is JobState.SUCCEEDED
    assert result(tmp_path / "changed", "a", 6) == alone(tmp_path, config)


def test_a_job_that_was_asked_to_pause_does_though_the_device_breaks(tmp_path: Path) -> None:
    trainer, config = HeldTrainer(), job("a", steps=6)
    trainer.may.set()

    async def script(run: FakeRun) -> None:
        await until(lambda: run.jobs["a"].progress.step >= 2)
        trainer.breaks = True
        await until(trainer.computes.is_set)
        run.pipeline.pause("a", "a reason")
        trainer.goes_on.set()
        await until(lambda: run.state("a") is JobState.PAUSED)
        assert run.jobs["a"].progress.message == "a reason"
        run.pipeline.resume("a")

    run = run_jobs(tmp_path / "changed", [config], Setting(trainer=lambda slots: trainer), script=script)
    assert run.state("a") is JobState.SUCCEEDED
    assert result(tmp_path / "changed", "a", 6) == alone(tmp_path, config)


def test_pause_resume_and_cancel_leave_the_others_alone(tmp_path: Path) -> None:
    long: dict[str, Any] = {"steps": 12, "checkpoint": {"every": 5, "keep": 20}, "eval": {"every": 0}}
    configs = [job("paused", **long), job("cancelled", **long), job("other", **long)]
    seen: list[JobState] = []

    async def script(run: FakeRun) -> None:
        await until(lambda: min(one.progress.step for one in run.jobs.values()) >= 2)
        run.pipeline.pause("paused")
        run.pipeline.cancel("cancelled")
        await until(lambda: run.state("paused") is JobState.PAUSED)
        step = run.jobs["paused"].progress.step
        committed = run.jobs["paused"].directory.newest()
        assert committed is not None
        assert committed.step == step, "steps that were done are not saved"
        await until(lambda: run.state("other").final)
        assert run.jobs["paused"].progress.step == step
        assert not inside.slots(run.trainer), "a paused job keeps its slot"
        seen.extend(one.state for one in run.jobs.values())
        run.pipeline.resume("paused")

    run = run_jobs(tmp_path, configs, script=script)
    assert seen == [JobState.PAUSED, JobState.CANCELLED, JobState.SUCCEEDED]
    assert run.state("paused") is JobState.SUCCEEDED
    assert result(tmp_path, "other", 12) == alone(tmp_path, configs[2])
    assert result(tmp_path, "paused", 12) == alone(tmp_path, configs[0])
    assert 2 <= len(records(tmp_path, "cancelled")) < 12
    assert run.jobs["cancelled"].progress.message.startswith("cancelled after step")


@pytest.mark.parametrize("word", ["pause", "cancel"])
def test_a_word_at_any_moment_counts(word: str, tmp_path: Path) -> None:
    """Also in the turn of the event loop between taking a slot and the first line of the job's task."""
    for turns in range(12):

        async def script(run: FakeRun, turns: int = turns) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            getattr(run.pipeline, word)("a")
            await until(lambda: run.state("a") in (JobState.PAUSED, JobState.CANCELLED, JobState.SUCCEEDED))
            assert run.state("a") is (JobState.PAUSED if word == "pause" else JobState.CANCELLED), turns
            if word == "pause":
                run.pipeline.cancel("a")

        run = run_jobs(tmp_path / str(turns), [job("a", steps=3)], script=script)
        assert run.state("a") is JobState.CANCELLED


class SlowTrainer(FakeTrainer):
    """Taking a slot and giving it back take time."""

    def add_adapter(self, name: str, shape: AdapterConfig, seed: int, *, head: bool = False) -> None:
        time.sleep(0.003)
        super().add_adapter(name, shape, seed)

    def remove_adapter(self, name: str) -> None:
        time.sleep(0.003)
        super().remove_adapter(name)


@pytest.mark.parametrize(("steps", "apart"), few([(0, 1), (0, 3), (1, 1), (1, 3)], (0, 3), (1, 3)))
@pytest.mark.slow
def test_a_job_that_is_cancelled_twice_leaves_no_slot_behind(steps: int, apart: int, tmp_path: Path) -> None:
    """At any moment: also while it takes its slot or gives it back, and waits for the device, where another job trains."""
    for place in range(0, 16, apart):

        async def script(run: FakeRun, place: int = place) -> None:
            await until(lambda: run.state("a") is JobState.RUNNING and run.jobs["a"].progress.step >= steps)
            await asyncio.sleep(place % 4 * 0.0021)
            run.pipeline.cancel("a")
            await asyncio.sleep(place // 4 * 0.0021)
            run.pipeline.cancel("a")
            await until(lambda: run.state("next") in (JobState.SUCCEEDED, JobState.FAILED))
            run.pipeline.cancel("other")

        jobs = [job("other", steps=5000, eval={"every": 0}), job("a", steps=50), job("next", steps=1)]
        trainer = functools.partial(SlowTrainer, seconds=0.003)
        run = run_jobs(tmp_path / str(place), jobs, Setting(slots=2, trainer=trainer), script)
        assert [run.state(name) for name in ("a", "next")] == [JobState.CANCELLED, JobState.SUCCEEDED], place
        assert not inside.slots(run.trainer)
        assert run.engine.loaded == frozenset()


class TokenByToken(FakeEngine):
    """Counts each token when it is sampled."""

    sampled = 0

    async def _complete(self, policy: FakePolicy, *rest: Any) -> None:
        def row(*place: Any) -> Any:
            self.sampled += 1
            return policy.row(*place)

        counting: Any = SimpleNamespace(row=row)
        await super()._complete(counting, *rest)


def talkative(name: str, config: EnvironmentConfig) -> AgentsElsewhere:
    """Agents that ask the address of their episode again and again, and hand no reward in."""
    talks = set[asyncio.Task[None]]()

    async def talk(number: int) -> None:
        episodes.hear(BeginEpisode(number, f"ep-{number}"))
        for turn in range(config.max_turns):
            body = json.dumps({"model": "any", "messages": [{"role": "user", "content": f"{number}, {turn}?"}]})
            await episodes.answer(AskEpisode(f"ep-{number}", "chat/completions", body, again=False))

    def send(message: ChannelMessage) -> None:
        if isinstance(message, OfferEpisode):
            talks.add(asyncio.create_task(talk(message.episode)))

    episodes = EpisodesElsewhere(sending(send))
    return AgentsElsewhere(name, config, episodes)


@pytest.mark.parametrize("environment", ["single", "retry", "agent"])
def test_what_is_sampled_is_charged_though_its_job_is_cancelled_in_the_step(environment: str, tmp_path: Path) -> None:
    """To the last token of answers that were under way, before it is told that the job is over."""
    config = job("a", environment={"name": environment, "max_turns": 99}, algorithm={"groups_per_step": 99})
    told: list[JobEvent] = []

    async def script(run: FakeRun) -> None:
        assert isinstance(run.engine, TokenByToken)
        run.jobs["a"].observer = told.append
        while run.engine.sampled < 100:
            await asyncio.sleep(0)
        run.pipeline.cancel("a")

    setting = Setting(engine=TokenByToken, tenants={"a": "us"}, holdout=0, agents=talkative)
    run = run_jobs(tmp_path, [config], setting, script)
    assert isinstance(run.engine, TokenByToken)
    assert run.engine.sampled >= 100
    charged, over = told[-2:]
    assert charged == JobWorked("a", 0, 0, run.engine.sampled)
    assert isinstance(over, JobChanged)
    assert over.state is JobState.CANCELLED


@pytest.mark.slow
def test_words_from_another_process_are_read(tmp_path: Path) -> None:
    config = job("a", steps=400, eval={"every": 0})
    failing = job("failing", reward=_broken)

    async def script(run: FakeRun) -> None:
        def say(name: str, word: str) -> None:
            (tmp_path / name / "control").write_text(word)

        await until(lambda: run.state("a") is JobState.RUNNING and run.state("failing") is JobState.FAILED)
        say("a", "resume")  # it runs already: no harm
        say("queued", "resume")  # it waits already: no harm, and later words are still read
        await until(lambda: not (tmp_path / "queued" / "control").exists())
        say("a", "nonsense")
        await until(lambda: not (tmp_path / "a" / "control").exists())
        say("a", "pause")
        await until(lambda: run.state("a") is JobState.PAUSED)
        await until(lambda: run.state("queued") is JobState.SUCCEEDED)
        say("failing", "resume")
        await until(lambda: len(run.trainer.batches) > 0 and run.jobs["failing"].progress.started > 0)
        await until(lambda: run.state("failing") is JobState.FAILED and not (tmp_path / "failing" / "control").exists())
        say("a", "cancel")

    run = run_jobs(tmp_path, [failing, config, job("queued", steps=1)], Setting(slots=1, jitter=None), script)
    assert run.state("a") is JobState.CANCELLED


def _broken(problem: Problem, completion: str) -> float:
    raise ValueError("this reward is broken")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_lag_is_exact(lag: int, tmp_path: Path) -> None:
    run = run_jobs(tmp_path, [job("a", steps=6, algorithm={"max_off_policy_steps": lag}), job("b")])
    found = [(record["version"], record["staleness"]) for record in records(tmp_path, "a")[:-1]]
    assert found == [(max(0, step - lag), step - max(0, step - lag)) for step in range(6)]
    asked = {(request.id.split("/")[2], request.adapter.version) for request in run.engine.requests
             if request.job == "a" and request.adapter and "/train/" in request.id}  # fmt: skip
    assert asked == {(str(step), max(0, step - lag)) for step in range(6)}
    gaps = [record["logprob_gap"] for record in records(tmp_path, "a")[:-1]]
    assert all((gap > 0) == (lag > 0 and step > 0) for step, gap in enumerate(gaps)), gaps


def test_sampling_runs_ahead_of_training(tmp_path: Path) -> None:
    """With a lag of one, step 1 is sampled before version 1 is there: step 0 is not trained before somebody asks for it."""
    asked = threading.Event()

    class AskedEngine(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            if "/train/1/" in request.id:
                asked.set()
            async for chunk in super().generate(request):
                yield chunk

    class WaitingTrainer(FakeTrainer):
        def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
            assert asked.wait(PATIENCE), "step 1 waits for version 1"
            return super().forward_backward(batch)

    setting = Setting(engine=AskedEngine, trainer=WaitingTrainer)
    run = run_jobs(tmp_path, [job("a", algorithm={"max_off_policy_steps": 1})], setting)
    assert run.state("a") is JobState.SUCCEEDED


@pytest.mark.parametrize("every", [1, 3])
def test_nothing_is_published_before_it_is_committed(every: int, tmp_path: Path) -> None:
    published: list[tuple[str, int]] = []

    class WatchfulSync(FakeSync):
        async def publish(self, name: str, ref: AdapterRef) -> None:
            job_directory = tmp_path / name
            if ref.version % every == 0 or ref.version == 4:
                state = json.loads((job_directory / "state" / str(ref.version) / "state.json").read_text())
                assert state["step"] == ref.version
                assert state["metrics_bytes"] == len(metrics(tmp_path, name))
            assert len(metrics(tmp_path, name).splitlines()) == ref.version, "the line comes before the version"
            published.append((name, ref.version))
            await super().publish(name, ref)

    configs = [job("a", checkpoint={"every": every}), job("b", checkpoint={"every": every})]
    run_jobs(tmp_path, configs, Setting(sync=WatchfulSync))
    assert sorted(published) == [(name, version) for name in "ab" for version in range(5)]


def test_dynamic_sampling_keeps_groups_with_a_signal_in_data_order(tmp_path: Path) -> None:
    def sometimes(problem: Problem, completion: str) -> float:
        return len(completion) if problem.id % 3 else 1.0

    config = job("a", reward=sometimes, algorithm={"oversampling": 2.0}, data={"source": "memory", "shuffle": False})
    run_jobs(tmp_path, [config])
    for record in records(tmp_path, "a")[:-1]:
        assert record["rollouts"] == 3 * 2 * 4
        seen = rollouts(tmp_path, "a", str(record["step"]))
        order = list(dict.fromkeys(one["problem"] for one in seen))
        first = record["step"] * 6
        assert order == [place % 20 for place in range(first, first + 6)], "the log is in data order"
        rewards = {number: {one["reward"] for one in seen if one["problem"] == number} for number in order}
        signal = [number for number in order if len(rewards[number]) > 1]
        assert any(number % 3 == 0 for number in order)
        assert record["groups"] == min(3, len(signal))
        trained = [one for one in seen if one["problem"] in signal[:3]]
        means = {number: sum(one["reward"] for one in trained if one["problem"] == number) / 4 for number in signal}
        trained = [one for one in trained if one["reward"] != means[one["problem"]]]
        assert record["tokens"] == sum(one["tokens"] for one in trained)
    plain = job("a", reward=sometimes, data={"source": "memory", "shuffle": False})
    run_jobs(tmp_path / "plain", [plain])
    assert [record["groups"] for record in records(tmp_path / "plain", "a")[:-1]] == [3, 3, 3, 3]


def test_a_second_try(tmp_path: Path) -> None:
    def halves(problem: Problem, completion: str) -> float:
        return float(len(completion) % 2)

    run_jobs(tmp_path, [job("a", reward=halves, environment="retry", sampling={"max_tokens": 12})])
    seen = rollouts(tmp_path, "a", "0")
    second = [one for one in seen if len(one["turns"]) == 2]
    assert second, "no first answer was wrong"
    assert len(second) < len(seen)
    for one in seen:
        assert "first_try" in one["reward_parts"]
        assert one["reward"] == halves(None, one["completion"]) * (0.5 if len(one["turns"]) == 2 else 1.0)  # type: ignore[arg-type]


def test_evaluations_stand_at_their_versions(tmp_path: Path) -> None:
    configs = [job("a", steps=5), job("b", steps=5, eval={"every": 0, "n": 3, "temperature": 0.0, "top_p": 0.9})]
    run = run_jobs(tmp_path, configs)
    found = {name: [record["step"] for record in records(tmp_path, name) if "eval" in record] for name in "ab"}
    assert found == {"a": [0, 2, 4, 5], "b": [0, 5]}
    last = records(tmp_path, "a")[-1]
    assert (last["step"], last["version"], set(last)) == (5, 5, {"step", "version", "eval"})
    assert {one["version"] for one in rollouts(tmp_path, "a", "eval-4")} == {4}
    assert last["eval"]["rollouts"] == 4
    assert records(tmp_path, "b")[-1]["eval"]["rollouts"] == 12
    assert [version for version, _ in run.jobs["a"].progress.evaluations] == [0, 2, 4, 5]
    requests = [request for request in run.engine.requests if "/eval/" in request.id and request.job == "b"]
    assert {request.adapter.version for request in requests if request.adapter} == {0, 5}
    assert {request.sampling.top_p for request in requests} == {0.9}


def test_without_held_out_rows_there_is_no_evaluation(tmp_path: Path) -> None:
    run_jobs(tmp_path, [job("a")], Setting(holdout=0))
    assert len(records(tmp_path, "a")) == 4
    assert not any("eval" in record for record in records(tmp_path, "a"))


def test_the_best_version_stays_also_between_commits(tmp_path: Path) -> None:
    """With a small rate evaluations are noise; the best of these is a version that `checkpoint.every` alone leaves out."""
    checkpoint = {"every": 4, "keep": 1}
    run = run_jobs(
        tmp_path,
        [job("a", steps=8, optimizer={"lr": 1e-6}, eval={"every": 1}, checkpoint=checkpoint)],
        Setting(holdout=5),
    )
    committed = run.jobs["a"].directory.newest()
    assert committed is not None
    trained = [item for item in run.jobs["a"].progress.evaluations if item[0]]
    best = max(trained, key=lambda item: (item[1], -item[0]))[0]
    assert committed.best_version == best
    assert best % 4, (
        "hold out another number of problems: the test shows nothing where the best version was committed anyway"
    )
    kept = run.jobs["a"].directory
    assert kept.steps() == [best, 8]
    assert {item.name for item in (tmp_path / "a" / "versions").iterdir()} == {
        f"v{version}" for step in kept.steps() for version in (step, kept.committed(step).best_version)
    }


def even_ones_differ(problem: Problem, completion: str) -> float:
    """Groups of problems with an odd id have no signal."""
    return vowels(problem, completion) if problem.id % 2 == 0 else 1.0


def test_dynamic_sampling_goes_on_until_the_step_is_full(tmp_path: Path) -> None:
    """In data order, and no further than the step's own problems: what it trains is what sampling all of them trains."""
    algorithm = {"type": "dapo", "group_size": 4, "groups_per_step": 3, "oversampling": 4.0}
    run_jobs(tmp_path, [job("a", reward=even_ones_differ, algorithm=algorithm)])
    lines = [line for line in records(tmp_path, "a") if "groups" in line]
    assert [line["groups"] for line in lines] == [3] * 4
    for line in lines:
        rewards = [rollout["reward"] for rollout in rollouts(tmp_path, "a", str(line["step"]))]
        different = [len(set(rewards[first : first + 4])) > 1 for first in range(0, len(rewards), 4)]
        assert sum(different) == 3  # not one more than it takes
        assert line["rollouts"] == len(rewards) < 4 * 12
    few = {**algorithm, "oversampling": 1.0}
    run_jobs(tmp_path / "few", [job("a", reward=lambda problem, completion: 1.0, algorithm=few)])
    assert [line["samples"] for line in records(tmp_path / "few", "a") if "samples" in line] == [0] * 4  # it ends
