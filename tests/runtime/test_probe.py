"""The probe of engines that cannot agree with the trainer to the bit: noise passes, and what training changed must show."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.config import JobConfig
from motet.core import seeds
from motet.core.errors import ProbeError
from motet.core.types import AdapterRef, FloatArray, IntArray, JobState, Problem
from motet.runtime.publish_check import CLEAR, PROBE_TOKENS, Probe
from tests.support.fake_base import FakeAdapter, FakePolicy, FakeTokenizer
from tests.support.fake_engine import FakeEngine, FakeSync
from tests.support.fake_run import FakeRun, Setting, job, metrics, run_jobs

pytestmark = pytest.mark.tier1

WIDE = 5.0
"""A tolerance that hides every adapter of these tests."""


class NoisyEngine(FakeEngine):
    """Scores with small differences, other ones for each version and for the base; answers for some adapters with the base."""

    def __init__(self, *, noise: float = 0.002, silent: str = "", **fields: Any) -> None:
        super().__init__(**fields)
        self._noise, self._silent = noise, silent

    def apart(self, token_ids: IntArray, ref: AdapterRef | None) -> FloatArray:
        """What is added to the logprobs."""
        stream = seeds.key(0, "noise", -1 if ref is None else ref.version)
        places = np.arange(len(token_ids), dtype=np.uint64)
        draws = seeds.uniforms(np.full(len(token_ids), stream, np.uint64), places)
        return ((2 * draws - 1) * self._noise).astype(np.float32)

    async def score(self, token_ids: IntArray, adapter: AdapterRef | None) -> FloatArray:
        return await super().score(token_ids, adapter) + self.apart(token_ids, adapter)

    def install(self, ref: AdapterRef, adapter: FakeAdapter) -> None:
        if self._silent and ref.name.startswith(self._silent):
            adapter = FakeAdapter.fresh(adapter.rank, adapter.alpha, 0)
        super().install(ref, adapter)


class _WatchfulSync(FakeSync):
    """Keeps what was published of job `bad`, and publishes another job's weights in its place where it is told to."""

    mixed_up = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.published: dict[int, FakeAdapter] = {}
        self._of = args[1]

    async def publish(self, name: str, ref: AdapterRef) -> None:
        if name == "bad":
            self.published[ref.version] = self._of(name)
        await super().publish("good" if self.mixed_up and name == "bad" and ref.version >= 2 else name, ref)


class _MixedUpSync(_WatchfulSync):
    mixed_up = True


def opposite(problem: Problem, completion: str) -> float:
    """A reward that pulls away from the vowels that the other job is rewarded for."""
    return -sum(letter in "aeiou" for letter in completion) / (1 + len(completion))


def check_good(path: Path, run: FakeRun, config: JobConfig) -> None:
    run_jobs(path / "alone", [config])
    assert run.state("good") is JobState.SUCCEEDED, run.jobs["good"].progress.message
    assert metrics(path / "all", "good") == metrics(path / "alone", "good")


def test_an_engine_with_small_differences_passes(tmp_path: Path) -> None:
    config = job("good", steps=8)
    run = run_jobs(tmp_path / "all", [config], Setting(engine=NoisyEngine, tolerance=0.01))
    check_good(tmp_path, run, config)
    run = run_jobs(tmp_path / "strict", [config], Setting(engine=NoisyEngine, tolerance=1e-5))
    assert run.state("good") is JobState.FAILED
    assert "version 0 of 'good' is not what was trained" in run.jobs["good"].progress.message


@pytest.mark.parametrize("fault", ["base", "another adapter"])
def test_within_the_tolerance_an_engine_has_to_show_what_was_trained(fault: str, tmp_path: Path) -> None:
    engine = functools.partial(NoisyEngine, silent="bad." if fault == "base" else "")
    sync = _MixedUpSync if fault == "another adapter" else FakeSync
    configs = [job("bad", reward=opposite), job("good")]
    run = run_jobs(tmp_path / "all", configs, Setting(engine=engine, sync=sync, tolerance=WIDE))
    assert run.state("bad") is JobState.FAILED
    message = run.jobs["bad"].progress.message
    assert f"version {1 if fault == 'base' else 2} of 'bad' with the base model or with another adapter" in message
    check_good(tmp_path, run, configs[1])


