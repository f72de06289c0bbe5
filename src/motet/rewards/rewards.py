"""The built-in rewards: short pure functions `(problem, completion, **args) -> float`, and the table that names them.

A completion is what the answer says, without its thought and calls.
Conventions decide whether a text is right, and each docstring says which one it follows. If none fits, your own reward
is three lines of Python (`reward: my_rewards.py:score`).
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from motet.core.nested import MISSING, value_at
from motet.core.types import Problem
from motet.rewards.mathematics import UNSPACED
from motet.rewards.numbers import compared
from motet.workers.sandbox import Sandbox

RewardFunction = Callable[..., float]

_TAGGED = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
# A fenced block; the last one of an answer may be cut off.
_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def reference(problem: Problem) -> str:
    """The reference answer without outer spaces. Raises ValueError if there is none, so no answer could be right."""
    answer = problem.answer.strip()
    if not answer:
        raise ValueError("the problem has no reference answer: name its column in data.answer, or use another reward")
    return answer


def exact(problem: Problem, completion: str, *, ignore_case: bool = False) -> float:
    """1 if the completion equals the answer, ignoring outer spaces and `<answer>` tags around all of it."""
    answer, tagged = _composed(reference(problem)), _TAGGED.fullmatch(completion)
    said = _composed((tagged[1] if tagged and "<answer>" not in answer else completion).strip())
    return float(said.casefold() == answer.casefold() if ignore_case else said == answer)


def contains(problem: Problem, completion: str, *, ignore_case: bool = True) -> float:
    """1 if the completion contains the answer as whole words: `17` does not contain `7`.

    A word has a border where its script writes spaces; what follows a Korean word belongs to it. An answer ends at the
    end of a letter, not before its vowel sign.
    """
    answer, text = _composed(reference(problem)), _composed(completion)
    letter = rf"[^\W{UNSPACED}\uac00-\ud7a3]"
    before = rf"(?<![^\W{UNSPACED}])" if "\uac00" <= answer[0] <= "\ud7a3" else rf"(?<!{letter})"
    before = "" if re.match(f"[{UNSPACED}]", answer) else before
    after = "" if re.match(f"[{UNSPACED}]", answer[-1]) else f"(?!{letter})"
    pattern = f"{before}{re.escape(answer)}{after}"
    found = re.finditer(pattern, text, re.IGNORECASE if ignore_case else 0)
    return float(any(not _goes_on(text[match.end() :]) for match in found))


def _composed(text: str) -> str:
    """A text with each letter and its accents as one character, where there is one: both spellings are the same text."""
    return unicodedata.normalize("NFC", text)


def _goes_on(text: str) -> bool:
    """Whether a text begins with a sign that belongs to the letter before it."""
    sign = text[:1]
    written = "\u0300" <= sign <= "\u036f" or "\u0900" <= sign <= "\u1fff"
    return written and unicodedata.category(sign) in ("Mn", "Mc")


def numeric(problem: Problem, completion: str, *, tolerance: float = 1e-6) -> float:
    """1 if the completion's number equals that of the answer, whose form says how both are read.

    A plain number, or a sentence with numbers, is compared as the last number of either. After `####` (GSM8K) it is the
    first one of the line; of an answer with a unit (`12 cm^2`) its own number, and exponents are not looked at; a
    fraction (`3/4`, `1 1/2`) equals other fractions and decimals. `tolerance` is relative to the answer, and absolute
    below 1. Thousands commas are understood. An answer without a number, or with an expression, is an error.
    """
    answer = reference(problem)
    if completion.strip() == answer and any(map(str.isdecimal, answer)):
        return 1.0
    wanted, said = compared(answer, completion)
    if said is None:
        return 0.0
    return float(abs(said - wanted) <= Decimal(str(tolerance)) * max(Decimal(1), abs(wanted)))


def math(problem: Problem, completion: str) -> float:
    r"""1 if the completion's last mathematical expression equals the answer, judged by Hugging Face's math-verify.

    LaTeX (`\boxed{}`, `$…$`) and plain expressions are understood, and answers in words compared as words. math-verify's
    own limits use `signal.alarm`, that is, the wall clock; they are off here because rewards have a limit on CPU time.
    """
    from motet.rewards import mathematics

    answer = reference(problem)
    if completion.strip() == answer:
        return 1.0
    return float(mathematics.equal(answer.rpartition("####")[2].strip() or answer, completion))


def regex(
    problem: Problem,
    completion: str,
    *,
    pattern: str,
    full: bool = False,
    ignore_case: bool = False,
    of: str = "text",
) -> float:
    """1 if the pattern is found in the completion (`full`: matches all of it); `{answer}` in it is the escaped answer.

    `of` says which part of the answer is the completion: `text`, `speech` or `thought`.
    """
    _check_part(of)
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    compiled = re.compile(pattern.replace("{answer}", re.escape(problem.answer.strip())), flags)
    return float(bool(compiled.fullmatch(completion) if full else compiled.search(completion)))


def length(problem: Problem, completion: str, *, target: float, unit: str = "words", of: str = "text") -> float:
    """1 up to `target` words (or `unit: characters`), then falling as target / length: half at twice the target.

    `of` as for `regex`.
    """
    _check_part(of)
    if unit not in ("words", "characters"):
        raise ValueError(f"unit must be words or characters, got {unit!r}")
    size = len(completion.split()) if unit == "words" else len(completion)
    return 1.0 if size <= target else target / size


def _check_part(of: str) -> None:
    if of not in ("text", "speech", "thought"):
        raise ValueError(f"of must be text, speech or thought, got {of!r}")


def grader(problem: Problem, completion: str, /, *, type: str, **fields: Any) -> float:
    """The score of a grader; `args` are its fields, described under "Graders" (openai.md).

    The grader is a string_check, a text_similarity or a multi of these.
    """
    from motet.rewards import graders  # its libraries are loaded only if they are needed

    return graders.score(problem, completion, {"type": type, **fields})


def code(
    problem: Problem, completion: str, *, column: str = "tests", partial: bool = False, seconds: float = 10.0
) -> float:
    """1 if the answer's program passes all tests in a column of the row; with `partial`, the share that it passes.

    The program is the last fenced block, or the whole completion without one. Tests are Python statements that must not
    raise (`assert add(1, 2) == 3`), as a text or a list, or a list of `{"input": …, "output": …}`: the program's input
    and expected output, or an object of lists, `{"inputs": […], "outputs": […]}`; or such a list or object as JSON. It
    runs behind the wall, with `seconds` of CPU time for each input, or for all texts together.
    """
    tests = _tests(value_at(problem.metadata, column))
    if not tests or not isinstance(tests, Sequence):
        raise ValueError(f"the row has no tests in the column {column!r:.80}: name theirs in args (column: …)")
    blocks = _BLOCK.findall(completion)
    program = str(blocks[-1]) if blocks else completion
    with Sandbox(seconds) as sandbox:
        if isinstance(tests[0], Mapping):
            passed = [_prints(sandbox, program, test) for test in tests]
        else:
            passed = sandbox.tested(program, [str(test) for test in tests])
    return sum(passed) / len(passed) if partial else float(all(passed))


def _tests(given: Any) -> Any:
    """The tests of a row, in one of their forms, as a list; None where there are none."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):  # which would be a statement that always passes
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    if isinstance(given, Mapping) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        return [{"input": asked, "output": wanted} for asked, wanted in pairs]
    return None if given is MISSING else [given] if isinstance(given, str | Mapping) else given


