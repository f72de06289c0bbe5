"""Advantages: how the rewards of a step become the factor of each token's log probability.

Everything here is a pure function of one job's complete step. Sums are exactly rounded (`math.fsum`), so a result
depends neither on the order of the rewards nor on the machine.

Legend: G rollouts of one group, S samples of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motet.core.types import FloatArray, Group

AdvantageKind = Literal["grpo", "centered", "rloo", "batch_baseline", "none"]
Reduction = Literal["token", "sequence", "constant"]
Rewards = NDArray[np.float64]

STD_EPSILON = 1e-6


def advantages(groups: Sequence[Sequence[float]], kind: AdvantageKind) -> list[FloatArray]:
    """One advantage per reward, group by group.

    Args:
        groups: finite rewards of the scored rollouts of each group of the step, in data order.
        kind: a name in `ADVANTAGES`.

    Returns:
        float32 arrays [G] in the shape of `groups`; computed in float64.
    """
    rewards = [np.asarray(group, dtype=np.float64) for group in groups]
    with np.errstate(over="ignore"):  # a value beyond float32 becomes an infinite gradient, and so a skipped step
        return [values.astype(np.float32) for values in ADVANTAGES[kind](rewards)]


def _grpo(groups: list[Rewards]) -> list[Rewards]:
    """A = (r − mean) / (std + 1e-6), with the sample standard deviation (G − 1), as verl computes it; TRL adds 1e-4.

    Source: DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), section 4.1.2.
    """
    return [over_std(centred_G) for centred_G in _centered(groups)]


def over_std(centred_G: Rewards) -> Rewards:
    """Divide centred values by their sample deviation; zeros stay."""
    if not centred_G.any():
        return centred_G
    return centred_G / (math.sqrt(math.fsum(centred_G**2) / (len(centred_G) - 1)) + STD_EPSILON)


def _centered(groups: list[Rewards]) -> list[Rewards]:
    """A = r − mean of the group. Source: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), section 3.2."""
    return [_minus_mean(rewards_G) for rewards_G in groups]


def _rloo(groups: list[Rewards]) -> list[Rewards]:
    """A_i = r_i − mean of the other rewards of the group = (r_i − mean) · G / (G − 1).

    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024 (arXiv
    2402.14740). A group of one has no others and gets 0.
    """
    return [centred_G * (len(centred_G) / max(len(centred_G) - 1, 1)) for centred_G in _centered(groups)]


def _batch_baseline(groups: list[Rewards]) -> list[Rewards]:
    """A = r − mean of all rewards of the job's step: REINFORCE with a constant baseline (Williams 1992, section 4).

    A group whose rewards are all equal keeps a signal, unless the whole step is equal.
    """
    if not groups:
        return []
    lengths = [len(rewards_G) for rewards_G in groups]
    return np.split(_minus_mean(np.concatenate(groups)), np.cumsum(lengths)[:-1])


def _none(groups: list[Rewards]) -> list[Rewards]:
    """A = r, for rewards that are advantages already."""
    return groups


def _minus_mean(rewards: Rewards) -> Rewards:
    """Subtract the mean; exactly 0 if all are equal (the rounded mean of equal numbers may differ from them)."""
    if len(rewards) == 0 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    return rewards - math.fsum(rewards) / len(rewards)


ADVANTAGES: dict[AdvantageKind, Callable[[list[Rewards]], list[Rewards]]] = {
    "grpo": _grpo,
    "centered": _centered,
    "rloo": _rloo,
    "batch_baseline": _batch_baseline,
    "none": _none,
}


def normalisation(lengths: Sequence[int], reduction: Reduction, max_tokens: int) -> tuple[FloatArray, float]:
    """The weight of each sample's tokens, and the denominator of their sum: loss = Σ weight · token loss / denominator.

    Worked example, two samples of 1 and 4 trainable tokens with token losses [3] and [1, 1, 1, 1], max_tokens 8:

    - token: weights [1, 1], denominator 5, loss (3 + 4) / 5 = 1.4. Tokens count the same (DAPO, arXiv 2503.14476).
    - sequence: weights [1, 1/4], denominator 2, loss (3 + 1) / 2 = 2. Samples count the same (GRPO, arXiv 2402.03300).
    - constant: weights [1, 1], denominator 2 · 8, loss 7 / 16. Long samples are not discounted (Dr. GRPO, arXiv
      2503.20783); up to the factor 1 / max_tokens the sum over a sequence of the REINFORCE papers.

    Args:
        lengths: trainable tokens of each sample of the job's COMPLETE step, never of a micro-batch. A sample with none
            (masked out) does not count: leaving it out of the step gives the same figures.
        reduction: the name of the average, as above.
        max_tokens: the longest completion; only `constant` uses it.

    Returns:
        Weights [S], and a denominator that is at least 1, also for a step without samples.
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    trained = int(np.count_nonzero(lengths_S))
    ones_S = np.ones(len(lengths_S), dtype=np.float32)
    if reduction == "token":
        return ones_S, float(max(int(lengths_S.sum()), 1))
    if reduction == "sequence":
        return (ones_S / np.maximum(lengths_S, 1)).astype(np.float32), float(max(trained, 1))
    return ones_S, float(max(trained * max_tokens, 1))


def select_groups(groups: Sequence[Group], wanted: int) -> tuple[Group, ...]:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): the first `wanted` groups whose rewards differ.

    Args:
        groups: all sampled groups of the step's data window, in data order (never in order of completion).
        wanted: `groups_per_step`.

    Returns:
        Possibly fewer than wanted, and none if no group has a signal. The caller then trains the step without samples
        (weights stay, the version still advances) instead of sampling without end.
    """
    return tuple(group for group in groups if group.has_signal)[:wanted]
