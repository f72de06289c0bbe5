"""Built-in rewards row by row, and how a job's reward is found and called."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from motet.core.errors import RewardError
from motet.core.types import Message, Problem
from motet.rewards.numbers import last_number
from motet.rewards.reward_answers import Answer
from motet.rewards.reward_forms import Asked
from motet.rewards.reward_loading import resolve
from motet.rewards.rewards import BUILTIN

pytestmark = pytest.mark.tier1


def problem(answer="42", conversational=False, **columns):
    return Problem(5, (Message("user", "What?"),), answer, columns, conversational)


GRADER = {"type": "string_check", "input": "{{sample.output_text}}", "reference": "4"}
CASES = [
    ("exact", "42", " 42\n", {}, 1),
    ("exact", "42", "It is 42", {}, 0),
    ("exact", "42", "\n<answer> 42\n</answer>\n", {}, 1),
    ("exact", "42", "<answer>41</answer>", {}, 0),
    ("exact", "42", "It is <answer>42</answer>", {}, 0),
    ("exact", "<answer>42</answer>", "<answer>42</answer>", {}, 1),
    ("exact", "Yes", "yes", {}, 0),
    ("exact", "Yes", "yes", {"ignore_case": True}, 1),
    ("contains", "7", "the answer is 7.", {}, 1),
    ("contains", "7", "the answer is 17.", {}, 0),
    ("contains", "New York", "in new york!", {}, 1),
    ("contains", "a+b", "so a+b", {}, 1),
    ("numeric", "42", "first 41, then 42.", {}, 1),
    ("numeric", "42", "first 42, then 41", {}, 0),
    ("numeric", "so 3 more #### 1,234", "1234", {}, 1),
    ("numeric", "-3", "x = -3", {}, 1),
    ("numeric", "3", "5-3", {}, 1),
    ("numeric", "0.5", ".50", {}, 1),
    ("numeric", "100", "101", {"tolerance": 0.02}, 1),
    ("numeric", "100", "102", {"tolerance": 0.02}, 1),
    ("numeric", "100", "103", {"tolerance": 0.02}, 0),
    ("numeric", "0.5", "1.4", {"tolerance": 0.5}, 0),
    ("numeric", "42", "no number", {}, 0),
    ("numeric", "42", "9e999999999", {}, 0),
    ("math", r"\frac{1}{2}", r"so \boxed{0.5}", {}, 1),
    ("math", "#### 12", "The answer is $12$", {}, 1),
    ("math", "x^2 + 1", r"\boxed{1 + x^2}", {}, 1),
    ("math", "12", r"\boxed{13}", {}, 0),
    ("math", "The answer is 12.", r"\boxed{12}", {}, 1),
    ("math", r"so \boxed{7}", "I think it is 7", {}, 1),
    ("math", "12", "no idea", {}, 0),
    ("regex", "42", "<a>42</a>", {"pattern": "<a>{answer}</a>"}, 1),
    ("regex", "42", "x <a>42</a>", {"pattern": "<a>{answer}</a>", "full": True}, 0),
    ("regex", "4.2", "4x2", {"pattern": "{answer}"}, 0),
    ("length", "", "a b c", {"target": 3}, 1),
    ("length", "", "a b c d e f", {"target": 3}, 0.5),
    ("length", "", "abcdef", {"target": 3, "unit": "characters"}, 0.5),
    ("grader", "", "Is it 4?", {**GRADER, "operation": "like"}, 1),
    ("grader", "", "Is it 4?", {**GRADER, "operation": "eq"}, 0),
]


@pytest.mark.parametrize(("name", "answer", "completion", "args", "expected"), CASES)
def test_builtin(name, answer, completion, args, expected):
    assert BUILTIN[name](problem(answer), completion, **args) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234.5", 1234.5), ("12.", 12), ("1,23", 23), ("v2-7", 7), ("(-7)", -7), ("−8", -8), ("2e3", 2000), ("x", None)],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_answers_that_cannot_be_compared_are_errors():
    with pytest.raises(ValueError, match="has no number: try `exact`"):
        BUILTIN["numeric"](problem("seven"), "7")
    for name in ("exact", "contains", "numeric", "math"):
        with pytest.raises(ValueError, match=r"no reference answer:.*in data\.answer"):
            BUILTIN[name](problem(" "), "")


def test_every_builtin_has_a_case():
    assert {case[0] for case in CASES} | {"code"} == set(BUILTIN)  # whose cases are in test_sandbox.py


def called(loaded, asked_problem, texts, **fields):
    """What a loaded reward returns for some answers."""
    return loaded.call(Asked(asked_problem, [Answer(text) for text in texts], **fields))


def trl(prompts, completions, solution, **kwargs):
    assert prompts == ["What?"] * len(completions)
    assert kwargs["level"] == ["easy"] * len(completions)
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def trl_chat(completions, **kwargs):
    return [float(len(turn[0]["content"])) for turn in completions if turn[0]["role"] == "assistant"]


def trl_tokens(completions, completion_ids):
    return [0.0]


def resolved(function, **args):
    return resolve("mine", args, function)


def test_trl_signature_works_unchanged():
    loaded = resolved(trl)
    assert loaded.batched
    assert called(loaded, problem("x", solution="b", level="easy"), ["a", "b"]) == [0.0, 1.0]
    assert called(resolved(trl_chat), problem(conversational=True), ["abc", ""]) == [3.0, 0.0]
    with pytest.raises(TypeError, match=r"asks for the column.*columns are level"):
        called(loaded, problem("x", level="easy"), ["a"])
    with pytest.raises(RewardError, match="requires completion_ids"):
        resolved(trl_tokens)


def test_own_signature_with_args():
    loaded = resolved(lambda problem, completion, bonus: len(completion) + bonus, bonus=2)
    assert not loaded.batched
    assert called(loaded, problem(), ["abc"]) == 5


def test_rewards_from_files_and_modules(tmp_path):
    (tmp_path / "neighbour.py").write_text("BONUS = 3\n")
    (tmp_path / "mine.py").write_text("from neighbour import BONUS\ndef score(problem, completion): return BONUS\n")
    path = tmp_path / "mine.py"
    assert called(resolve(f"{path}:score", {}), problem(), ["x"]) == 3
    assert called(resolve("motet.rewards.rewards:exact", {}), problem("x"), ["x"]) == 1
    (tmp_path / "broken.py").write_text("\nimport nothing_of_that_name\n")
    for name, message in [
        (f"{path}:skore", "has no 'skore'; did you mean 'score'"),
        (f"{tmp_path / 'none.py'}:score", "none.py' does not exist"),
        (f"{'n' * 300}.py:score", "n.py' cannot be read: File name too long"),
        (
            f"{tmp_path / 'broken.py'}:score",
            "ModuleNotFoundError: No module named 'nothing_of.*install what has it beside Motet",
        ),
        ("nothing_of_that_name:score", "No module named 'nothing_of_that_name'.*must be installed"),
        ("exakt", "no reward 'exakt': did you mean 'exact'"),
        ("scorer", "only reasoning-gym:NAME data has a scorer"),
        (f"{path}:BONUS", "is int, not a function"),
    ]:
        with pytest.raises(RewardError, match=message):
            resolve(name, {})


def test_a_file_is_loaded_once_while_its_text_stays_the_same(tmp_path):
    """A job may name several functions of one file, which share what the file loads."""
    path, count = tmp_path / "mine.py", tmp_path / "count"
    text = f"with open({str(count)!r}, 'a') as log: log.write('x')\ndef a(problem, completion): return 1\nb = a\n"
    path.write_text(text)
    for name in ("a", "b", "a"):
        assert called(resolve(f"{path}:{name}", {}), problem(), ["x"]) == 1
    assert count.read_text() == "x"
    path.write_text(text.replace("return 1", "return 2"))
    assert called(resolve(f"{path}:a", {}), problem(), ["x"]) == 2
    assert count.read_text() == "xx"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "regex",
            {},
            r"reward 'regex' needs args that the job does not give: write \{name: regex, args: \{pattern: …\}\}$",
        ),
        ("regex", {"pattern": "("}, "unterminated subpattern"),
        ("length", {"target": 3, "unit": "tokens"}, "unit must be words or characters"),
        ("exact", {"ignorecase": True}, "reward 'exact' has no argument 'ignorecase'; did you mean 'ignore_case'"),
        ("exact", {"tolerance": 1}, "reward 'exact' has no argument 'tolerance'; it takes ignore_case$"),
        ("math", {"tolerance": 1}, "reward 'math' has no argument 'tolerance'; it takes none$"),
    ],
)
def test_wrong_args_are_refused_at_load(name, args, message):
    with pytest.raises(RewardError, match=message):
        resolve(name, args)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda text: 1.0, "takes text"),
        (lambda: 1.0, "takes nothing"),
        (lambda completion, row: 1.0, "takes completion first"),
        (lambda answer, problem: 1.0, "takes problem second"),
        (lambda problem, *, completion_text: 1.0, "takes problem"),
    ],
)
def test_wrong_parameters_are_refused_at_load(function, told):
    expected = (
        rf"reward 'mine' {told}; write def reward\(problem, completion\), or TRL's def reward\(completions, \*\*col"
    )
    with pytest.raises(RewardError, match=expected):
        resolved(function)


@pytest.mark.parametrize(
    "function", [lambda environments, **columns: [1.0], lambda completions, environments, **columns: [1.0]]
)
def test_a_reward_that_reads_environments_is_told_that_these_say_it_themselves(function):
    with pytest.raises(RewardError, match=r"environments.*leave it out.*self\.reward"):
        resolved(function)


def with_both_at_the_end(*, bonus, completion, problem):
    return f"{completion} {problem.answer} {bonus}"


@pytest.mark.parametrize(
    ("function", "args", "score"),
    [
        (lambda problem, completion: f"{completion} {problem.answer}", {}, "a 42"),
        (lambda completion, problem: f"{completion} {problem.answer}", {}, "a 42"),
        (lambda completion, bonus, problem: f"{completion} {problem.answer} {bonus}", {"bonus": 1}, "a 42 1"),
        (with_both_at_the_end, {"bonus": 1}, "a 42 1"),
        (lambda row, text: f"{text} {row.answer}", {}, "a 42"),
        (lambda problem, text: f"{text} {problem.answer}", {}, "a 42"),
        (lambda row, completion: f"{completion} {row.answer}", {}, "a 42"),
        (lambda problem, completion, /: f"{completion} {problem.answer}", {}, "a 42"),
        (lambda *given: f"{given[1]} {given[0].answer}", {}, "a 42"),
        (functools.partial(lambda bonus, completion, problem: f"{completion} {problem.answer}", 1), {}, "a 42"),
    ],
)
def test_problem_and_completion_are_known_by_their_names(function, args, score):
    assert called(resolved(function, **args), problem(), ["a"]) == score


def test_a_problem_that_is_taken_for_a_row_says_what_to_write() -> None:
    row = Problem(0, (), "4", {"level": 3})
    taken: list[tuple[Callable[[Any], Any], str]] = [
        (lambda one: one["answer"], "write problem.answer"),
        (lambda one: one["level"], "a column of the row is problem.metadata['level']"),
        (lambda one: one.question, "a column of the row is problem.metadata['question']"),
        (lambda one: one.get("answer"), "has no 'get'"),
    ]
    for read, told in taken:
        with pytest.raises((TypeError, AttributeError), match=re.escape(told)):
            read(row)
    assert replace(copy.deepcopy(row), answer="5").answer == "5"
