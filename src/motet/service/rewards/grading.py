"""Graders run for the service: those that ask no model in reward processes, as in a job, the others by asking the engine."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from motet.cluster.client import EngineClient
from motet.config import RewardConfig
from motet.errors import ConfigError, EngineError, RewardError
from motet.service.adapters.adapters import Adapters, Answerer, NoModelError
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.rewards import judging
from motet.tasks.graders import combined, item_of
from motet.tasks.graders.shapes import Grader, Judge, LabelModel, Multi, ScoreModel, Single, judges, parse
from motet.tasks.graders.template import UnfilledError, fill
from motet.tasks.reward_elsewhere import Chance, ScoreOrReason
from motet.tasks.reward_pool import RewardPool
from motet.tasks.reward_walls import Walls
from motet.types import Problem

_LANES = 8
_PROCESSES = 2
_CPU_SECONDS = 10.0
_WALL_SECONDS = 30.0
Fault = Literal["formula", "sample", "variable", "parse", "server", "other"]


@dataclass
class Graded:
    """What a grader gave one answer."""

    reward: float | None = None
    """None where something went wrong."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of a multi grader: each of its graders."""
    faults: dict[Fault, str] = field(default_factory=dict)
    """What went wrong, in words. `sample` alone leaves a reward: 0 for that grader."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that judges took, by model."""


class Grading:
    """Grader processes of a service. Lives in its event loop."""

    def __init__(self, engine: EngineClient, adapters: Adapters) -> None:
        self._engine, self._adapters = engine, adapters
        self._pool = RewardPool(_PROCESSES, walls=Walls(required=True))
        self._lanes: OrderedDict[str, int] = OrderedDict()  # how many use each now
        self._opening = asyncio.Lock()
        self._free = asyncio.Semaphore(_LANES)  # each in use has a lane of its own, which has processes

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    async def grade(
        self, who: Principal, grader: Grader, item: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Graded]:
        """Score the answers to one row, in their order. What goes wrong is in the result."""
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
        """What a grader gives the answers of a job to a problem (as plain values); a reason where it gives nothing."""
        who = Principal.member_of(job.tenant_id)
        graded = await self.grade(who, parse(spec), item_of(msgspec.convert(problem, Problem)), outputs)
        return [one.reward if one.reward is not None else _reason(one) for one in graded]

    async def _asked(self, who: Principal, grader: Grader) -> dict[str, Answerer | str]:
        """What the names of judges mean, or why nobody can be asked.

        Of all before one is asked: where the database is away all is graded anew later, and no judge is asked twice.
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
        """Put one grader's scores, or why there are none, into `graded`."""
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
        """Scores by a grader that asks no model, or why there is none."""
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
        """A lane for a grader; one that nobody uses goes when there are too many."""
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
            graded.parts[name], tokens = await judging.ask(self._engine, who.tenant_id, asked, judge, item, output)
            graded.tokens[judge.model] = graded.tokens.get(judge.model, 0) + tokens
        except judging.VerdictError as error:
            graded.faults["parse"] = str(error)
        except UnfilledError as error:  # each message could be filled, but together they are too long
            graded.faults["variable"] = str(error)
        except (ConfigError, EngineError) as error:
            graded.faults["server"] = str(error)


def _reason(graded: Graded) -> ScoreOrReason:
    reason = "; ".join(graded.faults.values())
    return Chance(reason) if "server" in graded.faults else reason
