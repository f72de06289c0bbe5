"""Who scores rollouts for the engine where no process of the job does: an address, a worker of the tenant's, a judge model.

A scorer is a function `(desk, job, reward, problem, completions)` that gives a number or a reason for each completion, in
order; `SCORERS` names them all. Whatever goes wrong in one is that job's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from motet.config import RewardConfig
from motet.errors import ScorerAway
from motet.service.database.tables import StoredJob
from motet.tasks.reward_elsewhere import Score, to_wire

if TYPE_CHECKING:
    from motet.service.desk import Desk

_log = logging.getLogger(__name__)

Scorer = Callable[["Desk", StoredJob, RewardConfig, dict[str, Any], list[str]], Awaitable[list[Score]]]
"""`problem` is a `Problem` as plain values: id, messages, answer, metadata, conversational."""


async def by_address(
    desk: Desk, job: StoredJob, reward: RewardConfig, problem: dict[str, Any], completions: list[str]
) -> list[Score]:
    """Ask the reward's HTTP address."""
    return await desk.addresses(job.id, reward, problem, completions)


async def by_worker(
    desk: Desk, job: StoredJob, reward: RewardConfig, problem: dict[str, Any], completions: list[str]
) -> list[Score]:
    """Wait until a reward worker of the tenant's has scored them.

    Raises:
        ScorerAway: there is none, and the job is to rest.
    """
    return await desk.workers.ask(job, reward, problem, completions)


async def by_judge(
    desk: Desk, job: StoredJob, reward: RewardConfig, problem: dict[str, Any], completions: list[str]
) -> list[Score]:
    """Ask a model: `args` is a grader of type score_model, label_model, or multi with one of them."""
    return await desk.grading.scores(job, reward.args, problem, completions)


SCORERS: dict[str, Scorer] = {"http": by_address, "worker": by_worker, "judge": by_judge}
"""Scorers by the name of the reward."""


async def answer(desk: Desk, message: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is told of one `score` message; see `tasks.reward_asking`."""
    reward, completions = RewardConfig.model_validate(message["reward"]), list(message["completions"])
    try:
        job = await asyncio.to_thread(desk.store.job_by_id, message["job"])
        scorer = SCORERS.get(reward.name)
        if job is None or scorer is None:
            what = f"reward {reward.name!r}" if job is not None else "job"
            return {"scores": [f"this service knows no such {what}"] * len(completions)}
        return {"scores": to_wire(await scorer(desk, job, reward, dict(message["problem"]), completions))}
    except ScorerAway:
        return {"away": True}
    except Exception as error:  # the boundary of a tenant
        _log.exception("scoring for job %s failed", message["job"])
        told = f"the service failed to score it: {type(error).__name__}: {error}"
        return {"scores": [{"chance": told}] * len(completions)}
