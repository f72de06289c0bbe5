"""Warnings about a training that goes nowhere, and none about one that learns."""

from __future__ import annotations

from typing import Any

import pytest

from motet.runtime.signs import ALIKE, FAR, LEAST, NO_SIGNAL, RECENT, Signs, no_signal

Values = list[float | None]


def warnings(steps: int = 2 * RECENT, **fields: Any) -> tuple[str, ...]:
    """Of a job whose lines have these values: one throughout, or one for each step."""
    usual = {"reward": 0.3, "reward_std": 0.4, "no_signal": 0.2, "distinct": 0.8, "kl_base": None} | fields
    signs = Signs()
    for step in range(steps):
        signs.see(
            {name: value[step] if isinstance(value, list) else value for name, value in usual.items()} | {"step": step}
        )
    signs.see({"step": steps, "version": steps, "eval": {}})
    return tuple(signs.warnings.values())


def test_an_ordinary_training_is_not_warned_about() -> None:
    assert warnings() == ()


@pytest.mark.parametrize("reward", [0.0, 0.02, 0.97])
def test_groups_without_signal(reward: float) -> None:
    (warning,) = warnings(reward=reward, reward_std=0.1, no_signal=0.9)
    assert warning.startswith(f"no signal in 90% of the groups (mean reward {reward:.2g}): too hard or too easy")
    assert warnings(no_signal=NO_SIGNAL - 0.01) == ()
    assert warnings(LEAST - 1, no_signal=1.0) == (), "a few steps say little"
    assert warnings(no_signal=[1.0] * RECENT + [0.1] * RECENT) == (), "what is past does not count"


def test_what_has_been_learned_has_no_signal_left() -> None:
    learned = [min(0.1 + 0.1 * step, 0.98) for step in range(2 * RECENT)]
    assert warnings(reward=learned, no_signal=0.9, distinct=[0.8] * RECENT + [0.2] * RECENT) == ()


def test_a_little_luck_is_no_rise() -> None:
    """Rewards of 0 that are once in a while 0.02 have not begun to learn."""
    lucky = [0.0] * RECENT + [0.0, 0.02] * (RECENT // 2)
    assert warnings(reward=lucky, reward_std=[5 * value for value in lucky], no_signal=0.95)


def test_far_from_the_base() -> None:
    assert warnings(kl_base=[0.2] * (2 * RECENT - 1) + [FAR - 0.01]) == ()
    kl: Values = [None] * (2 * RECENT)
    kl[3] = 3.1
    assert warnings(kl_base=kl) == (
        "far from the base: KL 3.1 nats per token; lower optimizer.lr, or set algorithm.kl.coef",
    )


def test_answers_that_grow_alike() -> None:
    def falling(to: float) -> list[float]:
        return [0.8] * RECENT + [to] * RECENT

    (warning,) = warnings(distinct=falling(0.8 * ALIKE - 0.01))
    assert warning.startswith("answers grow alike, and not better: 39% of a group's are distinct, at first 80%")
    assert warnings(distinct=falling(0.8 * ALIKE + 0.01)) == ()
    assert warnings(distinct=0.13) == (), "yes or no: few answers are all there are"


def test_numbers_that_are_missing_warn_of_nothing() -> None:
    assert warnings(reward=None, reward_std=None, no_signal=None, distinct=None) == ()
    assert no_signal(float("nan"), float("nan")) == ""
