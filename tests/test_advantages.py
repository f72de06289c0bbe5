"""Advantages, loss denominators, dynamic sampling and presets, against figures worked out by hand."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.algorithms.advantages import ADVANTAGES, AdvantageKind, Reduction, advantages, normalisation, select_groups
from motet.algorithms.losses import LOSSES
from motet.algorithms.presets import PRESETS, LossType, resolve
from motet.config import AlgorithmConfig, KLConfig
from motet.types import Group, LossSpec, Problem, Rollout

REWARDS = st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=8), max_size=6)
CENTRED: tuple[AdvantageKind, ...] = ("grpo", "centered", "rloo")
HALF_STD = 0.5 / math.sqrt(4 * 0.25 / 3)  # of the rewards 1, 0, 0, 1: half a point over the sample deviation

HAND: dict[AdvantageKind, list[list[float]]] = {
    "grpo": [[HALF_STD, -HALF_STD, -HALF_STD, HALF_STD], [-1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5)]],
    "centered": [[0.5, -0.5, -0.5, 0.5], [-1.5, 1.5]],
    "rloo": [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-3.0, 3.0]],
    "batch_baseline": [[0.0, -1.0, -1.0, 0.0], [-1.0, 2.0]],
    "none": [[1.0, 0.0, 0.0, 1.0], [0.0, 3.0]],
}


@pytest.mark.parametrize("kind", HAND)
def test_hand_computed(kind: AdvantageKind) -> None:
    """The mean of all nine rewards, the baseline of the step, is 1."""
    result = advantages([[1.0, 0.0, 0.0, 1.0], [0.0, 3.0], [2.0, 1.0, 1.0]], kind)
    assert [values.dtype for values in result] == [np.float32] * 3
    for got, want in zip(result, HAND[kind], strict=False):
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7)


def test_rloo_is_reward_minus_mean_of_the_others() -> None:
    rewards = [0.3, 0.9, -1.2, 2.0]
    want = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(advantages([rewards], "rloo")[0], want, rtol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6, -0.7])
@pytest.mark.parametrize("kind", CENTRED)
def test_equal_rewards_give_exact_zeros(kind: AdvantageKind, value: float) -> None:
    """Numbers like 0.1 may differ from their own rounded mean; dividing by a tiny deviation would blow that up."""
    for size in (1, 3, 7, 8):
        assert advantages([[value] * size, [0.0, 1.0]], kind)[0].tolist() == [0.0] * size


def test_sums_are_exact() -> None:
    """Adding from left to right loses the 1, and with it a third of its advantage."""
    assert advantages([[1e17, 1.0, -1e17]], "centered")[0][1] == pytest.approx(2 / 3)


def test_batch_baseline_is_zero_only_when_the_whole_step_is_equal() -> None:
    assert [a.tolist() for a in advantages([[0.1] * 3, [0.1] * 2], "batch_baseline")] == [[0.0] * 3, [0.0] * 2]
    assert [a.tolist() for a in advantages([[1.0, 1.0], [0.0, 0.0]], "batch_baseline")] == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_empty_steps_and_groups(kind: AdvantageKind) -> None:
    assert advantages([], kind) == []
    assert [len(a) for a in advantages([[], [1.0, 2.0], []], kind)] == [0, 2, 0]


@given(REWARDS, st.sampled_from(CENTRED))
def test_a_group_depends_on_itself_alone(groups: list[list[float]], kind: AdvantageKind) -> None:
    together = advantages(groups, kind)
    for group, result in zip(groups, together, strict=True):
        np.testing.assert_array_equal(result, advantages([group], kind)[0])
        np.testing.assert_array_equal(result[::-1], advantages([group[::-1]], kind)[0])  # nor on the order
        assert np.isfinite(result).all()


@pytest.mark.parametrize(
    ("reduction", "weights", "denominator", "loss"),
    [("token", [1, 1], 5.0, 7 / 5), ("sequence", [1, 0.25], 2.0, 2.0), ("constant", [1, 1], 16.0, 7 / 16)],
)
def test_normalisation_worked_example(
    reduction: Reduction, weights: list[float], denominator: float, loss: float
) -> None:
    weights_S, got = normalisation([1, 4], reduction, max_tokens=8)
    assert (weights_S.tolist(), got) == (weights, denominator)
    assert (weights_S[0] * 3 + weights_S[1] * 4) / got == pytest.approx(loss)


@given(st.lists(st.integers(0, 5), max_size=12), st.sampled_from(get_args(Reduction)))
@example([3, 0, 1], "constant")
@example([0], "constant")
def test_samples_without_tokens_count_nowhere(lengths: list[int], reduction: Reduction) -> None:
    weights_S, denominator = normalisation(lengths, reduction, 64)
    kept_S, kept_denominator = normalisation([n for n in lengths if n], reduction, 64)
    assert denominator == kept_denominator >= 1
    assert weights_S.dtype == np.float32
    np.testing.assert_array_equal(weights_S[np.array(lengths, dtype=bool)], kept_S)
    if reduction != "constant" and kept_S.size:  # equal token losses of 1 average to 1
        assert float(np.dot(weights_S, lengths)) / denominator == pytest.approx(1.0)


def _group(problem: int, rewards: list[float], failed: int = 0) -> Group:
    row = Problem(problem, (), "")
    ids, mask, logprobs = np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32)
    scored = tuple(Rollout(row, i, ids, mask, logprobs, ids, (), reward=r) for i, r in enumerate(rewards))
    errors = tuple(Rollout(row, 90 + i, ids, mask, logprobs, ids, (), error="timed out") for i in range(failed))
    return Group(row, 0, 0, scored + errors)


def test_select_groups_keeps_data_order_and_drops_what_has_no_signal() -> None:
    groups = [_group(0, [1, 1]), _group(1, [0, 1]), _group(2, [0], failed=1), _group(3, [1, 0]), _group(4, [0, 1])]
    assert [group.problem.id for group in select_groups(groups, 2)] == [1, 3]
    assert [group.problem.id for group in select_groups(groups, 9)] == [1, 3, 4]
    assert select_groups([_group(0, [1, 1]), _group(1, [0, 0])], 1) == ()


def test_every_type_has_a_preset_and_every_name_an_implementation() -> None:
    fields = AlgorithmConfig.model_fields
    assert set(PRESETS) == set(get_args(fields["type"].annotation))
    assert set(ADVANTAGES) == set(get_args(AdvantageKind)) == set(get_args(get_args(fields["advantage"].annotation)[0]))
    assert set(LOSSES) == set(get_args(LossType)) == set(get_args(get_args(fields["loss"].annotation)[0]))
    assert set(get_args(Reduction)) == set(get_args(get_args(fields["reduction"].annotation)[0]))
    assert LossSpec().type in LOSSES


@pytest.mark.parametrize(
    ("config", "advantage", "loss", "reduction", "clips"),
    [
        (AlgorithmConfig(), "grpo", "ppo_clip", "token", (0.2, 0.28)),
        (AlgorithmConfig(type="dr_grpo"), "centered", "ppo_clip", "constant", (0.2, 0.28)),
        (AlgorithmConfig(type="dapo"), "grpo", "ppo_clip", "token", (0.2, 0.28)),
        (AlgorithmConfig(type="ppo", clip_high=0.2), "batch_baseline", "ppo_clip", "token", (0.2, 0.2)),
        (AlgorithmConfig(type="rloo"), "rloo", "reinforce", "constant", (0.2, 0.28)),
        (AlgorithmConfig(type="reinforce"), "batch_baseline", "reinforce", "constant", (0.2, 0.28)),
        (AlgorithmConfig(type="gspo"), "grpo", "gspo", "sequence", (3e-4, 4e-4)),
        (AlgorithmConfig(type="gspo", clip_low=0.2), "grpo", "gspo", "sequence", (0.2, 4e-4)),
        (AlgorithmConfig(type="gspo", loss="ppo_clip"), "grpo", "ppo_clip", "sequence", (0.2, 0.28)),
        (AlgorithmConfig(loss="gspo"), "grpo", "gspo", "token", (3e-4, 4e-4)),
        (AlgorithmConfig(type="cispo", advantage="none"), "none", "cispo", "token", (0.2, 0.28)),
        (AlgorithmConfig(type="importance_sampling"), "centered", "importance_sampling", "constant", (0.2, 0.28)),
        (AlgorithmConfig(reduction="sequence"), "grpo", "ppo_clip", "sequence", (0.2, 0.28)),
    ],
)
def test_presets_and_explicit_fields(
    config: AlgorithmConfig, advantage: str, loss: str, reduction: str, clips: tuple[float, float]
) -> None:
    algorithm = resolve(config)
    assert (algorithm.advantage, algorithm.loss, algorithm.reduction) == (advantage, loss, reduction)
    assert (algorithm.clip_low, algorithm.clip_high) == clips
    assert resolve(AlgorithmConfig(**config.model_dump(exclude_unset=True))) == algorithm


def test_loss_spec_carries_every_choice() -> None:
    config = AlgorithmConfig(type="cispo", kl=KLConfig(coef=0.1, type="k2"), importance_cap=5, correct_sampler=True)
    algorithm = resolve(config)
    assert (algorithm.needs_reference, algorithm.needs_proximal) == (True, True)
    assert algorithm.loss_spec(0.7) == LossSpec("cispo", 0.2, 0.28, 0.1, "k2", 5, True, 0.7)
    assert not resolve(AlgorithmConfig()).needs_reference