class _LateSync(_WatchfulSync):
    """From version 6 on it publishes the one before."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        if name == "bad" and ref.version >= 6:
            self._engine.install(ref, self.published[ref.version - 1])
        else:
            await super().publish(name, ref)


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_the_version_before_is_told_from_the_one_that_was_trained(noise: float, tmp_path: Path) -> None:
    engine = functools.partial(NoisyEngine, noise=noise)
    configs = [job("bad", steps=8, reward=opposite), job("good", steps=8)]
    run = run_jobs(tmp_path / "all", configs, Setting(engine=engine, sync=_LateSync, tolerance=WIDE))
    assert run.state("bad") is JobState.FAILED
    assert (
        "the engine answers version 6 of 'bad' with version 5: of what the step changed"
        in run.jobs["bad"].progress.message
    )
    check_good(tmp_path, run, configs[1])


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.02])
def test_a_base_is_refused_as_soon_as_the_effect_is_clear(noise: float, tmp_path: Path) -> None:
    syncs: list[_WatchfulSync] = []

    def sync(*args: Any) -> _WatchfulSync:
        syncs.append(_WatchfulSync(*args))
        return syncs[0]

    engine = functools.partial(NoisyEngine, noise=noise, silent="bad.")
    config = job("bad", steps=30, optimizer={"lr": 0.005}, eval={"every": 0})
    run = run_jobs(tmp_path, [config], Setting(engine=engine, sync=sync, tolerance=WIDE))
    assert isinstance(run.engine, NoisyEngine)
    prompt = run.jobs["bad"].data.train[0].messages[0].content
    text = np.array(FakeTokenizer().encode(prompt)[-PROBE_TOKENS:], np.int32)
    apart, base = run.engine.apart(text, None), FakePolicy(None).logprobs(text)
    sizes = {
        version: float(np.linalg.norm(FakePolicy(adapter).logprobs(text) - base))
        for version, adapter in syncs[0].published.items()
    }
    clear = [version for version, size in sizes.items() if size >= CLEAR * float(np.linalg.norm(apart))]
    assert run.state("bad") is JobState.FAILED
    refused, message = max(sizes), run.jobs["bad"].progress.message
    if "with the base model or with another" in message:
        assert clear == [refused], "refused too early or too late"
        assert refused > 1, "choose a smaller rate: the effect was clear at once"
    else:  # a step is seen sooner than all of them where it is larger than what sets the two apart
        assert f"version {refused} of 'bad' with version {refused - 1}" in message
        assert clear in ([], [refused])
        assert noise < 0.01


# Logprobs of a service in shards and of its server, both in bfloat16 with other kernels: of the base, and after one step.
TRAINER = [0, -0.1075, 0, -2.1473, -0.3591, -0.5839, -0.0003, -3.1064, -2.9981, -3.0606, -2.5084, -3.5031, -0.0039]
TRAINED = [0, -0.1075, 0, -2.1480, -0.3588, -0.5568, -0.0003, -3.1063, -2.9911, -3.0657, -2.5124, -3.5018, -0.0036]
ENGINE = [0, -0.1104, 0, -2.1413, -0.3617, -0.5740, -0.0003, -3.1173, -2.9908, -3.0642, -2.5204, -3.4957, -0.0040]
ANSWERED = [0, -0.1102, 0, -2.1398, -0.3631, -0.5681, -0.0003, -3.1179, -2.9903, -3.0759, -2.5107, -3.5031, -0.0035]


class Told:
    """A trainer and an engine in one, whose logprobs are given."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        self.trainer, self.engine = trainer, engine

    def forward(self, batch: Any, base: bool = False) -> Any:
        return ((np.array(self.trainer[0] if base else self.trainer[1], np.float32),),)

    async def score(self, token_ids: Any, ref: AdapterRef | None) -> Any:
        return np.array(self.engine[0] if ref is None else self.engine[1], np.float32)


def published(*told: Told) -> None:
    """Each version in turn."""
    probe = Probe("job", np.arange(len(told[0].trainer[0]), dtype=np.int32), 1.0)
    for version, one in enumerate(told):
        trained: Any = one
        asyncio.run(probe.check(trained, AdapterRef("job", version), probe.trained(trained)))


def test_a_step_that_rounding_hides_is_no_fault() -> None:
    published(Told((TRAINER, TRAINER), (ENGINE, ENGINE)), Told((TRAINER, TRAINED), (ENGINE, ANSWERED)))


def test_an_engine_that_does_not_change_by_a_bit_has_the_version_before() -> None:
    step = float(np.linalg.norm(np.subtract(TRAINED, TRAINER)))
    apart = float(np.linalg.norm(np.subtract(ENGINE, TRAINER)))
    assert apart < step < CLEAR * apart, "choose a step that is not clear"
    with pytest.raises(ProbeError, match="with version 0"):
        published(Told((TRAINER, TRAINER), (ENGINE, ENGINE)), Told((TRAINER, TRAINED), (ENGINE, ENGINE)))
    little = [
        one + 0.4 * (other - one) for one, other in zip(TRAINER, TRAINED, strict=True)
    ]  # less than sets them apart
    published(Told((TRAINER, TRAINER), (ENGINE, ENGINE)), Told((TRAINER, little), (ENGINE, ENGINE)))


def test_a_clear_step_that_the_engine_lacks_is_a_fault() -> None:
    clear = [one - 0.1 * (place % 2) for place, one in enumerate(TRAINED)]
    first = [one - 0.3 for one in TRAINER], [one - 0.3 for one in ENGINE]
    after = [one - 0.3 for one in clear]
    with pytest.raises(ProbeError, match="with version 0"):
        published(Told((TRAINER, first[0]), (ENGINE, first[1])), Told((TRAINER, after), (ENGINE, first[1])))
