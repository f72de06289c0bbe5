"""Scores rollouts outside the job's processes: by HTTP, by the tenant's workers, or by a judge model.

A scorer takes `(job, reward, problem, completions, seen)` and returns a number or a reason for each completion,
in order; `problem` is a `Problem` as plain values: id, messages, answer, metadata, conversational. Errors affect that
job only. A judge is a base or a version of an adapter that the service has.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from motet.chat.completer import whole
from motet.config import RewardConfig
from motet.core.errors import ConfigError, EngineError, ScorerAway
from motet.core.types import Message, Problem, SamplingParams
from motet.hosts.messages import Complete, ScoreRequest, ScoresAnswered
from motet.rewards.graders import item_of
from motet.rewards.graders.shapes import Grader, Judge, JudgeSampling, judges, parse
from motet.rewards.judging import Graded, Graders, most_tokens, score_or_reason
from motet.rewards.reward_elsewhere import AnswerDetails, Elsewhere, ScoreOrReason, to_wire
from motet.rewards.reward_walls import Walls
from motet.service.adapters.adapters import Adapters, Answerer, NoModelError
from motet.service.answers import Asks, ask
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.events import within
from motet.service.workers.rewards import RewardWorkers

_log = logging.getLogger(__name__)
_SHORTEST_WAIT, _LONGEST_WAIT = 0.25, 5.0
"""Seconds between two attempts while the database is away."""

Scorer = Callable[[StoredJob, RewardConfig, dict[str, Any], list[str], AnswerDetails], Awaitable[list[ScoreOrReason]]]


class Grading(Graders):
    """Grader processes of a service. Lives in its event loop."""

    def __init__(
        self, asks: Asks, adapters: Adapters, charge: Callable[[str, float], None] = lambda tenant, seconds: None
    ) -> None:
        super().__init__(Walls(required=True), charge)
        self._asks, self._adapters = asks, adapters

    async def grade(
        self, who: Principal, grader: Grader, item: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[Graded]:
        """Score the answers to one row, in order. Failures are in the results."""
        answerers = await self._answerers(who, grader)

        async def asked(judge: Judge, messages: list[dict[str, str]]) -> tuple[str, int]:
            answerer = answerers[judge.model]
            if isinstance(answerer, str):
                raise EngineError(answerer)
            return await self._ask(who, answerer, judge, messages)

        return await self.graded(who.tenant_id, grader, item, outputs, asked)

    async def scores(
        self, job: StoredJob, spec: Mapping[str, Any], problem: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[ScoreOrReason]:
        """Scores of a job's answers to a problem (as plain values); a reason for each missing score."""
        who = Principal.member_of(job.tenant_id, job.account)
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

    async def _ask(
        self, who: Principal, asked: Answerer, judge: Judge, messages: Sequence[Mapping[str, str]]
    ) -> tuple[str, int]:
        """The judge's answer, and its tokens, which are charged to `who`."""
        sampling = judge.sampling_params or JudgeSampling()
        seed = sampling.seed
        if seed is None:  # in a thread: they may have a million letters
            seed = await asyncio.to_thread(lambda: zlib.crc32(repr([dict(one) for one in messages]).encode()))
        params = SamplingParams(
            temperature=sampling.temperature or 0.0,
            top_p=sampling.top_p or 1.0,
            max_tokens=most_tokens(judge),
        )
        adapter = None if asked.directory is None else str(asked.directory)
        question = Complete(
            who.tenant_id, adapter, n=1, seed=seed, stream=False, logprobs=False, sampling=params,
            messages=[Message(one["role"], one["content"]) for one in messages], base=asked.base,
            template=dict(asked.template), account=who.account or "",
        )  # fmt: skip
        read, pieces = await ask(self._asks, question)
        (answer,) = await whole(pieces)
        return answer.text, read.tokens + len(answer.token_ids)


class Scoring:
    """The scorers of a service, by the name of the reward."""

    def __init__(self, store: Store, addresses: Elsewhere, workers: RewardWorkers, grading: Grading) -> None:
        self._store = store
        self._closing = asyncio.Event()
        self._scorers: dict[str, Scorer] = {
            "http": lambda job, reward, *asked: addresses(f"{job.tenant_id}/{job.id}", reward, *asked),
            "worker": workers.ask,
            "judge": lambda job, reward, problem, texts, _: grading.scores(job, reward.args, problem, texts),
        }

    async def answer(self, request: ScoreRequest) -> ScoresAnswered:
        """Scores, or reasons for missing ones; see `hosts.scores`."""
        wait = _SHORTEST_WAIT
        while True:
            try:
                return await self._scored(request)
            except ScorerAway:
                return ScoresAnswered(request.key, away=True)
            except AWAY as error:  # the engine waits, and cancels this when it stops
                _log.warning(
                    "scoring for job %s waits for the database: %s", request.job, getattr(error, "orig", error)
                )
                await within(self._closing, wait)
                if self._closing.is_set():
                    return ScoresAnswered(request.key, away=True)
                wait = min(2 * wait, _LONGEST_WAIT)
            except Exception as error:  # one tenant's error must not affect others
                _log.exception("scoring for job %s failed", request.job)
                reason = f"the service failed to score it: {type(error).__name__}: {error}"
                return ScoresAnswered(request.key, [{"chance": reason}] * len(request.completions))

    def close(self) -> None:
        """Release jobs that wait for the database; the next start asks again."""
        self._closing.set()

    async def _scored(self, request: ScoreRequest) -> ScoresAnswered:
        reward, completions = RewardConfig.model_validate(request.reward), request.completions
        job = await asyncio.to_thread(self._store.job_by_id, request.job)
        scorer = self._scorers.get(reward.name)
        if job is None or scorer is None:
            what = f"reward {reward.name!r}" if job is not None else "job"
            return ScoresAnswered(request.key, [f"this service knows no such {what}"] * len(completions))
        seen = AnswerDetails(request.transcripts, request.parts, request.state)
        return ScoresAnswered(request.key, to_wire(await scorer(job, reward, request.problem, completions, seen)))
