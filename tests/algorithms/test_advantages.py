"""Advantages, loss denominators, dynamic sampling and presets, against figures worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motet.algorithms import Cispo, Dapo, DrGrpo, Grpo, Gspo, ImportanceSampling, PolicyGradient, Ppo, Reinforce, Rloo
from motet.algorithms.advantages import ADVANTAGES, AdvantageKind, Reduction, advantages, normalisation, select_groups
from motet.algorithms.critic import CriticConfig
from motet.algorithms.distillation import Distillation
from motet.algorithms.losses import LOSSES
from motet.algorithms.policy_gradient import KLConfig, LossName
from motet.algorithms.registry import ALGORITHMS
from motet.core.types import Branch, Group, Problem, Rollout

pytestmark = pytest.mark.tier1

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


def test_what_float32_cannot_hold_is_infinite() -> None:
    """Without a warning; the step is then skipped."""
    assert [values.tolist() for values in advantages([[1e39, 1.0], [-1e39]], "none")] == [[math.inf, 1.0], [-math.inf]]


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
    assert kept_S.size or denominator == 1
    assert weights_S.dtype == np.float32
    np.testing.assert_array_equal(weights_S[np.array(lengths, dtype=bool)], kept_S)
    if reduction != "constant" and kept_S.size:  # equal token losses of 1 average to 1
        assert float(np.dot(weights_S, lengths)) / denominator == pytest.approx(1.0)


def _group(problem: int, rewards: list[float], failed: int = 0) -> Group:
    row = Problem(problem, (), "")
    ids, mask, logprobs = np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32)
    scored = tuple(Rollout(row, i, (Branch(ids, mask, logprobs, ids),), (), reward=r) for i, r in enumerate(rewards))
    errors = tuple(Rollout(row, 90 + i, (), (), error="timed out") for i in range(failed))
    return Group(row, 0, 0, scored + errors)


def test_select_groups_keeps_data_order_and_drops_what_has_no_signal() -> None:
    groups = [_group(0, [1, 1]), _group(1, [0, 1]), _group(2, [0], failed=1), _group(3, [1, 0]), _group(4, [0, 1])]
    assert [group.problem.id for group in select_groups(groups, 2)] == [1, 3]
    assert [group.problem.id for group in select_groups(groups, 9)] == [1, 3, 4]
    assert select_groups([_group(0, [1, 1]), _group(1, [0, 0])], 1) == ()


def test_every_type_is_its_class_and_every_name_has_an_implementation() -> None:
    for name, kind in ALGORITHMS.items():
        assert kind.model_fields["type"].default == name
    fields = PolicyGradient.model_fields
    assert set(ADVANTAGES) == set(get_args(AdvantageKind)) == set(get_args(fields["advantage"].annotation))
    assert set(LOSSES) == set(get_args(LossName)) == set(get_args(fields["loss"].annotation))
    assert set(get_args(Reduction)) == set(get_args(fields["reduction"].annotation))


@pytest.mark.parametrize(
    ("algorithm", "advantage", "loss", "reduction", "clips"),
    [
        (Grpo(), "grpo", "ppo_clip", "token", (0.2, 0.28)),
        (DrGrpo(), "centered", "ppo_clip", "constant", (0.2, 0.28)),
        (Dapo(), "grpo", "ppo_clip", "token", (0.2, 0.28)),
        (Ppo(clip_high=0.2), "batch_baseline", "ppo_clip", "token", (0.2, 0.2)),
        (Rloo(), "rloo", "reinforce", "constant", (0.2, 0.28)),
        (Reinforce(), "batch_baseline", "reinforce", "constant", (0.2, 0.28)),
        (Gspo(), "grpo", "gspo", "sequence", (3e-4, 4e-4)),
        (Gspo(clip_low=0.2), "grpo", "gspo", "sequence", (0.2, 4e-4)),
        (Gspo(loss="ppo_clip"), "grpo", "ppo_clip", "sequence", (0.2, 0.28)),
        (Grpo(loss="gspo"), "grpo", "gspo", "token", (3e-4, 4e-4)),
        (Cispo(advantage="none"), "none", "cispo", "token", (0.2, 0.28)),
        (ImportanceSampling(), "centered", "importance_sampling", "constant", (0.2, 0.28)),
        (Grpo(reduction="sequence"), "grpo", "ppo_clip", "sequence", (0.2, 0.28)),
    ],
)
def test_types_and_explicit_fields(
    algorithm: PolicyGradient, advantage: str, loss: str, reduction: str, clips: tuple[float, float]
) -> None:
    assert (algorithm.advantage, algorithm.loss, algorithm.reduction) == (advantage, loss, reduction)
    assert (algorithm.clip_low, algorithm.clip_high) == clips
    assert type(algorithm).model_validate(algorithm.model_dump()) == algorithm


@pytest.mark.parametrize(
    ("algorithm", "reference", "proximal", "keeps_all", "companions"),
    [
        (Grpo(), False, False, False, 0),
        (Cispo(kl=KLConfig(coef=0.1, type="k2"), correct_sampler=True), True, True, True, 0),
        (Ppo(), False, False, False, 0),
        (Ppo(critic=CriticConfig()), False, False, True, 1),
        (Distillation(teacher="start"), True, False, True, 0),
        (Distillation(teacher="adapter"), True, False, True, 1),
        (Distillation(teacher="http://127.0.0.1:9"), True, False, True, 0),
    ],
)
def test_what_an_algorithm_needs_follows_from_its_settings(
    algorithm: PolicyGradient, reference: bool, proximal: bool, keeps_all: bool, companions: int
) -> None:
    assert (algorithm.needs_reference, algorithm.needs_proximal, algorithm.keeps_all) == (
        reference,
        proximal,
        keeps_all,
    )
    assert algorithm.companions(started=False) == companions


def _answer(reward: float, n_tokens: int) -> Rollout:
    ids, logprobs = np.zeros(n_tokens, np.int32), np.zeros(n_tokens, np.float32)
    branch = Branch(ids, np.ones(n_tokens, np.bool_), logprobs, ids)
    return Rollout(Problem(0, (), ""), 0, (branch,), (), reward=reward)


def test_dapo_punishes_answers_that_come_near_the_limit() -> None:
    algorithm = Dapo(overlong_buffer=4)
    answers = [_answer(1.0, n_tokens) for n_tokens in (3, 6, 8, 10)]
    assert [algorithm.punishment(answer, 10) for answer in answers] == [0.0, 0.0, -0.5, -1.0]
    group = Group(answers[0].problem, 0, 0, tuple(answers))
    (values,) = cast(list[list[float]], algorithm.advantages([group], 10))
    assert values[0] == values[1] > values[2] > values[3]
    assert Dapo().advantages([group], 10) == [[0.0] * 4]


def test_dapo_punishes_the_longest_of_several_turns() -> None:
    """`max_tokens` is the limit of one turn."""
    (branch,) = _answer(1.0, 15).branches
    turns = replace(branch, loss_mask=np.array(list("sss.ssssss.ssss")) == "s")
    others = replace(branch, loss_mask=np.arange(15) >= 7)
    algorithm = Dapo(overlong_buffer=4)
    for branches, punished in (((turns,), 0.0), ((turns, others), -0.5), ((), 0.0)):
        assert algorithm.punishment(replace(_answer(1.0, 1), branches=branches), 10) == punished
    nothing = replace(_answer(1.0, 1), branches=())
    assert Dapo(overlong_buffer=10).punishment(nothing, 10) == Dapo().punishment(_answer(1.0, 10), 10) == 0.0
