"""What jobs may name as their reward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fastapi import APIRouter
from pydantic_core import PydanticUndefined

from motet.service.http.asking import Asker, AtDesk
from motet.service.schemas.scoring import Reward, Rewards
from motet.tasks.reward_elsewhere import ELSEWHERE
from motet.tasks.reward_installed import Installed
from motet.tasks.reward_loading import SCORER
from motet.tasks.rewards import BUILTIN

router = APIRouter(prefix="/v1/rewards", tags=["rewards"])


@router.get("")
def list_rewards(who: Asker, desk: AtDesk) -> Rewards:
    """Rewards that jobs may use: built in, installed here, and scored elsewhere."""
    installed = [_installed(name, one) for name, one in desk.settings.rewards.items()]
    return Rewards(data=[*_built_in(), *installed, *_elsewhere()])


def _built_in() -> Iterator[Reward]:
    for name, function in BUILTIN.items():
        own = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
        parameters = {one.name: "" if one.default is one.empty else repr(one.default) for one in own}
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        yield Reward(name=name, kind="built-in", summary=summary, parameters=parameters)
    summary = "The scorer of reasoning-gym data."
    yield Reward(name=SCORER, kind="built-in", summary=summary, parameters={})


def _installed(name: str, one: Installed) -> Reward:
    return Reward(name=name, kind="installed", summary=one.summary, parameters=dict(one.parameters))


def _elsewhere() -> Iterator[Reward]:
    for name, model in ELSEWHERE.items():
        fields = {
            field: "" if info.default is PydanticUndefined else repr(info.default)
            for field, info in model.model_fields.items()
        }
        summary = (inspect.getdoc(model) or "").partition("\n")[0]
        yield Reward(name=name, kind="elsewhere", summary=summary, parameters=fields)
