"""Credit of turns: returns by hand, and an exact policy gradient where the policy decides when to stop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.algorithms import Grpo, Ppo
from motet.algorithms.advantages import ADVANTAGES, AdvantageKind, advantages
from motet.algorithms.credit import placed, returns_to_go, rewards_at_ends, turn_advantages
from motet.algorithms.critic import CriticConfig
from motet.config.jobfile import parse_jobs
from motet.core.errors import ConfigError
from motet.core.types import Branch, FinishReason, Group, Message, Problem, Rollout, Turn

pytestmark = pytest.mark.tier1

PROBLEM = Problem(0, (Message("user", "?"),), "")


def rollout(rewards: Sequence[float | None], whole: float = 0.0, branches: Sequence[str] = ()) -> Rollout:
    """One with a turn for each reward; in a branch `s` is a sampled token, `.` one that was read."""
    turns = tuple(Turn("", FinishReason.STOP, reward=reward) for reward in rewards)
    made = []
    for text in branches or ["." + "s.".join([""] * (len(rewards) + 1))]:
        mask = np.array([letter == "s" for letter in text])
        n = len(text)
        made.append(Branch(np.arange(n, dtype=np.int32), mask, np.zeros(n, np.float32), np.zeros(n, np.int32)))
    total = math.fsum(reward or 0.0 for reward in rewards) + whole
    return Rollout(PROBLEM, 0, tuple(made), turns, total)


def group(*rollouts: Rollout) -> Group:
    return Group(PROBLEM, 0, 0, rollouts)


def test_a_return_is_what_came_after_and_what_no_turn_was_given_came_last():
    assert returns_to_go(rollout([1.0, None, 2.0], 4.0), 1.0).tolist() == [7.0, 6.0, 6.0]
    assert returns_to_go(rollout([1.0, None, 2.0], 4.0), 0.5).tolist() == [2.5, 3.0, 6.0]
    assert returns_to_go(rollout([None, None], 3.0), 1.0).tolist() == [3.0, 3.0]


def test_advantages_by_hand():
    """Returns 3, 2 of one rollout and 1 of one that ended after its first turn."""
    both = group(rollout([1.0, 2.0]), rollout([1.0]))
    ((first, second),) = turn_advantages([both], "centered", 1.0)
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [-1.0])
    ((first, second),) = turn_advantages([both], "rloo", 1.0)
    assert (first.tolist(), second.tolist()) == ([2.0, 2.0], [-2.0])
    ((first, second),) = turn_advantages([both], "grpo", 1.0)
    np.testing.assert_allclose([*first, *second], np.array([1, 1, -1]) / (math.sqrt(3 / 2) + 1e-6))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_of_one_turn_each_it_is_the_advantage_of_the_episode(kind: AdvantageKind) -> None:
    rewards = [[0.3, 0.9, -1.2], [0.1, 0.1], [2.0, 1.0, 0.5, 0.25]]
    groups = [group(*(rollout([None], one) for one in own)) for own in rewards]
    for values, expected in zip(turn_advantages(groups, kind, 0.5), advantages(rewards, kind), strict=True):
        np.testing.assert_array_equal(np.concatenate(values).astype(np.float32), expected)


def test_tokens_have_the_advantage_of_their_turn_in_whichever_branch_it_was_sampled():
    one = rollout([0.0, 1.0, 0.0], 0.0, ["..ss.s", "...sss"])
    first, second = placed(one, np.array([1.0, 2.0, 3.0]))
    assert first.tolist() == [0, 0, 1, 1, 0, 2]
    assert second.tolist() == [0, 0, 0, 3, 3, 3]
    made = Grpo(credit="return_to_go", advantage="centered").batch([group(one, rollout([0.0]))], 8)
    learned = [sample.advantages.tolist() for sample in made.samples]
    assert learned == [[0, 0, 0.5, 0.5, 0, 0.5], [0, -0.5, 0]], "a branch whose turns came to nothing is left out"


THETA = np.array([0.4, -0.7, 0.2])
"""Logits of going on after each of two turns, and of a good last move."""


def episodes() -> list[tuple[float, np.ndarray, list[float]]]:
    """Every course of an episode: its probability, the gradient of each turn's log probability [K, 3], rewards of turns."""
    p = 1 / (1 + np.exp(-THETA))
    scores = {(at, on): np.eye(3)[at] * (on - p[at]) for at, on in itertools.product(range(3), (0, 1))}
    chance = {(at, on): p[at] if on else 1 - p[at] for at, on in itertools.product(range(3), (0, 1))}
    courses = []
    for turns, rewards in (
        (((0, 0),), [0.5]),
        (((0, 1), (1, 0)), [0.25, -0.5]),
        (((0, 1), (1, 1), (2, 0)), [0.25, 0.0, -1.0]),
        (((0, 1), (1, 1), (2, 1)), [0.25, 0.0, 3.0]),
    ):
        courses.append((math.prod(chance[one] for one in turns), np.array([scores[one] for one in turns]), rewards))
    return courses


