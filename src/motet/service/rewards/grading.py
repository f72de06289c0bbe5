"""Runs graders: those without a model in reward processes, as in a job; those with a judge model by asking the engine.

The prompt tells a judge how to end its answer, and the score is parsed from it.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from motet.chat.completer import whole
from motet.cluster.hosts import Hosts
from motet.cluster.messages import Complete
from motet.config import RewardConfig
from motet.errors import ConfigError, EngineError, RewardError
from motet.service.adapters.adapters import Adapters, Answerer, NoModelError
from motet.service.answers import ask
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.tasks.graders import combined, item_of
from motet.tasks.graders.shapes import (
    Grader,
    Judge,
    JudgeSampling,
    LabelModel,
    Multi,
    ScoreModel,
    Single,
    judges,
    parse,
)
from motet.tasks.graders.template import MOST_FILLED, UnfilledError, fill
from motet.tasks.reward_elsewhere import Chance, ScoreOrReason
from motet.tasks.reward_pool import RewardPool
from motet.tasks.reward_walls import Walls
from motet.tasks.rewards import last_number
from motet.types import Message, Problem, SamplingParams

_LANES = 8
_PROCESSES = 2
_CPU_SECONDS = 10.0
_WALL_SECONDS = 30.0
_RESULT = re.compile(r'"result"\s*:\s*"?(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)')
_MAX_TOKENS = 512
_SHOWN = 120
Fault = Literal["formula", "sample", "variable", "parse", "server", "other"]


@dataclass
class Graded:
    """The result of a grader for one answer."""

    reward: float | None = None
    """None after an error."""
    parts: dict[str, float] = field(default_factory=dict)
    """Result of each grader in a multi grader."""
    faults: dict[Fault, str] = field(default_factory=dict)
    """Error messages. `sample` alone still gives a reward: 0 for that grader."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens used by judges, by model."""


