"""A job that must leave within its step loses the step and does it again, with more time, until it ends with the same bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from motet.config import OF_CLIENT, EnvironmentConfig, JobConfig
from motet.core.batch import Batch, Optimizer, OptimStats, Trained
from motet.core.device import BusyTime
from motet.core.types import Chunk, FloatArray, GenerateRequest, JobState, Rollout
from motet.environments.episode import GroupContext, OwnEnvironment, answered, extended
from motet.environments.episode_messages import BeginEpisode, OfferEpisode
from motet.environments.remote_agents import AgentsElsewhere, EpisodesElsewhere
from motet.process.channel import ChannelMessage
from motet.rollout.sequences import aborted
from motet.runtime.journal import Datum, Failed, ForwardBackward, Gradient, Journal, OptimStep
from motet.runtime.pipeline import _drop_steps
from motet.runtime.progress import JobEvent, JobWorked
from motet.runtime.slot_turns import TURN_SECONDS, SlotTurns, StepTurns
from motet.runtime.slots import Rule
from tests.support import inside
from tests.support.fake_engine import FakeEngine
from tests.support.fake_run import FakeRun, Script, Setting, job, metrics, run_jobs, weights
from tests.support.fake_trainer import FakeTrainer
from tests.support.sending import sending
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.tier1

STEP_SECONDS = 60.0


class HeldEngine(FakeEngine):
    """Ends four groups of each job of the first tenant, and no further one before it may."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.free = set[str]()
        """Jobs whose groups end."""
        self.begun = Counter[str]()
        self.may, self.aborted = asyncio.Event(), defaultdict[str, asyncio.Event](asyncio.Event)

    def holds(self, request: GenerateRequest) -> bool:
        return request.job.startswith("a") and self.begun[request.job] > 4 and request.job not in self.free

    def let(self, *jobs: str) -> None:
        """Let the groups of these jobs end."""
        self.free.update(jobs)
        self.may.set()
        self.may = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.begun[request.job] += 1
        while self.holds(request):
            waits = [asyncio.create_task(one.wait()) for one in (self.may, self.aborted[request.id])]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
            if self.aborted[request.id].is_set():
                for index in range(len(request.seeds)):
                    yield aborted(index)
                return
        async for chunk in super().generate(request):
            yield chunk

    async def abort(self, name: str) -> None:
        self.aborted[name].set()
        await super().abort(name)


class Clocks:
    """Seconds, and device seconds of jobs, as a test says."""

    def __init__(self, run: FakeRun, slots: int) -> None:
        self._run, self.now, self.busy = run, 0.0, BusyTime()
        run.pipeline._turns = SlotTurns(clock=lambda: self.now)
        self.steps = run.pipeline._steps = StepTurns(self.busy, slots, STEP_SECONDS, lambda: self.now)

    async def tick(self, passes: float = 5.0) -> None:
        """Let `passes` seconds pass, in which running jobs have the device in turn, and let jobs leave and come."""
        pipeline = self._run.pipeline
        await until(lambda: all(one.loop is not None and one.loop._step for one in inside.running(pipeline).values()))
        self.now += passes
        self.busy.called(passes, dict.fromkeys(inside.running(pipeline), 1.0))
        pipeline._fill_slots()
        _drop_steps(inside.running(pipeline), self.steps)
        await until(lambda: not any(one.dropped for one in inside.running(pipeline).values()))
        pipeline._fill_slots()

    async def waited(self, newcomer: str) -> float:
        """Seconds that a job waits for its slot."""
        self._run.pipeline.add(self._run.jobs[newcomer])
        began = self.now
        while newcomer not in inside.running(self._run.pipeline):
            await self.tick()
        return self.now - began


def held(run: FakeRun) -> HeldEngine:
    assert isinstance(run.engine, HeldEngine)
    return run.engine


def long(name: str) -> JobConfig:
    """A job of one step, of which four groups end at once."""
    return job(name, steps=1, algorithm={"groups_per_step": 6})