def test_the_gradient_is_exact_where_the_policy_decides_when_to_stop():
    """The mean over all pairs of episodes is half of the true gradient, as a group of two has it, in every direction."""
    true = sum(p * math.fsum(rewards) * scores.sum(0) for p, scores, rewards in episodes())
    estimate = np.zeros(3)
    for (p, first, own), (q, second, other) in itertools.product(episodes(), repeat=2):
        ((one, two),) = turn_advantages([group(rollout(own), rollout(other))], "centered", 1.0)
        estimate += p * q * (one @ first + two @ second) / 2
    np.testing.assert_allclose(estimate, true / 2, rtol=1e-12)


def test_a_critic_hears_of_a_reward_with_the_token_that_it_came_with():
    """The last turn of a branch also has what later branches were given; of a whole episode every branch ends with all."""
    one = rollout([1.0, None, 2.0], 4.0, ["..ss.s", "...sss"])
    for credit, expected in (
        ("return_to_go", [[0, 0, 0, 1, 0, 6], [0, 0, 0, 0, 0, 6]]),
        ("episode", [[0, 0, 0, 0, 0, 7], [0, 0, 0, 0, 0, 7]]),
    ):
        made = Ppo(critic=CriticConfig(), credit=credit).batch([group(one, rollout([0.0]))], 8)
        assert [sample.advantages.tolist() for sample in made.samples] == [*expected, [0, 0, 0]]


def test_what_a_turn_that_is_not_trained_brought_counts_with_the_trained_one_before_it():
    one = rollout([0.5, 1.0, 0.25, 2.0], 0.0, ["..ss..s"])
    turns = tuple(replace(turn, trained=number % 2 == 1) for number, turn in enumerate(one.turns))
    [rewards_T] = rewards_at_ends(replace(one, turns=turns), of_turns=True)
    assert rewards_T.tolist() == [0, 0, 0, 1.75, 0, 0, 2]


def test_what_several_turns_brought_before_the_first_trained_one_counts_with_it():
    one = rollout([0.5, 0.25, 1.0, 2.0], 0.0, ["..ss..s"])
    turns = tuple(replace(turn, trained=number >= 2) for number, turn in enumerate(one.turns))
    [rewards_T] = rewards_at_ends(replace(one, turns=turns), of_turns=True)
    assert rewards_T.tolist() == [0, 0, 0, 1.75, 0, 0, 2]


def test_what_cannot_be_credited_by_turns_is_refused():
    with pytest.raises(ValueError, match="discount is of rewards of turns"):
        Grpo(discount=0.9)
    with pytest.raises(ValueError, match=r"set critic\.gamma"):
        Ppo(critic={}, credit="return_to_go", discount=0.9)
    with pytest.raises(ValueError, match="advantage: the critic gives"):
        Ppo(critic=CriticConfig(), advantage="grpo")
    with pytest.raises(ConfigError, match="the teacher judges each token"):
        parse_jobs(
            "base: small\njobs:\n- {name: j, data: toy:add, algorithm: {type: distill, teacher: base, credit: return_to_go}}"
        )
