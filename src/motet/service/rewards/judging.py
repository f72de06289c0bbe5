"""A model as the judge of an answer: what it is told, and the score that is read out of what it says."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from motet.cluster.client import EngineClient
from motet.cluster.messages import Complete
from motet.service.adapters.adapters import Answerer
from motet.service.answers import whole
from motet.tasks.graders.shapes import Judge, JudgeSampling, LabelModel, ScoreModel
from motet.tasks.graders.template import MOST_FILLED, UnfilledError, fill
from motet.tasks.rewards import last_number
from motet.types import SamplingParams

_RESULT = re.compile(r'"result"\s*:\s*"?(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')
_MAX_TOKENS = 512
_SHOWN = 120


class VerdictError(ValueError):
    """What a judge said holds no score."""


async def ask(
    engine: EngineClient, tenant: str, asked: Answerer, judge: Judge, item: Mapping[str, Any], output: str
) -> tuple[float, int]:
    """The score of an answer by the judge that `asked` means, and the tokens that it took.

    The tokens are those of `tenant`.

    Raises:
        UnfilledError: a variable has no value.
        EngineError, ConfigError: the engine cannot answer, now or ever.
        VerdictError: the judge gave no score.
    """
    messages = prompt(judge, item, output)
    sampling = judge.sampling_params or JudgeSampling()
    seed = zlib.crc32(repr(messages).encode()) if sampling.seed is None else sampling.seed
    params = SamplingParams(
        temperature=sampling.temperature or 0.0,
        top_p=sampling.top_p or 1.0,
        max_tokens=sampling.max_tokens or _MAX_TOKENS,
    )
    adapter = None if asked.directory is None else str(asked.directory)
    question = Complete(
        tenant, adapter, n=1, seed=seed, stream=False, logprobs=False, sampling=params, messages=messages,
        base=asked.base,
    )  # fmt: skip
    answered = await whole(engine, question)
    return verdict(judge, answered.choices[0].text), answered.prompt_tokens + answered.tokens


def prompt(judge: Judge, item: Mapping[str, Any], output: str) -> list[dict[str, str]]:
    """The messages to a judge, with what it has to end its answer with.

    Raises:
        UnfilledError: a variable has no value, or the messages are too long together.
    """
    messages = [
        {"role": "system" if one.role == "developer" else one.role, "content": fill(one.content, item, output)}
        for one in judge.input
    ]
    if (size := sum(len(one["content"]) for one in messages)) > MOST_FILLED:
        raise UnfilledError(
            "item", f"the messages to the judge have {size} characters; the most are {MOST_FILLED}", of_item=True
        )
    messages[-1]["content"] += f"\n\n{_form(judge)}"
    return messages


def _form(judge: Judge) -> str:
    if isinstance(judge, LabelModel):
        return f"Answer with one of these labels and nothing else: {', '.join(judge.labels)}"
    assert isinstance(judge, ScoreModel)
    low, high = judge.range
    return (
        f'End your answer with JSON of this form: {{"result": NUMBER}}. NUMBER is your score, from {low:g} to {high:g}.'
    )


def verdict(judge: Judge, said: str) -> float:
    """The score in what a judge said.

    Raises:
        VerdictError: there is none.
    """
    if isinstance(judge, LabelModel):
        return float(_label(judge, said) in judge.passing_labels)
    assert isinstance(judge, ScoreModel)
    results = _RESULT.findall(said)
    number = float(results[-1]) if results else last_number(said)
    if number is None:
        raise VerdictError(f"the judge {judge.model!r} gave no number: {said[:_SHOWN]!r}")
    low, high = judge.range
    if not low <= number <= high:
        raise VerdictError(f"the judge {judge.model!r} gave {number}, which is not from {low:g} to {high:g}")
    return float(number)


def _label(judge: LabelModel, said: str) -> str:
    plain = said.strip().strip("\"'.`*").casefold()
    for label in judge.labels:
        if label.casefold() == plain:
            return label
    named = [one for one in judge.labels if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", said, re.IGNORECASE)]
    if len(named) != 1:
        raise VerdictError(f"the judge {judge.model!r} gave none of the labels, or several: {said[:_SHOWN]!r}")
    return named[0]