def alike(beside: Path, alone: Path, *names: str, version: int = 1) -> None:
    """Jobs have the same bytes in two runs."""
    for name in names:
        assert metrics(beside, name) == metrics(alone, name)
        assert weights(beside, name, version) == weights(alone, name, version)


def test_a_newcomer_gets_the_slot_of_a_step_that_is_dropped_and_done_again(tmp_path: Path) -> None:
    jobs, told = [long(name) for name in ("a1", "a2", "b")], dict[str, int]()

    async def script(run: FakeRun) -> None:
        engine, before = held(run), run.jobs["a2"].observer

        def observe(event: JobEvent) -> None:
            before(event)
            if isinstance(event, JobWorked):
                told["a2"] = max(told.get("a2", 0), event.sampled)

        run.jobs["a2"].observer = observe
        await until(lambda: min(engine.begun["a1"], engine.begun["a2"]) > 4)
        run.pipeline.add(run.jobs["b"])
        try:
            await until(lambda: run.state("b") is JobState.SUCCEEDED)
            assert [run.jobs[name].progress.step for name in ("a1", "a2")] == [0, 0]
        finally:
            engine.let("a1", "a2")

    owners = {"a1": "a", "a2": "a", "b": "b"}
    late = frozenset({"b"})
    setting = Setting(slots=2, engine=HeldEngine, tenants=owners, step_seconds=0.0, holdout=0, late=late)
    run = run_jobs(tmp_path / "beside", jobs, setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert [run.jobs[name].starts for name in owners] == [1, 2, 1], "one was dropped, once"
    alone = run_jobs(tmp_path / "alone", jobs, Setting(holdout=0))
    alike(tmp_path / "beside", tmp_path / "alone", *owners)
    again = Counter(request.id.rsplit("/", 1)[0] for request in run.engine.requests if request.job == "a2")
    assert sum(again.values()) == 4 + 2, "groups that were finished are not sampled again"
    found = alone.jobs["a2"].directory.newest()
    assert found is not None
    assert 0 < told["a2"] < found.tokens_sampled, "what was sampled is charged when it leaves"


def test_sixteen_long_steps_keep_a_newcomer_no_longer_than_a_minute(tmp_path: Path) -> None:
    """Also the next ones, while a job whose step was dropped has a longer turn: another job gives way."""
    names = [f"a{number}" for number in range(16)]
    newcomers = [f"{tenant}1" for tenant in "bcde"]
    waited = dict[str, float]()

    async def script(run: FakeRun) -> None:
        clocks = Clocks(run, 16)
        await until(lambda: all(held(run).begun[name] > 4 for name in names))
        for name in newcomers:
            waited[name] = await clocks.waited(name)
            await until(lambda name=name: run.state(name).final and len(inside.running(run.pipeline)) == 16)  # type: ignore[misc]
            await clocks.tick()
            assert clocks.steps.longer in names
        held(run).let(*names)

    owners = {name: name[0] for name in (*names, *newcomers)}
    setting = Setting(slots=16, engine=HeldEngine, tenants=owners, holdout=0, late=frozenset(newcomers), capacity=400)
    jobs = [*map(long, names), *(job(name, steps=1) for name in newcomers)]
    run = run_jobs(tmp_path, jobs, setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert len(waited) == 4
    assert run.jobs["a15"].starts == 2, "who has a longer turn is not asked to leave"
    assert max(waited.values()) <= STEP_SECONDS + 5, waited


def test_a_job_whose_step_takes_three_turns_ends_and_nobody_waits_longer_than_they_last(tmp_path: Path) -> None:
    """It shares one slot with another tenant; at each turn it has twice the device seconds of the turn before."""
    granted, waited, names = list[float](), list[float](), ["b1", "b2", "b3"]

    async def script(run: FakeRun) -> None:
        clocks = Clocks(run, 1)
        for turn, newcomer in enumerate(names, 1):
            await until(lambda turn=turn: run.jobs["a"].starts == turn)  # type: ignore[misc]
            if turn == 3:
                run.pipeline.add(run.jobs[newcomer])
                await clocks.tick(granted[1] - 1)
                assert clocks.steps.longer == "a"
                assert "a" in inside.running(run.pipeline)
                held(run).let("a")
                return
            waited.append(await clocks.waited(newcomer))
            granted.extend(clocks.steps.granted.values())
            await until(lambda newcomer=newcomer: run.state(newcomer).final)  # type: ignore[misc]

    setting = Setting(
        slots=1, engine=HeldEngine, tenants={"a": "a", **dict.fromkeys(names, "b")}, holdout=0, late=frozenset(names)
    )
    run = run_jobs(tmp_path / "beside", [long("a"), *(job(name, steps=1) for name in names)], setting, script)
    run_jobs(tmp_path / "alone", [long("a")], Setting(holdout=0))
    alike(tmp_path / "beside", tmp_path / "alone", "a")
    assert run.jobs["a"].starts == 3
    first, second = granted[:2]
    assert second >= 2 * first >= 4 * STEP_SECONDS
    assert waited[1] <= first + STEP_SECONDS + 5


def silent(name: str, config: EnvironmentConfig) -> AgentsElsewhere:
    """A worker that takes the first episode, and says nothing."""
    taken = list[int]()

    def send(message: ChannelMessage) -> None:
        if isinstance(message, OfferEpisode) and not taken:
            taken.append(message.episode)
            asyncio.get_running_loop().call_soon(lambda: episodes.hear(BeginEpisode(message.episode, "taken")))

    episodes = EpisodesElsewhere(sending(send))
    return AgentsElsewhere(name, config, episodes)


def test_who_waits_for_somebody_outside_has_no_longer_turns(tmp_path: Path) -> None:
    waited, names = list[float](), ["b1", "b2", "b3", "b4"]

    async def script(run: FakeRun) -> None:
        clocks = Clocks(run, 1)
        for turn, newcomer in enumerate(names, 1):
            await until(lambda turn=turn: run.jobs["a"].starts == turn)  # type: ignore[misc]
            await until(
                lambda: (
                    inside.running(run.pipeline)["a"].loop is not None
                    and inside.running(run.pipeline)["a"].loop.outside
                )
            )
            waited.append(await clocks.waited(newcomer))
            assert not clocks.steps.granted
            await until(lambda newcomer=newcomer: run.state(newcomer).final)  # type: ignore[misc]
        run.pipeline.cancel("a")

    tenants = {"a": "a", **dict.fromkeys(names, "b")}
    setting = Setting(slots=1, tenants=tenants, holdout=0, late=frozenset(names), agents=silent)
    waiting = job("a", steps=1, environment={"name": "agent", "max_turns": 4})
    run_jobs(tmp_path, [waiting, *(job(name, steps=1) for name in names)], setting, script)
    assert max(waited) <= 2 * TURN_SECONDS + 10, "a turn, and no more of its step than anybody has"


def test_one_job_at_a_time_has_a_longer_turn_those_first_that_waited_longest() -> None:
    now, busy = 0.0, BusyTime()
    turns = StepTurns(busy, 4, STEP_SECONDS, lambda: now)
    turns.look({"a": 3, "b": 5})
    busy.called(210.0, {"a": 200.0, "b": 10.0})
    turns.dropped("a")
    turns.dropped("b")
    assert turns.granted == {"a": 400.0, "b": 2 * STEP_SECONDS}
    turns.look({"b": 5})
    assert turns.longer == "b", "the other one is not here"
    turns.look({"b": 5, "a": 3})
    assert turns.longer == "b", "a turn is not taken away"
    assert not turns.over("b", must_go=True)
    now += STEP_SECONDS
    assert turns.over("b", must_go=True), "a daily limit gives it no more than others"
    turns.look({"b": 6, "a": 3})
    assert (turns.longer, set(turns.granted)) == ("a", {"a"}), "its step has ended"
    turns.look({"b": 6, "a": 3}, gives={"a"})
    assert turns.longer == "", "it leaves already"
    busy.called(400.0, {"a": 1.0})
    turns.look({"b": 6, "a": 3})
    assert turns.longer == "", "its seconds are spent"
    turns.dropped("a")
    assert turns.granted["a"] == 800.0
    turns.look({})
    turns.look({"a": 3})
    now += 4 * 799.0
    turns.look({"a": 3})
    assert turns.longer == "a"
    now += 4.0
    turns.look({"a": 3})
    assert turns.longer == "", "nor longer than its share of the time, where servers sample"
    turns.forget("a")
    assert not turns.granted
    assert busy.of("a") == 0.0


def test_who_must_leave_has_its_seconds_and_begins_again_with_those_at_its_next_turn() -> None:
    now = 0.0
    turns = StepTurns(BusyTime(), 4, STEP_SECONDS, lambda: now)
    for _ in range(2):
        turns.look({"a": 0})
        assert not turns.over("a", must_go=True)
        now += STEP_SECONDS - 1
        assert not turns.over("a", must_go=True)
        now += 1
        assert turns.over("a", must_go=True)
        turns.look({})
    turns.look({"a": 0})
    turns.over("a", must_go=True)
    now += 30
    assert not turns.over("a", must_go=False), "it may stay"
    now += 30
    assert not turns.over("a", must_go=True)


class HeldEvaluations(HeldEngine):
    """Ends two prompts of each evaluation, and no further one before it may."""

    def holds(self, request: GenerateRequest) -> bool:
        return "/eval/0/" in request.id and int(request.id.split("/eval/0/")[1].split("/")[0]) > 1 and not self.free


def test_an_evaluation_gives_way_between_prompts(tmp_path: Path) -> None:
    config = job("a", steps=2)

    async def script(run: FakeRun) -> None:
        engine = held(run)
        await until(lambda: run.jobs["a"].progress.phase == "evaluating")
        running = inside.running(run.pipeline)["a"]
        running.preempt()
        assert running.leave()
        assert not running.leave(), "once"
        await until(lambda: run.jobs["a"].starts == 2)
        engine.let("a")

    run = run_jobs(tmp_path / "cut", [config], Setting(engine=HeldEvaluations), script)
    assert (run.state("a"), run.jobs["a"].starts) == (JobState.SUCCEEDED, 2)
    alone = run_jobs(tmp_path / "alone", [config], Setting())
    alike(tmp_path / "cut", tmp_path / "alone", "a", version=2)
    assert run.jobs["a"].progress.evaluations == alone.jobs["a"].progress.evaluations
    asked = Counter(request.id.split("/")[3] for request in run.engine.requests if "/eval/0/" in request.id)
    assert asked == dict.fromkeys("0123", 1), "prompts that were done are not sampled again"


class CutTrainer(FakeTrainer):
    """Calls `cut` during every second pass, until it was called a number of times."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.cut: Callable[[], None] = lambda: None
        self.passes = 0

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        self.passes += 1
        if self.passes % 2 == 0 and self.passes < 20:
            self.cut()
        return super().forward_backward(batch)


def cut_in(run: FakeRun) -> None:
    """Let the trainer of a run cut the job `a`."""
    loop, trainer = asyncio.get_running_loop(), run.trainer
    assert isinstance(trainer, CutTrainer)

    def cut() -> None:
        running = inside.running(run.pipeline).get("a")
        if running is not None and running.pause is None:
            running.preempt()
            running.leave()

    trainer.cut = lambda: loop.call_soon_threadsafe(cut)  # type: ignore[assignment]


KINDS: dict[str, dict[str, Any]] = {
    "with a reference": {"algorithm": {"kl": {"coef": 0.1}}, "checkpoint": {"every": 4}},
    "several updates": {"algorithm": {"updates_per_batch": 3}, "checkpoint": {"every": 4}},
    "sampled ahead": {"algorithm": {"max_off_policy_steps": 2}},
    "oversampled": {"algorithm": {"oversampling": 2.0}},
    "the first that are done": {"algorithm": {"over_provision": 2.0}},
    "of rows": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_dropped_again_and_again_ends_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    config = job("a", **KINDS[kind])
    if kind == "of rows":
        rows = {"type": "sft", "rows_per_step": 12}
        tree = {"name": "a", "data": "in memory", "adapter": {"rank": 4}, "algorithm": rows, "steps": 4}
        config = JobConfig.model_validate({**tree, "eval": {"every": 2}, "optimizer": {"lr": 0.05}})
    setting = Setting(trainer=CutTrainer, train_tokens=32, micro_batch_tokens=32)

    async def script(run: FakeRun) -> None:
        cut_in(run)

    run = run_jobs(tmp_path / "cut", [config], setting, script)
    assert run.state("a") is JobState.SUCCEEDED
    assert run.jobs["a"].starts > 3, "the test of cuts never saw one"
    if kind != "the first that are done":
        run_jobs(tmp_path / "alone", [config], setting)
        alike(tmp_path / "cut", tmp_path / "alone", "a", version=4)


class CutAfterUpdates(CutTrainer):
    """Calls `cut` after the first of the three optimizer steps of a training step, a few times."""

    updates = 0

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        return FakeTrainer.forward_backward(self, batch)

    def optim_step(self, name: str, optimizer: Optimizer) -> OptimStats:
        self.updates += 1
        done = super().optim_step(name, optimizer)
        if self.updates in (1, 3, 7, 12):
            self.cut()
        return done


def test_a_step_that_is_dropped_after_some_of_its_optimizer_steps_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Also if its last commit is due only after more steps."""
    config = job("a", algorithm={"updates_per_batch": 3}, checkpoint={"every": 4})

    async def script(run: FakeRun) -> None:
        cut_in(run)

    run = run_jobs(tmp_path / "cut", [config], Setting(trainer=CutAfterUpdates), script)
    assert run.state("a") is JobState.SUCCEEDED
    assert run.jobs["a"].starts > 2, "the test of cuts never saw one"
    assert isinstance(run.trainer, CutAfterUpdates)
    assert run.trainer.updates > 4 * 3, "optimizer steps were done again"
    run_jobs(tmp_path / "alone", [config], Setting())
    alike(tmp_path / "cut", tmp_path / "alone", "a", version=4)


class CountedForward(FakeTrainer):
    """Counts the passes without a gradient, and calls `cut` in the fifth one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.cut: Callable[[], None] = lambda: None
        self.passes = 0

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        self.passes += 1
        if self.passes == 5:
            self.cut()
        return super().forward(batch, base=base)


def test_an_evaluation_of_rows_gives_way_between_them_and_goes_on(tmp_path: Path) -> None:
    tree = {"name": "a", "data": "in memory", "adapter": {"rank": 4}, "steps": 1, "optimizer": {"lr": 0.05}}
    config = JobConfig.model_validate({**tree, "algorithm": {"type": "sft", "rows_per_step": 2}})
    setting = Setting(trainer=CountedForward, micro_batch_tokens=32, holdout=12)

    async def script(run: FakeRun) -> None:
        loop, trainer = asyncio.get_running_loop(), run.trainer
        assert isinstance(trainer, CountedForward)

        def cut() -> None:
            inside.running(run.pipeline)["a"].preempt()
            assert inside.running(run.pipeline)["a"].leave()

        trainer.cut = lambda: asyncio.run_coroutine_threadsafe(_called(cut), loop).result(PATIENCE)

    run = run_jobs(tmp_path / "cut", [config], setting, script)
    assert (run.state("a"), run.jobs["a"].starts) == (JobState.SUCCEEDED, 2)
    alone = run_jobs(tmp_path / "alone", [config], setting)
    alike(tmp_path / "cut", tmp_path / "alone", "a")
    assert isinstance(run.trainer, CountedForward)
    assert isinstance(alone.trainer, CountedForward)
    assert run.trainer.passes <= alone.trainer.passes + 2, "only what was cut is scored again, and a version probed"


class Wandering(OwnEnvironment):
    """An agent of ten calls that do not continue each other, unless it `goes_on`."""

    def __init__(self, *, goes_on: bool = False) -> None:
        self._goes_on = goes_on

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        rollouts = list[Rollout]()
        for index in range(context.group_size):
            rollout, before = Rollout(context.problem, index, (), ()), context.chat.prompt_ids(context.problem)
            for turn in range(10):
                asked = np.append(before, [turn]).astype(np.int32)
                (chunk,) = await context.generate(asked, (index,), turn)
                anew = not turn or not self._goes_on
                rollout = answered(extended(rollout, asked if anew else asked[-1:], chunk, anew=anew), ())
                before = np.append(asked, chunk.token_ids) if self._goes_on else before
            rollouts.append(replace(rollout, reward_parts={"agent": 1.0}))
        return tuple(rollouts)


def test_a_step_whose_calls_read_more_than_it_may_have_fails_with_what_to_do(tmp_path: Path) -> None:
    """Only where it is limited, and not if it has just as much as it may."""
    config = job("a", steps=1, environment={"name": "agent", "max_turns": 10}, sampling={"max_tokens": 1})
    setting = Setting(agents=lambda name, settings: Wandering(), holdout=0)
    free = run_jobs(tmp_path / "free", [config], setting)
    read, calls = sum(len(request.prompt_ids) for request in free.engine.requests), len(free.engine.requests)
    for most, state in ((2 * (read + calls), JobState.SUCCEEDED), (2 * read - 1, JobState.FAILED)):
        limited = replace(setting, rules={"": Rule(step_tokens=most)})
        run = run_jobs(tmp_path / state, [config], limited)
        assert run.state("a") is state, run.jobs["a"].progress.message
    assert calls == 3 * 4 * 10
    told = run.jobs["a"].progress.message
    assert "step_tokens: the calls of a step's rollouts have read and sampled" in told
    assert "motet tenants limit --step-tokens" in told


def test_calls_that_continue_each_other_are_read_once(tmp_path: Path) -> None:
    """The base keeps what the last one of a rollout had."""
    config = job("a", steps=1, environment={"name": "agent", "max_turns": 10}, sampling={"max_tokens": 1})
    setting = Setting(agents=lambda name, settings: Wandering(goes_on=True), holdout=0)
    free = run_jobs(tmp_path / "free", [config], setting)
    longest = sorted(len(request.prompt_ids) for request in free.engine.requests)[-3 * 4 :]
    limited = replace(setting, rules={"": Rule(step_tokens=2 * (sum(longest) + 3 * 4))})
    run = run_jobs(tmp_path / "limited", [config], limited)
    assert run.state("a") is JobState.SUCCEEDED, run.jobs["a"].progress.message


def gradient(first: int, n: int) -> ForwardBackward:
    ids = [np.arange(first + one, first + one + 20, dtype="<i4") % 20 for one in range(n)]
    return ForwardBackward([Datum(one[:-1].tobytes(), one[1:].tobytes(), 0) for one in ids], "cross_entropy", {})


def client_job() -> JobConfig:
    tree = {"name": "a", "algorithm": "client", "data": {"source": OF_CLIENT, "chat_template": False}, "steps": 9}
    return JobConfig.model_validate({**tree, "optimizer": {"lr": 0.05}})


CLIENT = Setting(trainer=CutTrainer, train_tokens=32, micro_batch_tokens=32)


def driven(
    directory: Path, commands: list[Any], *, cuts: bool = False, most: int | None = None, script: Script | None = None
) -> tuple[FakeRun, list[Any]]:
    """The run of a client's job, and the outcomes of its commands."""
    journal = Journal(directory / "a")
    for number, command in enumerate(commands):
        journal.put(number, encode(command))

    async def drive(run: FakeRun) -> None:
        run.services.steps.given[""] = most
        if cuts:
            cut_in(run)
        if script is not None:
            await script(run)
        await until(lambda: journal.done(len(commands) - 1))
        journal.finish()
        run.jobs["a"].news.set()

    run = run_jobs(directory, [client_job()], CLIENT, drive)
    return run, [journal.outcome(number) for number in range(len(commands))]


STEP = OptimStep(0.05, (0.9, 0.95), 1e-8, 0.0, None)


def test_a_clients_gradients_that_are_dropped_are_those_of_an_undisturbed_session(tmp_path: Path) -> None:
    commands = [gradient(0, 5), gradient(1, 4), STEP, gradient(7, 6), STEP]
    run, outcomes = driven(tmp_path / "cut", commands, cuts=True)
    _, expected = driven(tmp_path / "alone", commands)
    assert outcomes == expected
    assert outcomes[-1] is not None
    assert run.jobs["a"].starts > 3, "the test of cuts never saw one"
    assert weights(tmp_path / "cut", "a", 2) == weights(tmp_path / "alone", "a", 2)


def test_a_clients_step_has_no_more_tokens_than_a_step_may_have(tmp_path: Path) -> None:
    commands = [gradient(0, 5), gradient(1, 6), gradient(1, 5), gradient(1, 1), STEP, gradient(2, 10)]
    _, outcomes = driven(tmp_path, commands, most=200)
    kinds = [type(one) for one in outcomes]
    assert kinds[:4] == [Gradient, Failed, Gradient, Failed]
    assert kinds[5] is Gradient, "the next step begins at nothing"
    assert "120 tokens after 100 in this step: call optim_step" in outcomes[1].reason


def test_a_clients_limit_follows_its_tenants(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")

    async def script(run: FakeRun) -> None:
        for number, most in enumerate([99, 100, 100]):
            run.pipeline.rule("", Rule(step_tokens=most))
            journal.put(number, encode(gradient(0, 5)))
            run.jobs["a"].news.set()
            await until(lambda number=number: journal.done(number))  # type: ignore[misc]
        journal.finish()
        run.jobs["a"].news.set()

    run_jobs(tmp_path, [client_job()], CLIENT, script)
    assert [type(journal.outcome(number)) for number in range(3)] == [Failed, Gradient, Failed]


def test_gradients_of_a_step_are_computed_again_whatever_limit_the_step_has_then(tmp_path: Path) -> None:
    """The client was told that they are done. A cancelled gradient takes those before it away too, and its own work counts."""
    journal, seen = Journal(tmp_path / "a"), threading.Event()
    for number, command in enumerate([gradient(0, 5), gradient(1, 3), STEP]):
        journal.put(number, encode(command))

    async def script(run: FakeRun) -> None:
        trainer, loop = run.trainer, asyncio.get_running_loop()
        assert isinstance(trainer, CutTrainer)
        run.services.steps.given[""] = 160

        def cancel() -> None:
            if trainer.passes == 6:  # the first one of the second gradient
                journal.cancel(1)
                loop.call_soon_threadsafe(run.jobs["a"].news.set)
                assert seen.wait(PATIENCE)

        trainer.cut = cancel
        await until(lambda: trainer.passes == 6)
        await until(lambda: inside.running(run.pipeline)["a"].loop._work is None)
        seen.set()
        await until(lambda: journal.done(2))
        journal.finish()
        run.jobs["a"].news.set()

    run_jobs(tmp_path, [client_job()], CLIENT, script)
    assert [type(journal.outcome(number)) for number in range(2)] == [Gradient, Failed]
    driven(tmp_path / "alone", [gradient(0, 5), STEP])
    assert weights(tmp_path, "a", 1) == weights(tmp_path / "alone", "a", 1)


def test_a_clients_job_that_is_resumed_while_its_step_is_dropped_adds_no_gradient_twice(tmp_path: Path) -> None:
    commands = [gradient(0, 5), gradient(1, 4), STEP]

    async def script(run: FakeRun) -> None:
        loop, trainer = asyncio.get_running_loop(), run.trainer
        assert isinstance(trainer, CutTrainer)

        def cut() -> None:
            running = inside.running(run.pipeline)["a"]
            running.preempt()
            assert running.leave()
            run.pipeline.resume("a")

        def once() -> None:
            if trainer.passes == 2:
                asyncio.run_coroutine_threadsafe(_called(cut), loop).result(PATIENCE)

        trainer.cut = once

    run, outcomes = driven(tmp_path / "cut", commands, script=script)
    assert run.jobs["a"].starts == 2
    _, expected = driven(tmp_path / "alone", commands)
    assert outcomes == expected
    assert weights(tmp_path / "cut", "a", 1) == weights(tmp_path / "alone", "a", 1)


async def _called(function: Callable[[], None]) -> None:
    function()
