"""Whose the device's time was: shares that sum exactly, and windows that sum to the time that passed."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.device import BusyTime
from motet.core.types import JobState
from motet.runtime.device_usage import IDLE, Meter, apportion
from tests.support.fake_engine import FakeEngine
from tests.support.fake_run import FakeRun, Setting, job, run_jobs
from tests.support.waiting import until

pytestmark = pytest.mark.tier1

WEIGHTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(0, 10**12), min_size=1).filter(
    lambda weights: sum(weights.values()) > 0
)


@given(st.integers(0, 10**12), WEIGHTS)
def test_shares_sum_exactly_and_nobody_is_a_unit_off(total: int, weights: dict[str, int]) -> None:
    found = apportion(total, weights)
    assert sum(found.values()) == total
    assert set(found) == set(weights)
    whole = sum(weights.values())
    for name, units in found.items():
        assert abs(units * whole - total * weights[name]) < whole
        assert units or weights[name] * total < whole
    assert found == apportion(total, dict(reversed(weights.items())))


def test_shares_by_hand() -> None:
    assert apportion(10, {"a": 2, "b": 1}) == {"a": 7, "b": 3}
    assert apportion(2, {"b": 1, "a": 1, "c": 1}) == {"b": 1, "a": 1, "c": 0}
    assert apportion(5, {"a": 0, "b": 3}) == {"a": 0, "b": 5}


class Clock:
    """Time that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_window_is_shared_by_tokens_and_calls_and_the_rest_is_idle() -> None:
    busy, clock = BusyTime(), Clock()
    meter = Meter(busy, clock)
    busy.decoded(0.5, 0.0, {"a": 30, "b": 10})
    busy.called(0.2, {"a": 1, "c": 3})
    clock.now += 1.0
    assert meter.window() == pytest.approx({"a": 425_000, "b": 125_000, "c": 150_000, IDLE: 300_000}, abs=2)
    clock.now += 0.25
    assert meter.window() == {IDLE: 250_000}


def test_what_is_told_late_is_made_good() -> None:
    """A sampling process tells of ten seconds at once: no window exceeds its length, and none of the time is lost."""
    busy, clock = BusyTime(), Clock()
    meter, total = Meter(busy, clock), Counter[str]()
    for second in range(40):
        clock.now += 1.0
        if second % 10 == 9:
            busy.decoded(8.0, 0.0, {"a": 300, "b": 100})
        window = meter.window()
        assert sum(window.values()) == 1_000_000
        assert min(window.values()) > 0
        total.update(window)
    for _ in range(10):  # the last of them is still owed
        clock.now += 1.0
        total.update(meter.window())
    assert total == pytest.approx({"a": 24_000_000, "b": 8_000_000, IDLE: 18_000_000}, abs=50)


def test_seconds_without_tokens_belong_to_the_next_ones() -> None:
    busy, clock = BusyTime(), Clock()
    meter = Meter(busy, clock)
    clock.now += 1.0
    busy.decoded(1.0, 0.0, {})  # a long prompt
    assert meter.window() == {IDLE: 1_000_000}
    clock.now += 2.0
    busy.decoded(1.0, 0.0, {"a": 1})
    assert meter.window() == {"a": 2_000_000}


def test_a_job_leaves_when_its_time_is_told() -> None:
    busy, clock = BusyTime(), Clock()
    meter = Meter(busy, clock)
    for number in range(3):
        busy.decoded(0.2, 0.0, {f"job-{number}": 7})
        busy.called(0.1, {f"job-{number}": 1})
        clock.now += 0.25  # its last 50 ms go into the next window
        assert f"job-{number}" in meter.window()
    clock.now += 1.0
    meter.window()
    assert "job-" not in f"{vars(meter)} {vars(busy)}"


STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.floats(0.0, 5.0),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 50)),
        st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 5.0), min_size=1),
    ),
    max_size=20,
)


@given(STEPS)
def test_windows_always_sum_to_the_time_that_passed(
    steps: list[tuple[float, float, dict[str, int], dict[str, float]]],
) -> None:
    busy, clock = BusyTime(), Clock()
    meter = Meter(busy, clock)
    total = 0
    for passes, decode, tokens, owners in steps:
        clock.now += passes
        busy.decoded(decode, 0.0, tokens)
        busy.called(decode / 3, owners)
        window = meter.window()
        assert all(units > 0 for units in window.values())
        total += sum(window.values())
    assert total == round(clock.now * 1e6) - 100_000_000


def test_training_is_told_by_job(tmp_path: Path) -> None:
    """Each job's calls, and its part of packed batches."""
    run = run_jobs(tmp_path, [job("a"), job("b", algorithm={"group_size": 8})])
    _, _, spent = run.services.device.busy.take()
    assert set(spent) == {"a", "b"}
    assert sum(spent.values()) >= run.services.device.busy.train > 0


def test_tenants_share_a_real_pipeline_whatever_their_jobs(tmp_path: Path) -> None:
    """Ten jobs beside one that always has something to sample: the tenants' tokens stay within a tenth of their shares."""
    ahead = {"max_off_policy_steps": 4, "group_size": 4, "groups_per_step": 3}
    crowd = [job(f"a{number}", steps=400, algorithm=ahead, eval={"every": 0}) for number in range(10)]
    configs = [*crowd, job("b", steps=400, algorithm=ahead, eval={"every": 0})]
    slow = functools.partial(FakeEngine, seconds=0.004)  # the engine is what they compete for, not each job's own disk
    tenants = {one.name: one.name[0] for one in configs}
    setting = Setting(slots=11, capacity=4, jitter=None, holdout=0, engine=slow, tenants=tenants)
    found: list[tuple[int, int]] = []

    def counts(run: FakeRun) -> tuple[int, int]:
        return sum(run.jobs[one.name].progress.tokens for one in crowd), run.jobs["b"].progress.tokens

    async def script(run: FakeRun) -> None:
        await until(lambda: run.jobs["b"].progress.step >= 3)
        before = counts(run)
        await until(lambda: run.jobs["b"].progress.step >= 23)
        after = counts(run)
        found.append((after[0] - before[0], after[1] - before[1]))
        for one in configs:
            run.pipeline.cancel(one.name)

    run = run_jobs(tmp_path, configs, setting, script)
    assert {one.state for one in run.jobs.values()} == {JobState.CANCELLED}
    ((many, few),) = found
    assert few > 1000
    assert abs(few / (few + many) - 0.5) <= 0.05, (many, few)
