"""Graders: rewards defined in JSON, in the form of the `openai` package, without users' code.

`shapes` defines the valid forms, `template` fills in variables; `similarity` and `formula` compute scores. The service
runs graders with a judge model; reward processes run the others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from motet.core.types import Problem
from motet.rewards.graders import formula
from motet.rewards.graders.shapes import Grader, Multi, StringCheck, TextSimilarity, judges, parse
from motet.rewards.graders.similarity import similarity
from motet.rewards.graders.template import Fields, UnfilledError, fill


def item_of(problem: Problem) -> dict[str, Any]:
    """The row of a problem, as graders see it: `item`."""
    messages = [{"role": message.role, "content": message.content} for message in problem.messages]
    return {**({"messages": messages} if messages else {}), **problem.metadata}


def check(spec: Mapping[str, Any]) -> None:
    """Check a grader for a reward. Raises GraderError if it is invalid, ValueError if it needs a judge model."""
    if judges(_parsed(json.dumps(spec))):
        raise ValueError("a grader that asks a model needs `motet serve`, which has one to ask: submit the job there")


def score(problem: Problem, completion: str, spec: Mapping[str, Any]) -> float:
    """Score an answer with a grader. Raises ValueError if the row lacks a column, or the formula has no value."""
    return grade(_parsed(json.dumps(spec)), item_of(problem), completion)


@functools.lru_cache(maxsize=8)
def _parsed(spec: str) -> Grader:
    return parse(json.loads(spec))


def grade(grader: Grader, item: Mapping[str, Any], output: str) -> float:
    """Score an answer with a grader without a model; 0 if the answer lacks a field that a variable names.

    Raises:
        ValueError: the row lacks a field that a variable names, or the formula has no value.
    """
    if isinstance(grader, Multi):
        scores = {name: grade(part, item, output) for name, part in grader.graders.items()}
        return combined(grader, scores)
    if not isinstance(grader, StringCheck | TextSimilarity):
        raise ValueError(f"a {grader.type} grader asks a model, and none is available here")
    try:
        row = Fields("item", item)
        text, reference = fill(grader.input, row, output), fill(grader.reference, row, output)
    except UnfilledError as error:
        if error.of_item:
            raise ValueError(str(error)) from error
        return 0.0
    if isinstance(grader, TextSimilarity):
        return similarity(grader.evaluation_metric, text, reference)
    return float(_CHECKS[grader.operation](text, reference))


def combined(grader: Multi, scores: Mapping[str, float]) -> float:
    """The formula of a multi grader over the scores of its graders. Raises ValueError if it has no finite value."""
    return formula.value(formula.parse(grader.calculate_output, grader.graders), scores)


_CHECKS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}