class Grading:
    """Grader processes of a service. Use in its event loop."""

    def __init__(self, engine: Hosts, adapters: Adapters) -> None:
        self._engine, self._adapters = engine, adapters
        self._pool = RewardPool(_PROCESSES, walls=Walls(required=True))
        self._lanes: OrderedDict[str, int] = OrderedDict()  # number of current users of each
        self._opening = asyncio.Lock()
        self._free = asyncio.Semaphore(_LANES)  # each user has a lane with processes

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    async def grade(
        self, who: Principal, grader: Grader, item: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Graded]:
        """Score the answers to one row, in order. Errors are in the results."""
        parts: Mapping[str, Single] = grader.graders if isinstance(grader, Multi) else {grader.name: grader}
        graded = [Graded() for _ in outputs]
        asked = await self._asked(who, grader)
        await asyncio.gather(
            *(self._part(who, name, part, item, outputs, graded, asked) for name, part in parts.items())
        )
        for one in graded:
            if any(fault != "sample" for fault in one.faults):
                continue
            try:
                one.reward = combined(grader, one.parts) if isinstance(grader, Multi) else one.parts[grader.name]
            except ValueError as error:
                one.faults["formula"] = str(error)
        return graded

    async def scores(
        self, job: StoredJob, spec: Mapping[str, Any], problem: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[ScoreOrReason]:
        """Scores of a job's answers to a problem (as plain values); a reason for each missing score."""
        who = Principal.member_of(job.tenant_id)
        graded = await self.grade(who, parse(spec), item_of(msgspec.convert(problem, Problem)), outputs)
        return [one.reward if one.reward is not None else _reason(one) for one in graded]

    async def _asked(self, who: Principal, grader: Grader) -> dict[str, Answerer | str]:
        """Resolve the names of judges; a message for each that cannot be used.

        All are resolved before one is asked: if the database is away, grading is repeated later, and no judge is asked
        twice.
        """
        answerers: dict[str, Answerer | str] = {}
        for model in {judge.model for judge in judges(grader)}:
            try:
                answerers[model] = await asyncio.to_thread(self._adapters.of_model, who, model)
            except (ConfigError, NoModelError) as error:
                answerers[model] = str(error)
        return answerers

    async def _part(
        self,
        who: Principal,
        name: str,
        part: Single,
        item: Mapping[str, Any],
        outputs: Sequence[str],
        graded: Sequence[Graded],
        asked: Mapping[str, Answerer | str],
    ) -> None:
        """Add one grader's scores, or errors, to `graded`."""
        fillable = []
        for output, one in zip(outputs, graded, strict=True):
            try:
                for _, text in part.templates():
                    fill(text, item, output)
                fillable.append((output, one))
            except UnfilledError as error:
                one.faults["variable" if error.of_item else "sample"] = str(error)
                one.parts[name] = 0.0
        if isinstance(part, ScoreModel | LabelModel):
            judge = asked[part.model]
            if isinstance(judge, str):
                for _, one in fillable:
                    one.faults["server"] = judge
            else:
                await asyncio.gather(*(self._judged(who, name, part, judge, item, *pair) for pair in fillable))
        elif fillable:
            scored = await self._computed(part, item, [output for output, _ in fillable])
            for (_, one), value in zip(fillable, scored, strict=True):
                if isinstance(value, str):
                    one.faults["other"] = value
                else:
                    one.parts[name] = value

    async def _computed(self, part: Single, item: Mapping[str, Any], outputs: Sequence[str]) -> list[float | str]:
        """Scores of a grader without a model, or error messages."""
        spec = json.dumps(part.model_dump(mode="json"), sort_keys=True)
        async with self._free:
            try:
                async with self._opening:
                    await self._open(spec, part)
            except RewardError as error:
                return [str(error)] * len(outputs)
            try:
                scored = await self._pool.score(spec, Problem(0, (), "", item), outputs)
            finally:
                self._lanes[spec] -= 1
        return [one.error or one.reward for one in scored]

    async def _open(self, spec: str, part: Single) -> None:
        """Open a lane for a grader; closes an unused one if there are too many."""
        if spec not in self._lanes:
            idle_ones = [name for name, users in self._lanes.items() if users == 0]
            for idle in idle_ones[: max(0, len(self._lanes) + 1 - _LANES)]:
                del self._lanes[idle]
                await self._pool.unregister(idle)
            config = RewardConfig(
                name="grader", args=part.model_dump(mode="json"), cpu_seconds=_CPU_SECONDS, wall_seconds=_WALL_SECONDS
            )
            await self._pool.register(spec, [config])
            self._lanes[spec] = 0
        self._lanes[spec] += 1
        self._lanes.move_to_end(spec)

    async def _judged(
        self,
        who: Principal,
        name: str,
        judge: Judge,
        asked: Answerer,
        item: Mapping[str, Any],
        output: str,
        graded: Graded,
    ) -> None:
        try:
            graded.parts[name], tokens = await ask_judge(self._engine, who.tenant_id, asked, judge, item, output)
            graded.tokens[judge.model] = graded.tokens.get(judge.model, 0) + tokens
        except VerdictError as error:
            graded.faults["parse"] = str(error)
        except UnfilledError as error:  # each message fits, but all together are too long
            graded.faults["variable"] = str(error)
        except (ConfigError, EngineError) as error:
            graded.faults["server"] = str(error)


def _reason(graded: Graded) -> ScoreOrReason:
    reason = "; ".join(graded.faults.values())
    return Chance(reason) if "server" in graded.faults else reason


class VerdictError(ValueError):
    """A judge's answer contains no score."""


async def ask_judge(
    engine: Hosts, tenant: str, asked: Answerer, judge: Judge, item: Mapping[str, Any], output: str
) -> tuple[float, int]:
    """The score from the judge `asked`, and the tokens that it used, which `tenant` pays.

    Raises:
        UnfilledError: a variable has no value.
        EngineError, ConfigError: the engine cannot answer.
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
        tenant, adapter, n=1, seed=seed, stream=False, logprobs=False, sampling=params,
        messages=[Message(one["role"], one["content"]) for one in messages], base=asked.base,
    )  # fmt: skip
    read, pieces = await ask(engine, question)
    (answer,) = await whole(pieces)
    return verdict(judge, answer.text), read.tokens + len(answer.token_ids)


def prompt(judge: Judge, item: Mapping[str, Any], output: str) -> list[dict[str, str]]:
    """The messages for a judge, with instructions for the form of its score.

    Raises:
        UnfilledError: a variable has no value, or all messages together are too long.
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
    """Parse a judge's score.

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
