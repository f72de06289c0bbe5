"""Routes for rewards that jobs may name, and for reward workers.

Workers connect to the service: they lease work, score it, and send results. Every request may be repeated.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from pydantic_core import PydanticUndefined

from motet.core.json_text import rough_size
from motet.core.types import JobState
from motet.rewards.reward_elsewhere import ELSEWHERE
from motet.rewards.reward_loading import SCORER
from motet.rewards.rewards import BUILTIN
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.auth import FEW_BYTES
from motet.service.http.bodies import hold
from motet.service.routing import TenantRoute
from motet.service.schemas.workers import ByChance, Counted, Lease, LeaseRequest, Results, Reward, Rewards, WithLogs
from motet.service.workers.attached import MOST_LEASED

router = APIRouter(prefix="/v1", tags=["rewards"], route_class=TenantRoute)


@router.get("/rewards")
def list_rewards(who: Asker, service: ServiceDep) -> Rewards:
    """List the rewards that jobs may use: built in, installed here, and scored elsewhere."""
    installed = [
        Reward(name=name, kind="installed", summary=one.summary, parameters=dict(one.parameters))
        for name, one in service.settings.rewards.items()
    ]
    return Rewards(data=[*_built_in(), *installed, *_elsewhere()])


@router.post("/jobs/{job}/scoring/lease", response_model=Lease)
async def lease(request: Request, who: Asker, service: ServiceDep, job: NamedJob, asked: LeaseRequest) -> Response:
    """Lease work for a reward worker. The call waits until some is available; the lease lasts `seconds`.

    Work that the worker holds is renewed. Work not scored by the end of its lease is leased again.
    """
    leased, state = [], JobState(job.state)
    room = functools.partial(hold, request, service.open_answers, who.tenant_id, MOST_LEASED)
    if not state.final:
        leased = await service.reward_workers.lease(
            job.id, asked.worker, who.key_id, asked.most, asked.wait_seconds, request.is_disconnected, room, asked.holds
        )
        state = await service.reward_workers.state(job.id)
    units = [{"id": unit.key, **unit.work, "handed_out": unit.handed_out} for unit in leased]
    shown = {"units": units, "seconds": service.reward_workers.lease_seconds, "state": state.value}
    return await service.encode_threads.answer(who.tenant_id, rough_size(shown, FEW_BYTES), lambda: shown)


@router.post("/jobs/{job}/scoring/results")
async def results(service: ServiceDep, job: NamedJob, asked: Results) -> Counted:
    """Send scores. Repeats count once, also from different workers."""
    given = {one.id: one.scores for one in asked.results}
    expected = await asyncio.to_thread(service.reward_workers.units.completions, job.id, list(given))
    for key, n in expected.items():
        if len(given[key]) != n:
            raise Refusal(400, f"{key} has {n} completions, but got {len(given[key])} scores; nothing was counted")
    wire = {
        key: [score.model_dump() if isinstance(score, ByChance | WithLogs) else score for score in given[key]]
        for key in expected
    }
    counted = await service.reward_workers.settle(job.id, wire)
    known = [key for key in expected if key not in counted]
    return Counted(counted=counted, known=known, unknown=[key for key in given if key not in expected])


@router.delete("/jobs/{job}/scoring/workers/{worker}", status_code=204)
async def leave(service: ServiceDep, job: NamedJob, worker: str) -> None:
    """Report that a reward worker leaves; its work is leased again at once."""
    await service.reward_workers.leave(job.id, worker)


@functools.cache
def _built_in() -> tuple[Reward, ...]:
    return tuple(_each_built_in())


def _each_built_in() -> Iterator[Reward]:
    for name, function in BUILTIN.items():
        own = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
        parameters = {one.name: "" if one.default is one.empty else repr(one.default) for one in own}
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        yield Reward(name=name, kind="built-in", summary=summary, parameters=parameters)
    summary = "The scorer of reasoning-gym data."
    yield Reward(name=SCORER, kind="built-in", summary=summary, parameters={})


@functools.cache
def _elsewhere() -> tuple[Reward, ...]:
    return tuple(_each_elsewhere())


def _each_elsewhere() -> Iterator[Reward]:
    for name, model in ELSEWHERE.items():
        fields = {
            field: "" if info.default is PydanticUndefined else repr(info.default)
            for field, info in model.model_fields.items()
        }
        summary = (inspect.getdoc(model) or "").partition("\n")[0]
        yield Reward(name=name, kind="elsewhere", summary=summary, parameters=fields)
