"""Graders for a service: a judge is a base or a version of an adapter that the service has."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from motet.chat.completer import whole
from motet.cluster.hosts import Hosts
from motet.cluster.messages import Complete
from motet.core.errors import ConfigError, EngineError
from motet.core.types import Message, Problem, SamplingParams
from motet.service.adapters.adapters import Adapters, Answerer, NoModelError
from motet.service.answers import ask
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.tasks.graders import item_of
from motet.tasks.graders.shapes import Grader, Judge, JudgeSampling, judges, parse
from motet.tasks.judging import Graded, Graders, most_tokens, score_or_reason
from motet.tasks.reward_elsewhere import ScoreOrReason
from motet.tasks.reward_walls import Walls


class Grading(Graders):
    """Grader processes of a service. Lives in its event loop."""

    def __init__(self, hosts: Hosts, adapters: Adapters) -> None:
        super().__init__(Walls(required=True))
        self._hosts, self._adapters = hosts, adapters

    async def grade(
        self, who: Principal, grader: Grader, item: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Graded]:
        """Score the answers to one row, in order. Failures are in the results."""
        answerers = await self._answerers(who, grader)

        async def asked(judge: Judge, messages: list[dict[str, str]]) -> tuple[str, int]:
            answerer = answerers[judge.model]
            if isinstance(answerer, str):
                raise EngineError(answerer)
            return await ask_judge(self._hosts, who.tenant_id, answerer, judge, messages)

        return await self.graded(who.tenant_id, grader, item, outputs, asked)

    async def scores(
        self, job: StoredJob, spec: Mapping[str, Any], problem: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[ScoreOrReason]:
        """Scores of a job's answers to a problem (as plain values); a reason for each missing score."""
        who = Principal.member_of(job.tenant_id)
        graded = await self.grade(who, parse(spec), item_of(msgspec.convert(problem, Problem)), outputs)
        return [score_or_reason(one) for one in graded]

    async def _answerers(self, who: Principal, grader: Grader) -> dict[str, Answerer | str]:
        """Resolve the names of judges; returns the reason if one cannot be asked.

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


async def ask_judge(
    hosts: Hosts, tenant: str, asked: Answerer, judge: Judge, messages: Sequence[Mapping[str, str]]
) -> tuple[str, int]:
    """The judge's answer, and its tokens, which are charged to `tenant`.

    Raises:
        EngineError, ConfigError: the engine cannot answer, now or ever.
    """
    sampling = judge.sampling_params or JudgeSampling()
    seed = zlib.crc32(repr([dict(one) for one in messages]).encode()) if sampling.seed is None else sampling.seed
    params = SamplingParams(
        temperature=sampling.temperature or 0.0,
        top_p=sampling.top_p or 1.0,
        max_tokens=most_tokens(judge),
    )
    adapter = None if asked.directory is None else str(asked.directory)
    question = Complete(
        tenant, adapter, n=1, seed=seed, stream=False, logprobs=False, sampling=params,
        messages=[Message(one["role"], one["content"]) for one in messages], base=asked.base,
    )  # fmt: skip
    read, pieces = await ask(hosts, question)
    (answer,) = await whole(pieces)
    return answer.text, read.tokens + len(answer.token_ids)
