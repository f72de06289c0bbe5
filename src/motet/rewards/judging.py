"""Runs graders: in reward processes, as in a job, or by asking a judge.

The messages tell a judge how to end its answer, and the score is parsed from the answer. The caller connects the judge:
a model of a service, or an address (`judge_http`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import re
import sys
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, TypeVar

from motet.config import RewardConfig
from motet.core.errors import ConfigError, EngineError, RewardError
from motet.core.types import Problem
from motet.process.thread_turns import ThreadTurns
from motet.rewards.graders import combined
from motet.rewards.graders.shapes import Grader, Judge, LabelModel, Multi, Rank, Rubric, ScoreModel, Single
from motet.rewards.graders.template import MOST_FILLED, Fields, UnfilledError, pieces_of
from motet.rewards.judging_room import Room
from motet.rewards.numbers import last_number
from motet.rewards.reward_elsewhere import Chance, ScoreOrReason
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls

Result = TypeVar("Result")
_OF_ONE_OWNER = 4
"""Most rows in work for one owner, so that others need not wait for all that it asks."""
_OPEN_CHARACTERS = 2**24
"""Most characters of one owner's open questions: a thousand answers with a long row would take gigabytes."""
_PROCESSES = 2
_CPU_SECONDS = 10.0
_WALL_SECONDS = 30.0
_FILLING = 2  # threads that fill in templates: a row and an answer may have megabytes
_RESULT = re.compile(r'"result"\s*:\s*"?(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')
_OBJECT = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\}")
MAX_TOKENS = 512
"""Default limit of a judge's answer."""
_SHOWN = 120
_SILENT = "said nothing, or only thought: raise args.sampling_params.max_completion_tokens"
_ALONE = 0.5
"""Reward of an answer without others to compare with."""
Fault = Literal["formula", "sample", "variable", "parse", "server", "other"]
Asked = Callable[[Judge, list[dict[str, str]]], Awaitable[tuple[str, int]]]
"""(judge, messages) → the judge's answer, and its tokens. Raises EngineError or ConfigError."""


@dataclass
class Graded:
    """A grader's result for one answer."""

    output: str = ""
    """The answer."""
    reward: float | None = None
    """None after a failure."""
    parts: dict[str, float] = field(default_factory=dict)
    """Rewards of a multi grader's parts."""
    faults: dict[Fault, str] = field(default_factory=dict)
    """Messages by kind of failure. Only `sample` leaves a reward: 0 for that grader."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens used by judges, by model."""

    def take(self, of_parts: Sequence[Graded]) -> None:
        """Take over the results of graders that ran at once, in their order; the first with a kind of failure tells it."""
        for one in of_parts:
            self.parts |= one.parts
            self.faults |= {kind: told for kind, told in one.faults.items() if kind not in self.faults}
            for model, tokens in one.tokens.items():
                self.tokens[model] = self.tokens.get(model, 0) + tokens


@dataclass(frozen=True)
class _Row:
    """A row whose answers are graded: its owner, its fields, and how to ask a judge."""

    owner: str
    item: Fields
    asked: Asked


