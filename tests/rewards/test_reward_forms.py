"""Reward functions of TRL, verl and OpenRLHF as they are there, and the parts of an answer that functions ask for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.core.types import Message, Problem, ToolCall, TurnParts
from motet.rewards.reward_answers import (
    LONGEST_TEXT,
    MOST_LOGGED,
    NO_CONTEXT,
    Answer,
    AnswerContext,
    Logs,
    Noted,
    ScoreOutcome,
    TrainerState,
    columns_of,
)
from motet.rewards.reward_elsewhere import from_wire, to_wire
from motet.rewards.reward_forms import Asked
from motet.rewards.reward_loading import resolve
from motet.rewards.reward_pool import RewardPool
from tests.support.cases import few

ROW = {
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": ["4", "four"]},
    "extra_info": {"index": 3},
}
PROBLEM = Problem(5, (Message("user", "2 + 2?"),), "4", ROW)
THOUGHT = TurnParts("2 and 2 is 4", "It is 5", (ToolCall("look", {"for": [1]}),))
STATE = TrainerState.at(step=3, steps=10, per_step=4, rows=8)


def asked(function: Any, *answers: str | Answer, problem: Problem = PROBLEM, **args: Any) -> tuple[Any, Logs]:
    """What a function returns for answers, and what it logged."""
    known = [Answer(one) if isinstance(one, str) else one for one in answers]
    question = Asked(problem, known, STATE, Logs(len(known)))
    return resolve("mine", args, function, columns=columns_of([problem])).call(question), question.logs


def scored(
    function: Any, texts: Sequence[str], context: AnswerContext = NO_CONTEXT, problem: Problem = PROBLEM
) -> list[ScoreOutcome]:
    """What a reward process gives for answers."""

    async def work() -> list[ScoreOutcome]:
        pool = RewardPool(1)
        try:
            await pool.register("job", [RewardConfig(name="mine", function=function)])
            return await pool.score("job", problem, texts, context)
        finally:
            await pool.close()

    return asyncio.run(work())


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert (data_source, ground_truth, extra_info) == ("sums", ["4", "four"], {"index": 3})
    return float(solution_str in ground_truth)


def with_metrics(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": float(solution_str in ground_truth),
        "acc": solution_str == "4",
        "pred": solution_str,
        "nan": float("nan"),
    }


def in_batches(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": float(said in truth) + bonus, "n": info["index"]} for _, said, truth, info in rows]


async def waits(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 1.0, "asked": 2}


def gsm8k(solution_str, ground_truth, method="strict"):
    return float(ground_truth == solution_str)


def test_the_score_of_verl_gets_the_truth_of_its_row() -> None:
    assert [asked(compute_score, text)[0] for text in ("4", "5")] == [1.0, 0.0]
    assert asked(in_batches, "4", "5", bonus=0.5)[0][1] == {"score": 0.5, "n": 3}
    of_verl = {"reward_model": {"ground_truth": 9}}
    for row, truth, named in (
        ({}, "4", "4"),
        ({"ground_truth": "7"}, "7", "4"),
        ({"ground_truth": 4}, 4, 4),
        (of_verl, 9, "4"),
        ({"ground_truth": None}, "4", "4"),
        ({"reward_model": {"ground_truth": None}, "ground_truth": 4}, 4, 4),
    ):
        problem = Problem(1, PROBLEM.messages, "4", row)
        for column, wanted in ((None, truth), ("right", named)):
            columns = columns_of([problem], named=column)
            loaded = resolve("mine", {}, lambda solution_str, ground_truth: ground_truth, columns=columns)
            assert loaded.call(Asked(problem, [Answer("x")])) == wanted
    assert asked(gsm8k, "4", problem=Problem(1, PROBLEM.messages, "4", {}))[0] == 1.0
    assert columns_of([Problem(1, (), "", {"ground_truth": None, "answer": None, "level": 0})]) == ["level"]


def sources(data_source, solution_str, ground_truth):
    return data_source


def all_sources(data_sources, solution_strs, ground_truths, **kwargs):
    return data_sources


def test_the_job_may_name_the_data_source_for_all_rows() -> None:
    bare = Problem(1, PROBLEM.messages, "4", {"data_source": None})
    assert asked(sources, "4", problem=bare, data_source="gsm8k")[0] == "gsm8k"
    assert asked(all_sources, "4", "5", problem=bare, data_sources="gsm8k")[0] == ["gsm8k", "gsm8k"]
    with pytest.raises(RewardError, match="has no argument 'data_source'"):
        asked(gsm8k, "4", data_source="gsm8k")
    with pytest.raises(RewardError, match=r"asks for the column.*every row has one"):
        asked(sources, "4", problem=bare)


def test_what_is_no_number_beside_a_score_is_logged_as_text() -> None:
    said = {"score": 1.0, "a": np.array([1, 2]), "big": 10**400, "huge": 10**5000, 5: 1, "x" * 70: 1, "": 1}
    (outcome,) = scored(lambda solution_str, ground_truth: said, ["4"])
    assert (outcome.error, outcome.reward, dict(outcome.metrics)) == ("", 1.0, {"5": 1.0, "x" * 64: 1.0})
    assert dict(outcome.extra) == {"a": "[1 2]", "big": str(10**400), "huge": "a value of type int"}


@pytest.mark.parametrize("function", [with_metrics, waits, in_batches])
def test_entries_beside_a_score_are_logged(function: Any) -> None:
    first, second = scored(function, ["4", "5"])
    assert first.reward == 1.0
    if function is with_metrics:
        assert (first.metrics, first.extra) == ({"acc": 1.0}, {"pred": "4"})
        assert (second.metrics, second.extra) == ({"acc": 0.0}, {"pred": "5"})
    else:
        assert second.metrics == ({"asked": 2.0} if function is waits else {"n": 3.0})


def with_state(completions, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("words", sum(map(len, completions)))
    log_metric("half", float("nan"))
    log_extra("upper", [text.upper() for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps + (trainer_state.epoch == 1.5)] * len(completions)


def test_what_a_trl_reward_logs_comes_back_with_its_scores() -> None:
    outcomes = scored(with_state, ["ab", "c"], AnswerContext(state=STATE))
    assert [one.reward for one in outcomes] == [1.3, 1.3]
    assert [dict(one.metrics) for one in outcomes] == [{"words": 3.0}] * 2
    assert [dict(one.extra) for one in outcomes] == [{"upper": "AB"}, {"upper": "C"}]


def test_a_trainer_state_says_what_it_has() -> None:
    def beyond(completions: list[str], trainer_state: Any) -> list[float]:
        return [trainer_state.log_history] * len(completions)

    with pytest.raises(AttributeError, match=r"has no 'log_history'.*epoch, num_train"):
        asked(beyond, "x")


def test_logs_are_bounded() -> None:
    logs = Logs(2)
    for n in range(MOST_LOGGED):
        logs.log_metric(f"m{n}", n)
    with pytest.raises(ValueError, match="one name too many; the limit is 64"):
        logs.log_metric("more", 1)
    for name in ("", "x" * 65, 3):
        with pytest.raises(ValueError, match="must be a name of 1 to 64 characters"):
            logs.log_metric(name, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'column' has 1 values for 2 completions"):
        logs.log_extra("column", ["one"])
    logs.log_extra("long", ["x" * 5000, {"a": 1}])
    assert [len(logs.of(0)[1]["long"]), logs.of(1)[1]["long"]] == [LONGEST_TEXT, "{'a': 1}"]


@pytest.mark.parametrize(
    "wire",
    [
        {"score": 1.0, "metrics": {"a": "x"}},
        {"score": 1.0, "metrics": {"a" * 65: 1.0}},
        {"score": 1.0, "metrics": {str(n): 1.0 for n in range(65)}},
        {"score": 1.0, "extra": {"a": "x" * 1001}},
        {"score": 1.0, "extra": ["a"]},
        {"score": 1.0, "metrics": {"a": float("inf")}},
    ],
)
def test_logs_of_a_worker_beyond_the_limits_are_dropped(wire: Mapping[str, Any]) -> None:
    (score,) = from_wire([wire], 1)
    assert score == 1.0
    assert not isinstance(score, Noted)


def test_logs_cross_the_wire() -> None:
    noted = Noted.of(0.5, {"a": 1.0}, {"b": "c"})
    (back,) = from_wire(json.loads(json.dumps(to_wire([noted]))), 1)
    assert isinstance(back, Noted)
    assert (back, back.metrics, back.extra) == (0.5, {"a": 1.0}, {"b": "c"})


def reward_func(queries, prompts, labels, **kwargs):
    said = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    right = [float(one == f"{label}<end>") for one, label in zip(said, labels, strict=True)]
    return {"rewards": np.array(right), "scores": np.array(right), "extra_logs": {"each": np.array(right), "all": 7}}


def test_the_function_of_openrlhf_gets_texts_with_special_tokens() -> None:
    context = AnswerContext(shown=lambda: [("<user>2 + 2?", f"<user>2 + 2?{text}<end>") for text in ("4", "5")])
    first, second = scored(reward_func, ["4", "5"], context)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (dict(first.metrics), dict(second.metrics)) == ({"each": 1.0, "all": 7.0}, {"each": 0.0, "all": 7.0})
    assert "write def reward(prompts, completions, answer)" in scored(reward_func, ["4"])[0].error


def names_parts(problem, completion, thought, calls, speech=""):
    assert (completion, thought, speech) == ("<think>2 and 2 is 4</think>It is 5", "2 and 2 is 4", "It is 5")
    return float(calls == [{"name": "look", "arguments": {"for": [1]}}])


def trl_chat(completions, **kwargs):
    message = completions[0][0]
    return [float(message["content"] == "It is 5" and message["reasoning_content"] == "2 and 2 is 4")]


def test_functions_get_the_parts_that_they_name() -> None:
    answer = Answer("<think>2 and 2 is 4</think>It is 5", THOUGHT)
    assert asked(names_parts, answer)[0] == 1.0
    chat = Problem(1, PROBLEM.messages, "4", {}, conversational=True)
    assert asked(trl_chat, answer, problem=chat)[0] == [1.0]
    seen = Answer(answer.text, TurnParts("2 and 2 is 4", "It is 5"))  # as TRL decodes an answer without calls
    whole = {"role": "assistant", "content": answer.text, "reasoning_content": "2 and 2 is 4"}
    assert asked(lambda completions, **kwargs: completions, seen, problem=chat)[0] == [[whole]]
    assert asked(lambda problem, completion, thought, speech: (thought, speech), "4")[0] == ("", "4")
    assert asked(lambda problem, completion, speech: speech, answer, speech="mine")[0] == "mine"  # the job's args win
    (outcome,) = scored(names_parts, [answer.text], AnswerContext(parts=[THOUGHT]))
    assert outcome.reward == 1.0


BLOCK = "```python\nprint(1)\n```"
OPEN = TurnParts(thought="so 4 it is 4", unread="its thought has no end")
CASES: dict[str, tuple[str, dict[str, Any], TurnParts, float]] = {
    "exact": ("exact", {}, TurnParts("hm", "4"), 1),
    "exact, unclosed": ("exact", {}, OPEN, 0),
    "contains": ("contains", {}, TurnParts("4", "five"), 0),
    "numeric": ("numeric", {}, TurnParts("5", "so 4"), 1),
    "numeric, unclosed": ("numeric", {}, OPEN, 0),
    "math": ("math", {}, TurnParts("$5$", "$4$"), 1),
    "math, unclosed": ("math", {}, OPEN, 0),
    "code": ("code", {"column": "io"}, TurnParts(BLOCK.replace("1", "2"), BLOCK), 1),
    "code, only thought": ("code", {"column": "io"}, TurnParts(BLOCK, "done"), 0),
    "grader": (
        "grader",
        {"type": "string_check", "input": "{{sample.output_text}}", "reference": "4", "operation": "eq"},
        TurnParts("hm", "4"),
        1,
    ),
    "regex": ("regex", {"pattern": "^<think>.*</think>4$"}, TurnParts("hm", "4"), 1),
    "regex of speech": ("regex", {"pattern": "<think>", "of": "speech"}, TurnParts("hm", "4"), 0),
    "regex of thought": ("regex", {"pattern": "hm", "of": "thought", "full": True}, TurnParts("hm", "4"), 1),
    "length": ("length", {"target": 2}, TurnParts("a b c", "d"), 0.5),
    "length of speech": ("length", {"target": 2, "of": "speech"}, TurnParts("a b c", "d e"), 1),
    "length of thought": ("length", {"target": 2, "of": "thought"}, TurnParts("a b c d", "d"), 0.5),
}


@pytest.mark.parametrize(
    "name",
    few(
        CASES,
        "exact",
        "contains",
        "numeric, unclosed",
        "math",
        "code",
        "grader",
        "regex of thought",
        "length of speech",
    ),
)
def test_a_built_in_reward_reads_its_part(name: str) -> None:
    reward, args, parts, wanted = CASES[name]
    problem = Problem(1, PROBLEM.messages, "4", {"io": [{"input": "", "output": "1"}]})
    shown = f"<think>{parts.thought}" if parts.unread else f"<think>{parts.thought}</think>{parts.speech}"
    if reward == "code":
        shown = f"{parts.thought}\n{parts.speech}"

    async def work() -> ScoreOutcome:
        pool = RewardPool(1)
        try:
            await pool.register("job", [RewardConfig(name=reward, args=args, wall_seconds=100)])
            context = AnswerContext(parts=[parts])
            return (await pool.score("job", problem, [shown.replace("c</think>d", "c d")], context))[0]
        finally:
            await pool.close()

    outcome = asyncio.run(work())
    assert (outcome.error, outcome.reward) == ("", wanted)


def test_a_part_that_answers_do_not_have_is_refused() -> None:
    for name, args in (("regex", {"pattern": "x"}), ("length", {"target": 3})):
        with pytest.raises(RewardError, match=r"of must be text, speech.*got 'reasoning'"):
            resolve(name, {**args, "of": "reasoning"})
