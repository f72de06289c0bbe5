"""The reward `code`: runs a model's program against the tests of its row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from motet.core.types import Problem
from motet.tasks.sandbox import Sandbox

_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def program(completion: str) -> str:
    """The last fenced block of an answer, or all of it."""
    blocks = _BLOCK.findall(completion)
    return str(blocks[-1]) if blocks else completion


def score(problem: Problem, completion: str, column: str, *, partial: bool, seconds: float) -> float:
    """Whether all tests pass, or the share of those that do.

    Raises:
        ValueError: the row has no tests.
    """
    tests = _listed(problem.metadata.get(column))
    if not tests:
        raise ValueError(f"the row has no tests in the column {column!r}: name theirs in args (column: …)")
    with Sandbox(seconds) as sandbox:
        if isinstance(tests[0], Mapping):
            passed = [_prints(sandbox, program(completion), test) for test in tests]
        else:
            passed = sandbox.tested(program(completion), [str(test) for test in tests])
    return sum(passed) / len(passed) if partial else float(all(passed))


def _listed(tests: Any) -> Sequence[Any]:
    if isinstance(tests, str | Mapping):
        return [tests]
    return tests if isinstance(tests, Sequence) else []


def _prints(sandbox: Sandbox, code: str, test: Mapping[str, Any]) -> bool:
    """Whether a program prints the expected output, except for spaces at line ends; compared outside its process."""
    ran = sandbox.python(code, str(test.get("input", "")))
    said, wanted = ([line.rstrip() for line in text.strip().splitlines()] for text in (ran.output, str(test["output"])))
    return ran.status == 0 and said == wanted
