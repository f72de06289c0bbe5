"""From groups to what is trained: who leaves, who stays in the denominator, and when a job has failed too often."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.policy_gradient import PolicyGradient
from motet.config import JobConfig
from motet.core.batch import Batch, Segment
from motet.core.errors import JobFailed
from motet.core.types import Group
from motet.runtime.metrics import group_metrics
from motet.runtime.rollout_loop import check_failures
from tests.support.fake_run import job
from tests.support.rollout_groups import OTHER, PROBLEM, THIRD, group, rollout
from tests.support.segments import SAMPLE_TYPES, types

pytestmark = pytest.mark.tier1


def batch(*groups: Group, **fields: Any) -> StepBatch:
    config = job("a", **fields)
    assert isinstance(config.algorithm, PolicyGradient)
    return config.algorithm.batch(groups, config.sampling.max_tokens)


def config(**algorithm: Any) -> JobConfig:
    return job("a", algorithm={"advantage": "centered", **algorithm})


def advantages(made: StepBatch) -> list[float]:
    return [float(sample.advantages[-1]) for sample in made.samples]


def test_advantages_stand_on_sampled_tokens_in_data_order() -> None:
    groups = [group(rollout(1.0), rollout(0.0)), group(rollout(0.0), rollout(2.0), problem=OTHER)]
    made = batch(*groups, algorithm={"advantage": "centered"})
    assert advantages(made) == [0.5, -0.5, -1.0, 1.0]
    assert made.samples[0].advantages.tolist() == [0, 0, 0, 0.5, 0.5]
    assert made.samples[0].versions.tolist() == [0] * 5
    assert made.samples[0].n_trainable == 2
    assert made.denominator == 8
    assert made.groups == 2


def test_failed_rewards_leave_their_group() -> None:
    made = batch(group(rollout(1.0), rollout(None), rollout(0.5)), algorithm={"advantage": "centered"})
    assert advantages(made) == [0.25, -0.25], "the mean is that of the scored rollouts"
    assert made.denominator == 4


def test_groups_with_fewer_than_two_are_dropped() -> None:
    lonely = group(rollout(1.0), rollout(None), problem=OTHER)
    made = batch(group(rollout(1.0), rollout(0.0)), lonely, algorithm={"advantage": "none"})
    assert advantages(made) == [1.0]
    assert (made.groups, made.denominator) == (1, 4)
    empty = batch(lonely, group(rollout(None), rollout(None)))
    assert (empty.samples, empty.groups, empty.denominator) == ((), 0, 1.0)
    assert empty.segments("a", config().algorithm, 1.0, 100) == ()


def test_samples_without_a_gradient_are_left_out_but_counted() -> None:
    groups = [group(rollout(1.0), rollout(0.0)), group(rollout(1.0, 10), rollout(1.0, 20), problem=OTHER)]
    made = batch(*groups, algorithm={"advantage": "centered", "reduction": "token"})
    assert len(made.samples) == 2
    assert made.denominator == 2 + 2 + 10 + 20
    assert made.groups == 2
    made = batch(*groups, algorithm={"advantage": "centered", "reduction": "sequence"})
    assert made.denominator == 4
    assert [sample.weights.tolist() for sample in made.samples if sample.weights is not None] == [
        [0, 0, 0, 0.5, 0.5]
    ] * 2
    made = batch(*groups, algorithm={"reduction": "constant"}, sampling={"max_tokens": 50})
    assert made.denominator == 4 * 50


def test_with_a_penalty_to_the_base_every_sample_has_a_gradient() -> None:
    made = batch(group(rollout(1.0), rollout(1.0)), algorithm={"kl": {"coef": 0.1}})
    assert len(made.samples) == 2
    assert not made.samples[0].advantages.any()


def test_oversampling_keeps_the_first_groups_with_a_signal() -> None:
    groups = [
        group(rollout(1.0), rollout(1.0), problem=PROBLEM),
        group(rollout(0.0, 3), rollout(1.0, 3), problem=OTHER),
        group(rollout(5.0, 4), rollout(1.0, 4), problem=THIRD),
        group(rollout(0.0, 5), rollout(1.0, 5), problem=PROBLEM),
    ]
    made = batch(*groups, algorithm={"oversampling": 2.0, "groups_per_step": 2})
    assert [sample.n_trainable for sample in made.samples] == [3, 3, 4, 4]
    assert (made.groups, made.denominator) == (2, 14)
    short = batch(*groups[:2], algorithm={"oversampling": 2.0, "groups_per_step": 2})
    assert short.groups == 1
    plain = batch(*groups, algorithm={"groups_per_step": 2})
    assert plain.groups == 4, "without oversampling nothing is chosen"


def test_answers_that_were_cut_off_can_be_masked() -> None:
    rollouts = (rollout(1.0, 4), rollout(0.0, 6, cut_off=True), rollout(0.5, 2))
    assert len(batch(group(*rollouts), algorithm={"advantage": "none"}).samples) == 2
    made = batch(group(*rollouts), algorithm={"advantage": "centered", "mask_truncated": True})
    assert advantages(made) == [0.5], "its reward still counts in the mean"
    assert made.denominator == 6, "its tokens do not"


def test_rollouts_without_a_token_have_no_sample() -> None:
    made = batch(group(rollout(1.0, 0), rollout(0.0, 3)), algorithm={"advantage": "centered"})
    assert [sample.n_trainable for sample in made.samples] == [3]


def test_segments_are_cut_from_this_job_alone() -> None:
    made = batch(group(*(rollout(float(i), 2) for i in range(5))), algorithm={"advantage": "none"})
    segments = made.segments("a", config().algorithm, 0.7, budget=8)
    assert [len(segment.samples) for segment in segments] == [2, 2]
    assert {segment.denominator for segment in segments} == {made.denominator}
    assert {segment.temperature for segment in segments} == {0.7}
    whole = made.segments("a", config().algorithm, 0.7, budget=1000)
    assert [sample for segment in segments for sample in segment.samples] == list(whole[0].samples)


@pytest.mark.parametrize(
    ("targets", "work", "packed"), [(None, 11, 8), ((), 11, 8), ((1,), 11, 8), ((4,), 44, 32)], ids=str
)
def test_work_is_tokens_times_targets(targets: tuple[int, ...] | None, work: int, packed: int) -> None:
    """Answers of 2 and 3 tokens after a prompt of 3, which they share and which runs once."""
    made = batch(group(rollout(1.0, 2), rollout(0.0, 3)), algorithm={"advantage": "centered"})
    samples = tuple(
        replace(one, targets=None if targets is None else np.zeros((one.n_tokens, *targets), np.int32))
        for one in made.samples
    )
    segment = Segment("a", samples)
    assert (Batch((segment,) * 2).n_tokens, segment.work, segment.packed_work) == (16, work, packed)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"reduction": "sequence"},
        {"credit": "return_to_go"},
        {"type": "ppo", "critic": {}},
        {"type": "ppo", "critic": {}, "credit": "return_to_go"},
    ],
    ids=str,
)
def test_arrays_of_samples_are_small(algorithm: dict[str, Any]) -> None:
    made = batch(group(rollout(1.0), rollout(0.0)), algorithm=algorithm)
    assert len(made.samples) == 2
    assert {types(sample) for sample in made.samples} == {SAMPLE_TYPES}


def test_logprobs_are_filled_in_by_name() -> None:
    made = batch(group(rollout(1.0), rollout(0.0)))
    given = [np.full(5, i, np.float32) for i in range(2)]
    filled = made.with_logprobs("reference_logprobs", given)
    assert [sample.reference_logprobs is given[i] for i, sample in enumerate(filled.samples)] == [True, True]
    assert all(sample.reference_logprobs is None for sample in made.samples)
    with pytest.raises(ValueError, match="zip"):
        made.with_logprobs("reference_logprobs", given[:1])


@pytest.mark.parametrize(
    ("failed", "limit", "fails"), [(1, 0.25, False), (2, 0.25, True), (0, 0.0, False), (4, 1.0, False)]
)
def test_a_job_fails_above_its_limit(failed: int, limit: float, fails: bool) -> None:
    groups = [group(*(rollout(None if i < failed else 1.0) for i in range(4)))]
    if not fails:
        check_failures(groups, limit)
        return
    with pytest.raises(JobFailed, match=r"2 of 4.*it raised.*max_failed_fraction"):
        check_failures(groups, limit)


def test_nothing_sampled_is_no_failure() -> None:
    check_failures([], 0.0)
    figures = group_metrics([group(rollout(None), rollout(None))])
    assert (figures["rollouts"], figures["failed"]) == (2, 2)
    assert isinstance(figures["reward"], float)
    assert math.isnan(figures["reward"])


def test_metrics_of_groups() -> None:
    figures = group_metrics([group(rollout(1.0, 2), rollout(0.0, 4, cut_off=True), rollout(None, 9))])
    assert figures == {
        "reward": 0.5,
        "reward_std": 0.5,
        "reward_parts": {"exact": 0.5},
        "length": 3.0,
        "truncated": 0.5,
        "rollouts": 3,
        "failed": 1,
    }
