"""Rollouts that go on under newer versions (`algorithm.in_flight`): their tokens and metrics, and who else may notice."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet.core.types import Chunk, GenerateRequest, JobState
from tests.support.fake_engine import FakeEngine
from tests.support.fake_run import Setting, job, metrics, records, run_jobs, weights
from tests.support.remembering import RememberingEngine, RememberingTrainer, check_samples
from tests.support.waiting import PATIENCE

MOVING: dict[str, Any] = {
    "steps": 8,
    "sampling": {"max_tokens": 30},
    # a penalty keeps samples without an advantage in the batch: the test sees every token
    "algorithm": {"max_off_policy_steps": 2, "in_flight": "continue", "kl": {"coef": 0.01}},
}

_SUSPENDED = contextvars.ContextVar("suspended", default=0)
"""How often a row has let others run."""
_WAITS: contextvars.ContextVar[tuple[int, asyncio.Event] | None] = contextvars.ContextVar("waits", default=None)
"""At which of these times it waits, and for what."""


class WaitingEngine(RememberingEngine):
    """A rollout of a step whose turn to train has not come waits until its request is aborted.

    Those of even steps wait after three tokens, those of odd steps before the first.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.aborted: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        _, purpose, step, *_ = request.id.split("/")
        version = 0 if request.adapter is None else request.adapter.version
        early = purpose == "train" and request.stream and version < int(step)
        _WAITS.set((1 if int(step) % 2 else 4, self.aborted[request.id]) if early else None)
        _SUSPENDED.set(0)
        async for chunk in super().generate(request):
            yield chunk

    async def abort(self, name: str) -> None:
        self.aborted[name].set()
        await super().abort(name)

    async def suspend(self) -> None:
        _SUSPENDED.set(_SUSPENDED.get() + 1)
        match _WAITS.get():
            case (times, aborted) if times == _SUSPENDED.get():
                await asyncio.wait_for(aborted.wait(), PATIENCE)
        await super().suspend()


@pytest.mark.parametrize("environment", ["single", "retry"])
def test_rollouts_under_way_go_on_under_newer_versions(environment: str, tmp_path: Path) -> None:
    configs = [job("a", environment=environment, **MOVING), job("good")]
    run_jobs(tmp_path / "alone", [configs[1]])
    run = run_jobs(tmp_path / "all", configs, Setting(engine=WaitingEngine, trainer=RememberingTrainer, capacity=100))
    assert {one.state for one in run.jobs.values()} == {JobState.SUCCEEDED}
    assert isinstance(run.engine, RememberingEngine)
    assert isinstance(run.trainer, RememberingTrainer)
    found, steps = records(tmp_path / "all", "a")[:-1], run.trainer.samples["a"][:-1]
    samples = [sample for step in steps for sample in step]
    check_samples(samples, run.engine, "a")
    seen = [set(sample.versions[sample.loss_mask].tolist()) for sample in samples]
    assert sum(len(versions) > 1 for versions in seen) > 10, "no rollout met a newer version"
    turns = 2 if environment == "retry" else 1
    assert max(sample.n_trainable for sample in samples) <= 30 * turns
    oldest = [min(int(sample.versions[sample.loss_mask].min()) for sample in step) for step in steps]
    assert [record["staleness"] for record in found] == [step - version for step, version in enumerate(oldest)]
    assert all(
        record["failed"] == 0 and record["rollouts"] == len(step) for record, step in zip(found, steps, strict=True)
    )
    assert run.engine.loads == run.engine.unloads
    assert run.services.scheduler.in_flight == 0
    status = json.loads((tmp_path / "all" / "a" / "status.json").read_text())
    assert status["inexact"] == ["rollouts under way go on under newer versions (algorithm.in_flight)"]
    assert run.jobs["good"].progress.inexact == []
    assert metrics(tmp_path / "all", "good") == metrics(tmp_path / "alone", "good")
    assert weights(tmp_path / "all", "good", 4) == weights(tmp_path / "alone", "good", 4)


def test_a_job_whose_rollouts_finish_stays_exact(tmp_path: Path) -> None:
    """One request for each group, whole, and the same bytes however the versions come."""
    algorithm = {"max_off_policy_steps": 2, "in_flight": "finish"}
    plain = run_jobs(tmp_path / "plain", [job("a", algorithm={"max_off_policy_steps": 2})])
    slow = functools.partial(FakeEngine, seconds=0.0005)
    run = run_jobs(tmp_path / "finish", [job("a", algorithm=algorithm)], Setting(engine=slow))
    for one in (plain, run):
        asked = [request for request in one.engine.requests if "/train/" in request.id]
        assert len(asked) == 3 * 4
        assert {(request.stream, len(request.seeds)) for request in asked} == {(False, 4)}
    assert metrics(tmp_path / "plain", "a") == metrics(tmp_path / "finish", "a")
    assert weights(tmp_path / "plain", "a", 4) == weights(tmp_path / "finish", "a", 4)
    assert run.jobs["a"].progress.inexact == []


@pytest.mark.parametrize("environment", ["single", "retry"])
def test_tokens_are_counted_once(environment: str, tmp_path: Path) -> None:
    """Also where second turns are sampled side by side."""
    run = run_jobs(tmp_path, [job("a", environment=environment)], Setting(engine=RememberingEngine))
    committed = run.jobs["a"].directory.newest()
    assert isinstance(run.engine, RememberingEngine)
    assert committed is not None
    assert committed.tokens_sampled == run.engine.sampled["a"]


def test_without_newer_versions_there_is_nothing_to_go_on_under() -> None:
    with pytest.raises(ValueError, match=r"in_flight: continue.*or more: on-policy"):
        job("a", algorithm={"in_flight": "continue"})
    assert job("a").rl.in_flight == "finish"
