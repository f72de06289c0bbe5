"""Routes for rewards that jobs may name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

from fastapi import APIRouter
from pydantic_core import PydanticUndefined

from motet.rewards.reward_elsewhere import ELSEWHERE
from motet.rewards.reward_loading import SCORER
from motet.rewards.rewards import BUILTIN
from motet.service.depends import Asker, ServiceDep
from motet.service.routing import TenantRoute
from motet.service.schemas.workers import Reward, Rewards

router = APIRouter(prefix="/v1", tags=["rewards"], route_class=TenantRoute)


@router.get("/rewards")
def list_rewards(who: Asker, service: ServiceDep) -> Rewards:
    """List the rewards that jobs may use: built in, installed here, and scored elsewhere."""
    installed = [
        Reward(name=name, kind="installed", summary=one.summary, parameters=dict(one.parameters))
        for name, one in service.settings.rewards.items()
    ]
    return Rewards(data=[*_built_in(), *installed, *_elsewhere()])


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
