"""Credit of turns: a turn is credited with the rewards that follow it, not with those before.

Legend: G rollouts of a group, K turns of a rollout, T tokens of a branch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from motet.algorithms.advantages import ADVANTAGES, AdvantageKind, Rewards, over_std
from motet.core.types import Branch, FloatArray, Group, Rollout


def returns_to_go(rollout: Rollout, discount: float) -> Rewards:
    """G_k = Σ_{j ≥ k} discount^(j − k) · r_j of each turn [K]; a reward that belongs to no turn counts with the last one."""
    rewards = _rewards(rollout)
    returns_K, later = np.zeros(len(rewards)), 0.0
    for turn in reversed(range(len(rewards))):
        returns_K[turn] = later = rewards[turn] + discount * later
    return returns_K


def _rewards(rollout: Rollout) -> list[float]:
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    rewards[-1] += rollout.reward - math.fsum(rewards)
    return rewards


def _of_trained_turns(rollout: Rollout) -> list[float]:
    """The reward of an untrained turn counts with the trained turn before it, or with the first."""
    given, before = [], 0.0
    for turn, reward in zip(rollout.turns, _rewards(rollout), strict=True):
        if turn.trained:
            given.append(reward + before)
            before = 0.0
        elif given:
            given[-1] += reward
        else:
            before += reward
    return given


def rewards_at_ends(rollout: Rollout, *, of_turns: bool) -> list[FloatArray]:
    """Rewards at their tokens, [T] for each branch, as input for a critic.

    Args:
        rollout: one with a reward.
        of_turns: put the reward of each turn on its last token; the last turn of a branch also gets later rewards of
            other branches. Otherwise, the whole reward is on the last token of each branch.
    """
    given = _of_trained_turns(rollout)
    to_go, turn, tokens = np.cumsum(given[::-1])[::-1], 0, []
    for branch in rollout.branches:
        rewards_T = np.zeros(len(branch.token_ids), np.float32)
        ends = [last - 1 for _, last in stretches(branch)]
        for end in ends:
            if of_turns:
                rewards_T[end] = to_go[turn] if end == ends[-1] else given[turn]
            elif end == ends[-1]:
                rewards_T[end] = rollout.reward
            turn += 1
        tokens.append(rewards_T)
    return tokens


def turn_advantages(groups: Sequence[Group], kind: AdvantageKind, discount: float) -> list[list[Rewards]]:
    """One advantage for each turn of each scored rollout, group by group.

    The baseline of turn k is a mean over all rollouts; one that ended earlier counts with a return of 0. So stopping is
    compared with continuing, and the rollouts to compare do not depend on where the policy stops. `grpo` divides by one
    deviation for all turns of a group.
    """
    returns = [[returns_to_go(rollout, discount) for rollout in group.scored] for group in groups]
    deepest = max((len(own) for group in returns for own in group), default=0)
    by_turn = [
        ADVANTAGES["centered" if kind == "grpo" else kind](
            [np.array([own[turn] if turn < len(own) else 0.0 for own in group]) for group in returns]
        )
        for turn in range(deepest)
    ]
    advantages = []
    for number, group in enumerate(returns):
        own = [np.array([by_turn[k][number][at] for k in range(len(turns))]) for at, turns in enumerate(group)]
        if kind == "grpo" and own:
            own = np.split(over_std(np.concatenate(own)), np.cumsum([len(turns) for turns in group])[:-1])
        advantages.append(own)
    return advantages


def placed(rollout: Rollout, advantages_K: Rewards) -> list[FloatArray]:
    """The advantages of turns at their sampled tokens, [T] for each branch."""
    trained_K = np.array([turn.trained for turn in rollout.turns], np.bool_)
    values, tokens = iter(advantages_K[trained_K].astype(np.float32)), []
    for branch in rollout.branches:
        advantages_T = np.zeros(len(branch.token_ids), np.float32)
        for first, last in stretches(branch):
            advantages_T[first:last] = next(values)
        tokens.append(advantages_T)
    if next(values, None) is not None:
        raise ValueError("a rollout has more turns than stretches that were sampled")
    return tokens


def stretches(branch: Branch) -> list[tuple[int, int]]:
    """The start and end of each turn of a branch."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], branch.loss_mask, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