class Graders:
    """Runs graders. Lives in one event loop."""

    def __init__(self, walls: Walls, charge: Callable[[str, float], None] = lambda owner, seconds: None) -> None:
        """`walls` says which graders run behind a wall; `charge` is called with an owner's CPU seconds, from any thread."""
        self._charge = charge
        self._pool, self._names = RewardPool(_PROCESSES, walls=walls, charge=charge), itertools.count()
        self._filling = ThreadTurns(_FILLING, sys.maxsize, "motet-templates")
        self._turns: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._rooms: weakref.WeakValueDictionary[str, Room] = weakref.WeakValueDictionary()

    async def close(self) -> None:
        """End the processes."""
        self._filling.close()
        await self._pool.close()

    async def graded(
        self, owner: str, grader: Grader, item: Mapping[str, Any], outputs: Sequence[str], asked: Asked
    ) -> list[Graded]:
        """Score the answers to one row, in order. Failures are in the results.

        Each `owner`, a tenant or a job, has few parts in work.
        """
        graded, row = [Graded(output) for output in outputs], _Row(owner, Fields("item", item), asked)
        if isinstance(grader, Rank):
            await self._ranked(row, grader, graded)
            return graded
        parts: Mapping[str, Single] = grader.graders if isinstance(grader, Multi) else {grader.name: grader}
        of_parts = [[Graded(output) for output in outputs] for _ in parts]
        judged = zip(parts.items(), of_parts, strict=True)
        await asyncio.gather(*(self._part(row, name, part, found) for (name, part), found in judged))
        for one, *found in zip(graded, *of_parts, strict=True):
            one.take(found)
            if any(fault != "sample" for fault in one.faults):
                continue
            try:
                one.reward = combined(grader, one.parts) if isinstance(grader, Multi) else one.parts[grader.name]
            except ValueError as error:
                one.faults["formula"] = str(error)
        return graded

    async def _ranked(self, row: _Row, grader: Rank, graded: Sequence[Graded]) -> None:
        """Let a judge order the answers. Equal answers are shown once and get the same score."""
        texts = await self._filled(row.owner, lambda: _shuffled(grader, {one.output for one in graded}))
        worth = dict.fromkeys(texts, _ALONE)
        if len(texts) > 1:
            whole = Graded()
            said = await self._said(row, grader, whole, texts)
            try:
                places = ranking(grader, said, len(texts)) if said is not None else []
                worth |= {texts[n]: 1 - place / (len(texts) - 1) for place, n in enumerate(places)}
            except VerdictError as error:
                whole.faults["parse"] = str(error)
            for one in graded:
                one.faults |= whole.faults
            graded[0].tokens = whole.tokens
        for one in graded:
            if not one.faults:
                one.reward = one.parts[grader.name] = worth[one.output]

    async def _part(self, row: _Row, name: str, part: Single, graded: Sequence[Graded]) -> None:
        """Record one grader's scores or failures in `graded`."""
        fillable = []
        for one in graded:
            try:
                await self._filled(row.owner, functools.partial(_check, part, row.item, one.output))
                fillable.append(one)
            except UnfilledError as error:
                one.faults["variable" if error.of_item else "sample"] = str(error)
                one.parts[name] = 0.0
        if isinstance(part, Judge):
            await asyncio.gather(*(self._judged(row, name, part, one) for one in fillable))
        elif fillable:
            scored = await self._computed(row, part, [one.output for one in fillable])
            for one, value in zip(fillable, scored, strict=True):
                if isinstance(value, str):
                    one.faults["other"] = value
                else:
                    one.parts[name] = value

    async def _computed(self, row: _Row, part: Single, outputs: Sequence[str]) -> list[float | str]:
        """Scores of a grader that asks no model, or reasons for missing ones."""
        name, args = f"{next(self._names)}", part.model_dump(mode="json")
        config = RewardConfig(name="grader", args=args, cpu_seconds=_CPU_SECONDS, wall_seconds=_WALL_SECONDS)
        async with self._turns.setdefault(row.owner, asyncio.Semaphore(_OF_ONE_OWNER)):
            try:
                await self._pool.register(name, [config], payer=row.owner)
                scored = await self._pool.score(name, Problem(0, (), "", row.item.value), outputs)
            except RewardError as error:
                return [str(error)] * len(outputs)
            finally:
                await self._pool.unregister(name)
        return [one.error or one.reward for one in scored]

    async def _filled(self, owner: str, work: Callable[[], Result]) -> Result:
        """Fill in templates in a thread, in the owner's turn, which is charged for it."""

        def charged() -> Result:
            begun = time.thread_time()
            try:
                return work()
            finally:
                self._charge(owner, time.thread_time() - begun)

        return await self._filling.run(owner, charged)

    async def _judged(self, row: _Row, name: str, judge: Judge, graded: Graded) -> None:
        said = await self._said(row, judge, graded)
        try:
            if said is not None:
                graded.parts[name] = verdict(judge, said)
        except VerdictError as error:
            graded.faults["parse"] = str(error)

    async def _said(self, row: _Row, judge: Judge, graded: Graded, ranked: Sequence[str] = ()) -> str | None:
        """A judge's answer; None if it failed, with the reason in `graded`."""
        room, shown = self._rooms.setdefault(row.owner, Room()), (judge, row.item, graded.output, ranked)
        try:
            size = await self._filled(row.owner, lambda: sum(map(len, itertools.chain(*_pieces(*shown)))))
            async with room.take(size, _OPEN_CHARACTERS):
                messages = await self._filled(row.owner, lambda: prompt(*shown))
                said, tokens = await row.asked(judge, messages)
            graded.tokens[judge.model] = graded.tokens.get(judge.model, 0) + tokens
            if said.strip():
                return said
            graded.faults["parse"] = f"the judge {judge.model!r} {_SILENT}"
        except UnfilledError as error:  # each message could be filled, but together they are too long
            graded.faults["variable"] = str(error)
        except (ConfigError, EngineError) as error:
            graded.faults["server"] = str(error)
        return None


def _shuffled(grader: Rank, texts: Collection[str]) -> list[str]:
    """In an order that depends on grader and texts alone; a judge may favour the first."""
    ordered = sorted(texts)
    random.Random(zlib.crc32(repr((grader.input, ordered)).encode())).shuffle(ordered)
    return ordered


def _check(part: Single, item: Fields, output: str) -> None:
    """Raise UnfilledError if a grader's templates cannot be filled in."""
    sample = Fields("sample", output)
    for _, text in part.templates():
        pieces_of(text, item, sample)


def most_tokens(judge: Judge) -> int:
    """Limit of a judge's answer."""
    return (judge.sampling_params and judge.sampling_params.max_tokens) or MAX_TOKENS


