"""Rewards are asked about the reference answers of a few rows, and about a wrong text, before a job learns from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from motet.config import DataConfig, RewardConfig
from motet.data.dataset import Dataset, load_dataset
from motet.rewards import reference_check
from motet.rewards.reward_elsewhere import ScoreOrReason
from motet.rewards.reward_pool import RewardPool

OWN = """
def deaf(problem, completion):
    return float(completion == "Answer: " + problem.answer)

def always(problem, completion):
    return 1.0

def near(problem, completion):
    return -abs(len(completion) - len(problem.answer))
"""
GRADER = {"type": "string_check", "input": "{{sample.output_text}}"}


def data(*answers: str, **fields: Any) -> Dataset:
    rows = [{"prompt": f"question {n}", "answer": answer} for n, answer in enumerate(answers)]
    return load_dataset(DataConfig.model_validate({"source": rows, "holdout": 0, **fields}))


def told(
    *rewards: dict[str, Any], answers: tuple[str, ...] = ("12 cm^2", "4"), note: bool = False, ask: bool = False
) -> list[str]:
    """What is told of rewards."""
    asked: list[str] = []

    async def judge(
        job: str, reward: RewardConfig, problem: Any, completions: list[str], seen: Any
    ) -> list[ScoreOrReason]:
        asked.append(job)
        return [0.0] * len(completions)

    async def main() -> list[str]:
        pool, configs = RewardPool(1, {"http": judge}), [RewardConfig.model_validate(reward) for reward in rewards]
        try:
            if note:
                return await reference_check.note(pool, "a", configs, data(*answers), None)
            return await reference_check.check(pool, "a", configs, data(*answers), None, ask)
        finally:
            await pool.close()

    found = asyncio.run(main())
    assert bool(asked) == ask
    return found


@pytest.mark.parametrize("name", ["exact", "contains", "numeric", "math"])
def test_reward_that_hears_its_reference_is_not_told(name: str) -> None:
    assert told({"name": name}, {"name": "length", "args": {"target": 5}, "weight": 0.1}) == []
    assert told({"name": name}, note=True) == []


def test_reward_that_does_not_hear_its_reference_is_told_by_check_and_by_a_note() -> None:
    args = {**GRADER, "operation": "eq", "reference": "Answer: {{item.answer}}"}
    expected = ["the reward grader gives the reference answer 0 in 2 of 2 rows, as '12 cm^2'"]
    assert told({"name": "grader", "args": args}) == told({"name": "grader", "args": args}, note=True) == expected


def test_pattern_that_wants_more_than_the_reference_is_not_told() -> None:
    pattern = {"name": "regex", "args": {"pattern": r"\w.* {answer}\.", "full": True}}
    assert told(pattern, answers=("XUI", "WHZ")) == told(pattern, answers=("XUI", "WHZ"), note=True) == []


def test_reward_that_pays_a_nonsense_answer_is_told() -> None:
    args = {**GRADER, "operation": "ne", "reference": "{{item.answer}}"}
    (found,) = told({"name": "grader", "args": args}, {"name": "math", "weight": 0.1}, answers=("4", "5"))[:1]
    assert found == "the reward grader gives the reference answer 0 in 2 of 2 rows, as '4'"
    args = {"pattern": "{answer}|x"}
    (found,) = told({"name": "regex", "args": args}, answers=("4", "5"))
    assert found == "the reward regex gives the nonsense answer 'xyzzy' 1 in 2 of 2 rows"


def test_row_that_a_reward_refuses_is_told_with_its_reason() -> None:
    (found,) = told({"name": "math"}, answers=("4", "2 apples and 3 pears"))
    assert found.startswith(
        "the reward math fails in 1 of 2 rows, as row 2: reward math: math-verify finds no expression"
    )


def test_own_rewards_are_told_as_a_sum_and_run_by_check_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    deaf, always, near = ({"name": f"{tmp_path / 'own.py'}:{name}"} for name in ("deaf", "always", "near"))
    assert told(deaf) == ["the reward own.py:deaf gives the reference answer 0 in 2 of 2 rows, as '12 cm^2'"]
    assert told(always) == ["the reward own.py:always gives the nonsense answer 'xyzzy' 1 in 2 of 2 rows"]
    assert told(near) == []
    assert told(deaf, {"name": "exact"}) == []
    assert told(deaf, note=True) == []


def test_rewards_elsewhere_are_asked_only_where_that_is_wanted() -> None:
    elsewhere = {"name": "http", "args": {"url": "https://example.org"}}
    assert told(elsewhere) == []
    assert told(elsewhere, ask=True) == ["the reward http gives the reference answer 0 in 2 of 2 rows, as '12 cm^2'"]


def test_reward_of_weight_zero_is_not_asked() -> None:
    args = {**GRADER, "operation": "eq", "reference": "Answer: {{item.answer}}"}
    assert told({"name": "exact"}, {"name": "grader", "args": args, "weight": 0}) == []


def test_at_most_a_few_rows_are_asked_about() -> None:
    answers = tuple(f"{n} apples and {n} pears" for n in range(100))
    assert " of 24 rows" in told({"name": "math"}, answers=answers)[0]
    assert " of 8 rows" in told({"name": "math"}, answers=answers, note=True)[0]
