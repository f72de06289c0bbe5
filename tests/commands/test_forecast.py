"""What `motet check` warns of before anything is trained, and its forecast of tokens, time and money."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.commands.forecast import Forecast, forecast, warnings_of
from motet.config import JobConfig, PricesConfig
from motet.model.load import load_tokenizer
from motet.tasks.chat import Chat
from motet.types import Branch, FinishReason, Group, Message, Problem, Rollout, Turn

DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}A:"
LOWERS = "{% for m in messages %}{{ m.content|lower }}{% endfor %}A:"


@pytest.fixture(scope="module")
def tokenizer(small_base_dir: Path) -> Any:
    return load_tokenizer(str(small_base_dir))


def job(**fields: Any) -> JobConfig:
    return JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact", "steps": 10, **fields})


def problem(answer: str = "4") -> Problem:
    return Problem(0, (Message("system", "Be brief."), Message("user", "What is  2 + 2?\n")), answer)


def group(*said: str, tokens: int = 3, reason: FinishReason = FinishReason.STOP) -> Group:
    ids, nothing = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32)
    branch = Branch(ids, np.ones(tokens, np.bool_), nothing, np.zeros(tokens, np.int32))
    rollouts = [Rollout(problem(), at, (branch,), (Turn(text, reason),), reward=1.0) for at, text in enumerate(said)]
    return Group(problem(), 0, 0, tuple(rollouts))


def test_a_prompt_that_the_template_changes_is_named(tokenizer: Any) -> None:
    def found(template: str | None) -> list[str]:
        import copy

        own = copy.deepcopy(tokenizer)
        own.chat_template = template or own.chat_template
        return list(warnings_of(job(), Chat(own), [problem()], []))

    assert found(None) == []  # white space at the ends may go
    (dropped,) = found(DROPS_SYSTEM)
    assert "1 of 1 prompts" in dropped
    assert "the system's message 'Be brief.'" in dropped
    (lowered,) = found(LOWERS)
    assert "row 1" in lowered


def test_answers_that_will_be_cut_and_groups_that_teach_nothing_are_told(tokenizer: Any) -> None:
    chat = Chat(tokenizer)
    cut = job(sampling={"max_tokens": 3, "temperature": 0.1})
    (longer,) = warnings_of(cut, chat, [problem("one two three four"), problem("4")], [])
    assert longer.startswith("1 of 2 reference answers have 3 tokens or more (the longest")
    fine = [group("a", "b"), group("a", "c")]
    assert list(warnings_of(cut, chat, [problem()], fine)) == []
    (alike,) = warnings_of(cut, chat, [problem()], [group("a", "a"), group("b", "b"), group("a", "b")])
    assert "the same in 2 of 3 groups, which teaches nothing: raise sampling.temperature (0.1)" in alike
    (full,) = warnings_of(cut, chat, [problem()], [group("a", "b", reason=FinishReason.LENGTH)])
    assert full == "100% of the answers were cut at sampling.max_tokens (3): raise it, or ask for shorter answers"


def test_a_forecast_is_a_range_around_the_lengths_that_were_seen() -> None:
    config = job(algorithm={"group_size": 4, "groups_per_step": 8}, sampling={"max_tokens": 100})
    answers = 4 * 8 * 10
    even = [group("a", "b", tokens=20)] * 4
    assert forecast(config, even, 2.0, {}) == Forecast((answers * 20, answers * 20), (20.0, 20.0))
    mixed = [group("a", tokens=10), group("b", tokens=30)]
    seen = forecast(config, mixed, 2.0, {"cost": 0.5})
    # 20 ± 2 · 10, at least a quarter
    assert seen == Forecast((answers * 5, answers * 40), (5.0, 40.0), 0.5 / 2 * answers)
    assert seen.text(PricesConfig(hour=3600)) == "forecast: 1.6k to 13k tokens sampled, 5s to 40s, cost 85.00 to 120.00"
    assert forecast(config, even, 2.0, {}).text(PricesConfig()) == "forecast: 6.4k tokens sampled, 20s"
    assert forecast(config, [group()], 2.0, {}) == Forecast((0, 0), (0, 0))