def score_or_reason(graded: Graded) -> ScoreOrReason:
    """A graded answer as a job sees it."""
    if graded.reward is not None:
        return graded.reward
    reason = "; ".join(graded.faults.values())
    return Chance(reason) if "server" in graded.faults else reason


class VerdictError(ValueError):
    """A judge's answer holds no score."""


def prompt(judge: Judge, item: Fields, output: str, ranked: Sequence[str] = ()) -> list[dict[str, str]]:
    """The messages to a judge, with the required end of its answer; `ranked` are the answers to order.

    Raises UnfilledError if a variable has no value, or the messages are too long together.
    """
    filled = _pieces(judge, item, output, ranked)
    filled[-1].append(f"\n\n{_form(judge, len(ranked))}")
    roles = ("system" if one.role == "developer" else one.role for one in judge.input)
    return [{"role": role, "content": "".join(pieces)} for role, pieces in zip(roles, filled, strict=True)]


def _pieces(judge: Judge, item: Fields, output: str, ranked: Sequence[str]) -> list[list[str]]:
    """What each message to a judge is joined of, without the end. Raises as `prompt` does."""
    sample = Fields("sample", output)
    filled = [pieces_of(one.content, item, sample) for one in judge.input]
    filled[-1] += [f"\n\n[Answer {number}]\n{text}" for number, text in enumerate(ranked, 1)]
    if (size := sum(len(piece) for pieces in filled for piece in pieces)) > MOST_FILLED:
        raise UnfilledError(
            "item", f"the messages to the judge have {size} characters; the limit is {MOST_FILLED}", of_item=True
        )
    return filled


def _form(judge: Judge, n: int) -> str:
    if isinstance(judge, LabelModel):
        return f"Answer with one of these labels and nothing else: {', '.join(judge.labels)}"
    if isinstance(judge, Rank):
        return (
            f'End your answer with JSON of this form: {{"order": [NUMBER, …]}}, with the numbers 1 to {n} of the answers, '
            "each once, the best first."
        )
    assert isinstance(judge, ScoreModel | Rubric)
    low, high = judge.range
    if isinstance(judge, Rubric):
        criteria = "\n".join(f"- {name}: {one.text}" for name, one in judge.criteria.items())
        form = ", ".join(f'"{name}": NUMBER' for name in judge.criteria)
        return (
            f"Score each of these criteria from {low:g} to {high:g}:\n{criteria}\n\n"
            f"End your answer with JSON of this form: {{{form}}}"
        )
    return (
        f'End your answer with JSON of this form: {{"result": NUMBER}}. NUMBER is your score, from {low:g} to {high:g}.'
    )


def verdict(judge: Judge, said: str) -> float:
    """Parse the score from a judge's answer. Raises VerdictError if there is none."""
    if isinstance(judge, LabelModel):
        return float(_label(judge, said) in judge.passing_labels)
    if isinstance(judge, Rubric):
        return _weighed(judge, said)
    assert isinstance(judge, ScoreModel)
    results = _RESULT.findall(said)
    number = float(results[-1]) if results else last_number(said)
    if number is None:
        raise VerdictError(f"the judge {judge.model!r} gave no number: {said[:_SHOWN]!r}")
    return _within(judge, number)


def _within(judge: ScoreModel | Rubric, number: float | Decimal) -> float:
    low, high = judge.range
    if not low <= number <= high:
        raise VerdictError(f"the judge {judge.model!r} gave {number}, which is not from {low:g} to {high:g}")
    return float(number)


def _weighed(judge: Rubric, said: str) -> float:
    """The weighted mean of the scores; weights are normalised by the sum of their absolute values."""
    scores = _last_object(said)
    total = 0.0
    for name, one in judge.criteria.items():
        number = scores.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise VerdictError(f"the judge {judge.model!r} gave no number for {name!r}: {said[-_SHOWN:]!r}")
        total += one.weight * _within(judge, number)
    return total / sum(abs(one.weight) for one in judge.criteria.values())


def ranking(judge: Rank, said: str, n: int) -> list[int]:
    """The indices of the n shown answers, best first. Raises VerdictError if the judge did not name each answer once."""
    order = _last_object(said).get("order")
    if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(1, n + 1))):
        raise VerdictError(f"the judge {judge.model!r} did not order the {n} answers: {said[-_SHOWN:]!r}")
    return [number - 1 for number in order]


def _last_object(said: str) -> Mapping[str, Any]:
    """The last JSON object in a text; empty if there is none."""
    for found in reversed(_OBJECT.findall(said)):
        try:
            value = json.loads(found)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, Mapping) else {}
    return {}


def _label(judge: LabelModel, said: str) -> str:
    plain = said.strip().strip("\"'.`*").casefold()
    for label in judge.labels:
        if label.casefold() == plain:
            return label
    named = [one for one in judge.labels if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", said, re.IGNORECASE)]
    if len(named) != 1:
        raise VerdictError(f"the judge {judge.model!r} gave none of the labels, or several: {said[:_SHOWN]!r}")
    return named[0]
