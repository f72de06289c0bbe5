"""Groups of rollouts that nothing sampled."""

from __future__ import annotations

import math

import numpy as np

from motet.core.types import Branch, FinishReason, Group, Problem, Rollout, Turn
from tests.support.fake_run import problems

(PROBLEM, OTHER, THIRD) = problems(3)


PROMPT = 3


def rollout(reward: float | None, n_tokens: int = 2, *, problem: Problem = PROBLEM, cut_off: bool = False) -> Rollout:
    """A rollout of `n_tokens` sampled tokens after a prompt of three; a reward of None is a failed one."""
    length = PROMPT + n_tokens
    return Rollout(
        problem=problem,
        index=0,
        branches=(
            Branch(
                np.arange(length, dtype=np.int32),
                np.arange(length) >= PROMPT,
                np.full(length, -0.5, np.float32),
                np.zeros(length, np.int32),
            ),
        ),
        turns=(Turn("text", FinishReason.LENGTH if cut_off else FinishReason.STOP),),
        reward=math.nan if reward is None else reward,
        reward_parts={} if reward is None else {"exact": reward},
        error="it raised" if reward is None else "",
    )


def group(*rollouts: Rollout, problem: Problem = PROBLEM) -> Group:
    return Group(problem, step=0, version=0, rollouts=rollouts)
