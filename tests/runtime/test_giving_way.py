"""A job gives its slot away within a step of any size; it goes on there, does nothing twice, and ends with the same bytes."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from motet.config import OF_CLIENT, JobConfig
from motet.core.batch import Batch, OptimStats, Trained
from motet.core.errors import RunError
from motet.core.types import Chunk, FloatArray, GenerateRequest, JobState, Problem, Rollout
from motet.rollout.fake import FakeEngine
from motet.rollout.sequences import aborted
from motet.runtime.group_requests import SamplingCost
from motet.runtime.job import Executed, JobEvent, StateChanged
from motet.runtime.journal import Datum, ForwardBackward, Journal, OptimStep, Save
from motet.runtime.ownership import Ownership
from motet.runtime.pipeline import _cut_steps
from motet.runtime.slot_turns import SlotTimeouts
from motet.runtime.unfinished import KeptGroup, KeptUpdate, Unfinished
from motet.training.fake import FakeTrainer
from tests.support.fake_run import FakeRun, Setting, job, metrics, run_jobs, weights
from tests.support.waiting import until


class HeldEngine(FakeEngine):
    """Ends four groups of each job of the first tenant, and no further one before it may."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.go, self.begun = asyncio.Event(), Counter[str]()
        self.aborted = defaultdict[str, asyncio.Event](asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.begun[request.job] += 1
        if request.job.startswith("a") and self.begun[request.job] > 4 and not self.go.is_set():
            waits = [asyncio.create_task(one.wait()) for one in (self.go, self.aborted[request.id])]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.aborted[request.id].is_set():
                for index in range(len(request.seeds)):
                    yield aborted(index)
                return
        async for chunk in super().generate(request):
            yield chunk

    async def abort(self, name: str) -> None:
        self.aborted[name].set()
        await super().abort(name)


def committed(run: FakeRun, name: str) -> int:
    """The tokens of a job's last commit."""
    found = run.jobs[name].directory.newest()
    assert found is not None
    return found.tokens


def test_a_newcomer_gets_a_slot_though_no_step_of_the_others_ends(tmp_path: Path) -> None:
    """The steps of `a1` and `a2` end only once `b` has, which comes when both are in the middle of theirs."""
    jobs = [job(name, steps=1, algorithm={"groups_per_step": 6}) for name in ("a1", "a2", "b")]

    async def script(run: FakeRun) -> None:
        engine = run.engine
        assert isinstance(engine, HeldEngine)
        await until(lambda: min(engine.begun["a1"], engine.begun["a2"]) > 4)
        run.pipeline.add(run.jobs["b"])
        await until(lambda: run.state("b") is JobState.SUCCEEDED)
        assert [run.jobs[name].progress.step for name in ("a1", "a2")] == [0, 0]
        engine.go.set()

    owners = {"a1": "a", "a2": "a", "b": "b"}
    late = frozenset({"b"})
    setting = Setting(slots=2, engine=HeldEngine, tenants=owners, most_step=0.0, holdout=0, late=late)
    run = run_jobs(tmp_path / "beside", jobs, setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert [run.jobs[name].starts for name in owners] == [1, 2, 1], "one was cut, once"
    alone = run_jobs(tmp_path / "alone", jobs, Setting(holdout=0))
    for name in owners:
        assert metrics(tmp_path / "beside", name) == metrics(tmp_path / "alone", name)
        assert weights(tmp_path / "beside", name, 1) == weights(tmp_path / "alone", name, 1)
        charged = {run.jobs[name].progress.tokens, *(committed(one, name) for one in (run, alone))}
        assert len(charged) == 1, "nothing is charged twice"
    again = Counter(request.id.rsplit("/", 1)[0] for request in run.engine.requests)
    assert set(again) == {request.id.rsplit("/", 1)[0] for request in alone.engine.requests}
    assert set(again.values()) == {1}, "what was finished is not sampled again"
    assert not (tmp_path / "beside" / "a2" / "unfinished").exists()


def test_a_job_that_is_cut_before_it_gets_on_may_keep_its_slot_for_twice_as_long(tmp_path: Path) -> None:
    """Otherwise groups that take longer than the limit would be sampled again forever."""
    now, waited = 0.0, list[float]()

    async def script(run: FakeRun) -> None:
        nonlocal now
        engine, last = run.engine, run.jobs["a"]
        assert isinstance(engine, HeldEngine)
        timeouts = SlotTimeouts(10.0, lambda: now)
        for turn in (1, 2, 3, 4):
            await until(lambda turn=turn: engine.begun["a"] == 4 + 2 * turn)  # type: ignore[misc]
            await until(lambda: last.progress.rollouts_done == 4 * 4)
            running, began = run.pipeline._running["a"], now
            running.preempt()
            while running.loop is not None and not running.loop.session.work.giving_way.is_set():
                _cut_steps([running], timeouts)
                now += 1.0
            waited.append(now - began - 1.0)
        engine.go.set()

    config = job("a", steps=1, algorithm={"groups_per_step": 6})
    run = run_jobs(tmp_path, [config], Setting(engine=HeldEngine, holdout=0), script)
    assert (run.state("a"), run.jobs["a"].starts) == (JobState.SUCCEEDED, 5)
    assert waited == [10, 10, 20, 40], "it got on in its first turn alone"


class HeldEvaluations(HeldEngine):
    """Ends no evaluation before it may."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.begun[request.job] = 4 * ("/eval/" in request.id)
        async for chunk in super().generate(request):
            yield chunk


def test_a_step_that_is_trained_while_its_evaluation_lasts_keeps_its_version(tmp_path: Path) -> None:
    config = job("a", steps=2, checkpoint={"every": 1, "keep": 9})

    async def script(run: FakeRun) -> None:
        engine = run.engine
        assert isinstance(engine, HeldEvaluations)
        await until(lambda: run.jobs["a"].progress.phase == "evaluating")
        running = run.pipeline._running["a"]
        running.preempt()
        running.give_way()
        await until(lambda: any(one.is_set() for one in engine.aborted.values()))
        engine.go.set()

    run = run_jobs(tmp_path / "cut", [config], Setting(engine=HeldEvaluations), script)
    assert (run.state("a"), run.jobs["a"].starts) == (JobState.SUCCEEDED, 2)
    alone = run_jobs(tmp_path / "alone", [config], Setting())
    assert metrics(tmp_path / "cut", "a") == metrics(tmp_path / "alone", "a")
    for version in range(3):
        assert weights(tmp_path / "cut", "a", version) == weights(tmp_path / "alone", "a", version)
    assert run.jobs["a"].progress.evaluations == alone.jobs["a"].progress.evaluations


class CutTrainer(FakeTrainer):
    """Tells a job to give way during every second pass."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.cut: Callable[[], None] = lambda: None
        self.passes = Counter[str]()

    def forward_backward(self, batch: Batch) -> tuple[Trained, ...]:
        self._count("backward")
        return super().forward_backward(batch)

    def forward(self, batch: Batch, *, base: bool = False) -> tuple[tuple[FloatArray, ...], ...]:
        if base:  # others are probes of what is published
            self._count("reference")
        return super().forward(batch, base=base)

    def _count(self, what: str) -> None:
        self.passes[what] += 1
        if self.passes.total() % 2 == 0:
            self.cut()


def cut_in(run: FakeRun) -> None:
    """Let the trainer of a run cut the job `a`."""
    loop, trainer = asyncio.get_running_loop(), run.trainer
    assert isinstance(trainer, CutTrainer)

    def cut() -> None:
        running = run.pipeline._running.get("a")
        if running is not None and running.pause is None:
            running.preempt()
            running.give_way()

    trainer.cut = lambda: loop.call_soon_threadsafe(cut)  # type: ignore[assignment]


KINDS: dict[str, dict[str, Any]] = {
    "with a reference": {"algorithm": {"kl": {"coef": 0.1}}, "checkpoint": {"every": 4}},
    "several updates": {"algorithm": {"updates_per_batch": 3}, "checkpoint": {"every": 4}},
    "sampled ahead": {"algorithm": {"max_off_policy_steps": 2}},
    "oversampled": {"algorithm": {"oversampling": 2.0}},
    "of rows": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_cut_again_and_again_ends_with_the_same_bytes_and_no_pass_is_done_twice(
    tmp_path: Path, kind: str
) -> None:
    config = job("a", **KINDS[kind])
    if kind == "of rows":
        rows = {"type": "sft", "rows_per_step": 12}
        tree = {
            "name": "a",
            "data": "in memory",
            "adapter": {"rank": 4},
            "algorithm": rows,
            "steps": 4,
            "eval": {"every": 2},
        }
        config = JobConfig.model_validate({**tree, "optimizer": {"lr": 0.05}})
    setting = Setting(trainer=CutTrainer, train_tokens=32, micro_batch_tokens=32)

    async def script(run: FakeRun) -> None:
        cut_in(run)

    run = run_jobs(tmp_path / "cut", [config], setting, script)
    assert run.state("a") is JobState.SUCCEEDED
    assert run.jobs["a"].starts > 6, "the test of cuts never saw one"
    alone = run_jobs(tmp_path / "alone", [config], setting)
    assert metrics(tmp_path / "cut", "a") == metrics(tmp_path / "alone", "a")
    assert weights(tmp_path / "cut", "a", 4) == weights(tmp_path / "alone", "a", 4)
    assert isinstance(run.trainer, CutTrainer)
    assert isinstance(alone.trainer, CutTrainer)
    assert run.trainer.passes == alone.trainer.passes


class CutEngine(FakeEngine):
    """Calls `cut` after each request that it ends, and after it was told that an episode has ended."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.cut: Callable[[], None] = lambda: None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            yield chunk
        self.cut()

    async def abort(self, name: str) -> None:
        await super().abort(name)
        asyncio.get_running_loop().call_soon(self.cut)


def test_a_clients_gradients_that_are_cut_are_those_of_an_undisturbed_session(tmp_path: Path) -> None:
    """Also a checkpoint with a gradient that waits for its step; and nothing is computed or charged twice."""
    tree = {"name": "a", "algorithm": "client", "data": {"source": OF_CLIENT, "chat_template": False}, "steps": 9}
    config = JobConfig.model_validate({**tree, "optimizer": {"lr": 0.05}})
    step = OptimStep(0.05, (0.9, 0.95), 1e-8, 0.0, None)

    def gradient(first: int, n: int, *, forward_only: bool = False) -> ForwardBackward:
        ids = [np.arange(first + one, first + one + 20, dtype="<i4") % 20 for one in range(n)]
        data = [Datum(one[:-1].tobytes(), one[1:].tobytes(), 0) for one in ids]
        return ForwardBackward(data, "cross_entropy", {}, forward_only)

    commands: list[Any] = [
        gradient(0, 5), gradient(3, 2, forward_only=True), gradient(1, 4), Save("weights/w", True, {"number": 3}), step,
        gradient(7, 6), step, gradient(2, 3),
    ]  # fmt: skip

    def driven(directory: Path, *, cuts: bool) -> tuple[FakeRun, list[Any], list[int]]:
        journal, told = Journal(directory / "a"), list[int]()
        for number, command in enumerate(commands):
            journal.put(number, encode(command))

        async def script(run: FakeRun) -> None:
            observer = run.jobs["a"].observer

            def observe(event: JobEvent) -> None:
                observer(event)
                told.extend([event.tokens] if isinstance(event, Executed) else [])

            run.jobs["a"].observer = observe
            if cuts:
                cut_in(run)
            await until(lambda: journal.done(len(commands) - 1))
            journal.finish()
            run.jobs["a"].news.set()

        run = run_jobs(directory, [config], Setting(trainer=CutTrainer, train_tokens=32, micro_batch_tokens=32), script)
        return run, [journal.outcome(number) for number in range(len(commands))], told

    run, outcomes, told = driven(tmp_path / "cut", cuts=True)
    alone, expected, _ = driven(tmp_path / "alone", cuts=False)
    assert outcomes[-1] is not None
    assert outcomes == expected
    assert run.jobs["a"].starts > 3, "the test of cuts never saw one"
    assert isinstance(run.trainer, CutTrainer)
    assert isinstance(alone.trainer, CutTrainer)
    assert run.trainer.passes["backward"] == alone.trainer.passes["backward"]
    assert weights(tmp_path / "cut", "a", 2) == weights(tmp_path / "alone", "a", 2)
    saved = [
        tmp_path / name / "a" / "checkpoints" / "weights" / "w" / "optimizer.safetensors" for name in ("cut", "alone")
    ]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    assert max(told) == 11 * 20, "work of a step, whether it was done in this turn or in an earlier one"


def test_groups_and_evaluations_that_are_cut_again_and_again_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Each turn is cut when it has ended one more group. Each token is in the job's counts: also of groups that were cut."""
    config = job("a", algorithm={"groups_per_step": 6}, environment="retry", steps=2)
    told: list[Executed] = []

    async def script(run: FakeRun) -> None:
        engine, last = run.engine, run.jobs["a"]
        assert isinstance(engine, CutEngine)

        def cut() -> None:
            running = run.pipeline._running.get("a")
            if running is not None and running.loop is not None and running.pause is None:
                new = running.loop.session.work.kept.groups.records(anew=False)
                if any(isinstance(one, KeptGroup) for one in new):
                    running.preempt()
                    asyncio.get_running_loop().call_later(0, running.give_way)

        engine.cut = cut
        before = last.observer

        def observe(event: JobEvent) -> None:
            before(event)
            if isinstance(event, Executed):
                told.append(event)

        last.observer = observe

    run = run_jobs(tmp_path / "cut", [config], Setting(engine=CutEngine, capacity=4, jitter=1), script)
    assert run.state("a") is JobState.SUCCEEDED
    assert run.jobs["a"].starts > 3, "the test of cuts never saw one"
    run_jobs(tmp_path / "alone", [config], Setting())
    assert metrics(tmp_path / "cut", "a") == metrics(tmp_path / "alone", "a")
    assert weights(tmp_path / "cut", "a", 2) == weights(tmp_path / "alone", "a", 2)
    assert any(event.sampled for event in told), "what was sampled is reported before its step ends"
    assert run.jobs["a"].progress.tokens == committed(run, "a")


def test_a_cut_keeps_nothing_of_a_step_whose_groups_are_chosen_by_the_clock(tmp_path: Path) -> None:
    """The next turn may train on others; what it does with the rest is decided by the commits alone."""
    kept: list[bool] = []
    config = job("a", algorithm={"groups_per_step": 3, "over_provision": 2}, steps=2)

    async def script(run: FakeRun) -> None:
        engine, last = run.engine, run.jobs["a"]
        assert isinstance(engine, CutEngine)

        def cut() -> None:
            running = run.pipeline._running.get("a")
            if running is not None and running.pause is None and len(kept) < 3:
                running.preempt()
                asyncio.get_running_loop().call_later(0, running.give_way)

        engine.cut, before = cut, last.observer

        def observe(event: JobEvent) -> None:
            before(event)
            if isinstance(event, StateChanged) and event.state is JobState.QUEUED:
                kept.append((tmp_path / "a" / "unfinished").exists())

        last.observer = observe

    run = run_jobs(tmp_path, [config], Setting(engine=CutEngine, capacity=4, jitter=1), script)
    assert run.state("a") is JobState.SUCCEEDED
    assert kept == [False] * 3


def test_what_is_kept_is_dropped_where_it_is_damaged_or_of_another_step(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("job: {}")
    rollout = Rollout(Problem(0, (), ""), 0, (), (), 0.5, {"a": 0.5})
    batch = ("train", 3, 7)

    def kept() -> Unfinished:
        found = Unfinished(tmp_path, Ownership(tmp_path))
        found.read(3)
        return found

    first = kept()
    first.groups.add(batch, 0, (rollout,), 5)
    first.passes.append(KeptUpdate("1", OptimStats(1.0, 0.1, skipped=False)))
    assert first.keep(3, lambda path: (path / "weights").touch()) == 2
    first.groups.add(batch, 1, (rollout,), 6)
    assert first.keep(3, None) == 1

    cost, again = SamplingCost(), kept()
    found = again.groups.find(batch, 1, rollout.problem, cost)
    assert found is not None
    assert (found[0].reward, found[0].reward_parts, cost.tokens) == (0.5, {"a": 0.5}, 6)
    assert again.groups.find(batch, 2, rollout.problem, cost) is None
    assert [one.call for one in again.passes] == ["1"]
    assert again.snapshot is not None

    path = tmp_path / "unfinished" / "done.bin"
    path.write_bytes(path.read_bytes()[:-9])
    cut = kept()
    assert [cut.groups.find(batch, place, rollout.problem, cost) is not None for place in (0, 1)] == [True, False]
    cut.groups.add(batch, 1, (rollout,), 6)
    cut.keep(3, None)
    assert kept().groups.find(batch, 1, rollout.problem, cost) is not None, "it is written anew"

    (tmp_path / "job.yaml").write_text("job: {seed: 2}")
    assert kept().groups.find(batch, 0, rollout.problem, cost) is None
    assert not path.exists()


def test_a_process_that_lost_a_job_keeps_and_drops_nothing_in_its_directory(tmp_path: Path) -> None:
    """Also where another process takes the job while this one saves."""
    (job_path := tmp_path / "a").mkdir()
    (job_path / "job.yaml").write_text("job: {}")

    def opened() -> Unfinished:
        owner = Ownership(job_path)
        owner.take()
        found = Unfinished(job_path, owner)
        found.read(3)
        return found

    def files() -> dict[str, bytes]:
        return {str(one.relative_to(job_path)): one.read_bytes() for one in job_path.rglob("*") if one.is_file()}

    def weights_of(who: str) -> Callable[[Path], None]:
        def save(path: Path) -> None:
            (path / "weights").write_text(who)

        return save

    def held(update: str) -> KeptUpdate:
        return KeptUpdate(update, OptimStats(1.0, 0.1, skipped=False))

    first = opened()
    first.passes.append(held("1"))
    first.keep(3, weights_of("first"))
    second = opened()
    second.passes.append(held("2"))
    second.snapshot = None
    second.keep(3, weights_of("second"))
    there = files()
    first.passes.append(held("late"))
    for late in (lambda: first.keep(3, weights_of("late")), first.drop):
        with pytest.raises(RunError, match="taken over"):
            late()
        assert files() == there
    with pytest.raises(RunError, match="taken over"):
        second.keep(3, lambda _: opened().drop())
    assert files().keys() == {"job.yaml"}
