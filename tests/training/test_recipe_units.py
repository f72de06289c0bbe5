"""Gradients of all recipes lie far within the range of sums of whole numbers, whose error is no larger than that of fp32."""

from __future__ import annotations

import pytest
from bench.unit_gradients import Recipes, Sizes, measured

from tests.support import tiny_models as tiny

SIZES = Sizes(rows=8, prompt=3, answer=6, rank=4)
RECIPES = ("GRPO", "PPO", "PPO's critic", "DPO", "KTO", "SFT", "soft targets", "distillation")


def test_every_recipe_is_measured() -> None:
    assert tuple(Recipes(tiny.base("llama"), SIZES, 0).steps()) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sum_of_units_is_no_further_from_fp64_than_one_of_fp32(recipe: str) -> None:
    """A room of 2⁶ is left above the largest sum, and of 2⁶ below the middle element."""
    found = measured(tiny.base("llama"), recipe, SIZES, n_steps=2)
    assert 0 < found.error <= found.error_fp32 < 1e-6
    assert 0 < found.largest_of_range < 2.0**-6
    assert found.middle_in_units > 2.0**6
