"""What `motet check` warns of before anything is trained, and its forecast of tokens, time and money."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from motet.chat.template import Chat
from motet.commands.check import _longest
from motet.commands.forecast import FirstSteps, Forecast, Seconds, forecast, never_said, warnings_of
from motet.config import EngineConfig, JobConfig, PricesConfig
from motet.core.types import Branch, FinishReason, Group, Message, Problem, Rollout, Turn
from motet.data.toys import FAMILIES, make_rows
from motet.model.frozen_weight import FrozenWeight
from motet.model.load import load_tokenizer
from motet.runtime.checkpoint import JobDirectory
from tests.support import tiny_models as tiny

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


@pytest.mark.parametrize("column", ["", "completion", "chosen"])
def test_characters_that_the_base_never_says_are_named(tokenizer: Any, small_base_dir: Path, column: str) -> None:
    weights = load_file(small_base_dir / "model.safetensors")["model.embed_tokens.weight"]
    head, chat = FrozenWeight(weights, None), Chat(tokenizer)

    def told(*answers: str) -> str:
        asked = (Message("user", "Say it."),)
        rows = [Problem(n, asked, "" if column else text, {column: text}) for n, text in enumerate(answers)]
        return never_said(chat, rows, head.twins)

    assert told("2021-03-04", "12", "3-1").startswith("the base never says '-', which 2 of 3 answers need")
    assert "never says '北', '京'" in told("北京", "12")
    assert told("12", "Sure! yellow", "AB CD") == ""
    assert told("", "") == ""
    for family in FAMILIES:
        assert told(*(row["answer"] for row in make_rows(family, 40, seed=0))) == ""


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
    each, steps, took = 4 * 8, 10, Seconds(1.5, 0.5)
    answers = each * steps
    even = [group("a", "b", tokens=20)] * 4
    assert forecast(config, even, took, {}, 0) == Forecast(
        (answers * 20, answers * 20), (20.0, 20.0), 0.0, (20, 20), (2.0, 2.0)
    )
    mixed = [group("a", tokens=10), group("b", tokens=30)]
    seen = forecast(config, mixed, took, {"cost": 0.5}, 0)
    # 20 ± 2 · 10, at least a quarter
    assert (seen.tokens, seen.seconds, seen.judge) == ((answers * 5, answers * 40), (5.0, 40.0), 0.5 / 2 * answers)
    assert seen.text(PricesConfig(hour=3600)) == "forecast: 1.6k to 13k tokens sampled, 5s to 40s, cost 85.00 to 120.00"
    assert forecast(config, even, took, {}, 0).text(PricesConfig()) == "forecast: 6.4k tokens sampled, 20s"
    assert forecast(config, [group()], took, {}, 0) == Forecast((0, 0), (0, 0))


@pytest.mark.parametrize(("every", "evaluations"), [(0, 2), (1, 11), (4, 4), (5, 3), (10, 2), (99, 2)])
def test_evaluations_are_part_of_a_forecast(every: int, evaluations: int) -> None:
    config = job(algorithm={"group_size": 4, "groups_per_step": 8}, eval={"every": every, "n": 2})
    found = forecast(config, [group("a", "b", tokens=20)] * 4, Seconds(1.5, 0.5, 3.0), {"cost": 1.0}, 16)
    answers = 4 * 8 * 10 + evaluations * 16 * 2
    assert [*found.tokens, *found.seconds] == [answers * 20] * 2 + [20 + 3 * evaluations] * 2
    assert found.judge == answers / 8


def test_the_time_of_rewards_is_part_of_a_forecast_and_does_not_follow_the_length_of_answers() -> None:
    config = job(algorithm={"group_size": 4, "groups_per_step": 8}, eval={"every": 5, "n": 2})
    mixed = [group("a", tokens=10), group("b", tokens=30)]
    slow = forecast(config, mixed, Seconds(1.5, 0.5, 3.0, 100.0, 50.0), {}, 16)
    others, rewards = 10 * 2.0 + 3 * 3.0, 10 * 100.0 + 3 * 50.0
    assert slow.seconds == (others / 4 + rewards, others * 2 + rewards)
    assert slow.step_seconds == (100.5, 104.0)
    cure = "score more at once (engine.reward_processes), or make the function async if it is not"
    assert slow.text(PricesConfig()).endswith(f"; rewards take 98% of the time: {cure}")
    assert "rewards" not in forecast(config, mixed, Seconds(1.5, 0.5, 3.0, 0.1, 0.1), {}, 16).text(PricesConfig())


def test_the_first_steps_of_a_run_are_compared_with_the_forecast(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    assert FirstSteps.read(directory) is None
    lines = [{"step": step, "length": 10 + step, "rollouts": 64 if step == 7 else 32} for step in range(20)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [0, 3, 5, 7, 9, 20, 22, 24, 1000]  # an evaluation between two of them
    directory.timings.write_text("".join(f'{{"time": {time}}}\n' for time in times) + '{"ti')
    steps = FirstSteps.read(directory)
    assert steps == FirstSteps(8, (8 * 10 + 28 + 17) / 9, 2.0)
    within = Forecast((0, 0), (0, 0), 0.0, (12.9, 20), (1.5, 2.5)).against(steps)
    assert within == (
        "its first 8 steps sampled 14 tokens an answer (forecast 13 to 20), and took 2 s each (forecast 1.5 s to 2.5 s)"
    )
    longer = Forecast((2000, 3000), (0, 0), 0.0, (6, 8), (1.0, 1.0)).against(steps)
    assert longer.endswith("; answers are longer than here, so expect about 5.0k tokens in all")
    assert "its first step sampled 14 " in (
        found := Forecast((9, 9), (0, 0), 0.0, (20, 30)).against(FirstSteps(1, 14, None))
    )
    assert "answers are shorter than here" in found


@pytest.mark.parametrize(
    "damaged", ["garbage\n", "[1]\n", '{"rollouts": "x", "length": 1}\n', '{"rollouts": 1, "length": {}}\n']
)
def test_damaged_logs_are_no_first_steps(tmp_path: Path, damaged: str) -> None:
    directory = JobDirectory(tmp_path)
    directory.metrics.write_text(damaged + "\n")
    directory.timings.write_text('{"time": 1}\n')
    assert FirstSteps.read(directory) is None
    directory.metrics.write_text('{"rollouts": 1, "length": 2}\n')
    assert FirstSteps.read(directory) == FirstSteps(1, 2, None)
    directory.timings.write_text("{}\n")
    assert FirstSteps.read(directory) is None


def test_a_sample_that_jobs_allow_and_memory_does_not_is_told() -> None:
    """Any machine has the memory for this base's longest sequence, and for none beyond."""
    base = tiny.base("llama")
    longest = base.info.max_positions
    assert "would not fit" not in _longest(base, EngineConfig(), longest)
    assert _longest(base, EngineConfig(), longest + 1).endswith("; one of 257, which these jobs allow, would not fit")
