"""Settings that do not do what they seem to: each sentence, a job without the fault, and the value that it proposes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from motet.config import JobConfig
from motet.config.mistakes import no_such_field
from motet.config.told import told
from tests.support.following import changed

pytestmark = pytest.mark.tier1


def job(algorithm: Any = "grpo", **fields: Any) -> dict[str, Any]:
    learns = (
        {}
        if str(algorithm if isinstance(algorithm, str) else algorithm["type"]) in ("sft", "dpo", "kto")
        else {"reward": "exact"}
    )
    return {"name": "a", "data": "toy:add", "algorithm": algorithm, **learns, **fields}


def said(tree: dict[str, Any], rows: int = 10_000, liked: int = 0, disliked: int = 0) -> list[str]:
    return list(told(JobConfig.model_validate(tree), rows, Counter({True: liked, False: disliked})))


WELL: list[dict[str, Any]] = [
    job(),
    job({"type": "cispo", "importance_cap": 5.0}),
    job({"type": "grpo", "clip_high": 0.3, "clip_low": 0.1}),
    job({"type": "gspo"}),
    job({"type": "gspo", "clip_high": 1e-3}),
    job({"type": "grpo", "importance_cap": 3.0, "correct_sampler": True}),
    job({"type": "grpo", "kl": {"type": "k2", "coef": 0.1, "reference": "start"}}),
    job({"type": "dapo", "overlong_buffer": 9}),
    job({"type": "dapo", "oversampling": 1}),
    job(eval={"n": 4}),
    job(eval={"temperature": 0}),
    job("sft", steps=100),
    job({"type": "dpo", "beta": 0.2}),
]


@pytest.mark.parametrize("tree", WELL, ids=str)
def test_settings_that_do_what_they_say_are_not_named(tree: dict[str, Any]) -> None:
    assert said(tree, 1000, 10, 10) == []


def test_both_of_a_penalty_without_a_weight_are_said() -> None:
    assert len(said(job({"type": "grpo", "kl": {"type": "k1"}}))) == 2


@pytest.mark.parametrize(
    ("liked", "disliked", "field", "value"), [(9, 1, "disliked_weight", 9.0), (20, 60, "liked_weight", 3.0)]
)
def test_ratings_that_are_mostly_of_one_kind_are_told_with_the_weight(
    liked: int, disliked: int, field: str, value: float
) -> None:
    tree = job({"type": "kto"})
    (says,) = said(tree, 100, liked, disliked)
    assert says.startswith(f"{liked} of {liked + disliked} rows are liked")
    assert says.endswith(f"set algorithm.{field} to {value:g}")
    assert said(changed(tree, f"algorithm.{field}", value), 100, liked, disliked) == []
    assert said(tree, 100, 3, 2) == []
    (alone,) = said(tree, 100, 9, 0)
    assert alone.startswith("all 9 rows have the label true")


def test_many_passes_over_few_rows_are_told_with_the_steps_of_three() -> None:
    (says,) = said(job("sft"), 20)
    assert says == "steps: 50 steps of 16 rows are 40 passes over 20 rows; set steps to 4 for 3"
    assert said(job("sft", steps=4), 20) == []


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("epsilon_high", "5.0", job({"type": "cispo", "importance_cap": 5.0})),
        ("loss_type", "dapo", job({"type": "grpo", "reduction": "token"})),
        ("loss_type", "grpo", job({"type": "grpo", "reduction": "sequence"})),
        ("loss_agg_mode", "seq-mean-token-mean", job({"type": "grpo", "reduction": "sequence"})),
    ],
)
def test_what_a_message_says_of_another_programs_name_leads_to_the_same_step(
    name: str, value: str, same: dict[str, Any]
) -> None:
    says = no_such_field(name, JobConfig)
    fields = set(re.findall(r"algorithm\.(\w+)", says))
    assert set(same["algorithm"]) - {"type"} <= fields
    assert said(same) == []
    if name == "loss_type":
        assert re.search(rf"`{same['algorithm']['reduction']}` for [\w ]*{value}", says)
        assert "type, such as dapo" not in says, "its dynamic sampling is another step"
