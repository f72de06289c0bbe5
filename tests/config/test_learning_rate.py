"""The rate of each step."""

from __future__ import annotations

from typing import Any

import pytest

from motet.config import OptimizerConfig

pytestmark = pytest.mark.tier1


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, 0.933, 0.75, 0.5, 0.25, 0.067]),
        ({"lr_factors": {2: 0.5, 4: 3}}, [1, 1, 0.5, 0.5, 3, 3]),
        ({"lr_factors": {"3": 2}, "warmup_steps": 2, "schedule": "linear"}, [0.5, 1, 1, 1.5, 1, 0.5]),
    ],
)
def test_the_rate_of_each_step(fields: dict[str, Any], rates: list[float]) -> None:
    config = OptimizerConfig.model_validate(fields)
    assert [config.rate(1.0, step, 6) for step in range(6)] == pytest.approx(rates, abs=1e-3)
