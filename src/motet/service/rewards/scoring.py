"""Scores rollouts outside the job's processes: by HTTP, by the tenant's workers, or by a judge model.

A scorer takes `(job, reward, problem, completions, transcripts)` and returns a number or a reason for each completion,
in order; `problem` is a `Problem` as plain values: id, messages, answer, metadata, conversational. Errors affect that
job only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from motet.cluster.messages import ScoreRequest, ScoresAnswered
from motet.config import RewardConfig
from motet.core.errors import ScorerAway
from motet.service.database.store import AWAY, Store
from motet.service.database.tables import StoredJob
from motet.service.events import within
from motet.service.rewards.grading import Grading
from motet.service.workers.rewards import RewardWorkers
from motet.tasks.reward_elsewhere import Elsewhere, ScoreOrReason, Transcripts, to_wire

_log = logging.getLogger(__name__)
_SHORTEST_WAIT, _LONGEST_WAIT = 0.25, 5.0
"""Seconds between two attempts while the database is away."""

Scorer = Callable[[StoredJob, RewardConfig, dict[str, Any], list[str], Transcripts], Awaitable[list[ScoreOrReason]]]


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
        """Scores, or reasons for missing ones; see `hosting.scores`."""
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
        return ScoresAnswered(
            request.key, to_wire(await scorer(job, reward, request.problem, completions, request.transcripts))
        )