def _prints(sandbox: Sandbox, program: str, test: Mapping[str, Any]) -> bool:
    """Whether a program prints the expected output, except for spaces at line ends; compared outside its process."""
    given, output = test.get("input"), test.get("output")
    if output is None:
        raise ValueError("a test has no output: write what the program must print, or leave the test out")
    ran = sandbox.python(program, "" if given is None else str(given))
    said, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (ran.output, str(output)))
    return ran.status == 0 and said == wanted


BUILTIN: Mapping[str, RewardFunction] = {
    "exact": exact,
    "contains": contains,
    "numeric": numeric,
    "math": math,
    "regex": regex,
    "length": length,
    "grader": grader,
    "code": code,
}
"""Rewards by name. The name `scorer`, for the data's own scorer, has no function here."""
READS_PART = ("regex", "length")
"""Rewards that read the part of the answer that their argument `of` names; the others read its speech."""
NEED_AN_ANSWER = ("exact", "contains", "numeric", "math")
"""Rewards that need a reference answer."""


def check_args(name: str, args: Mapping[str, Any]) -> None:
    """Try a built-in reward's arguments with an empty answer.

    Raises:
        TypeError, ValueError, re.error, ConfigError: an argument is wrong.
    """
    if name == "grader":
        from motet.rewards import graders

        graders.check(args)
    if name in READS_PART:
        BUILTIN[name](Problem(0, (), ""), "", **args)
