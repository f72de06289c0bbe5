"""The section `team`: several adapters that one job trains in the same episodes, one for each role."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.policy_gradient import PolicyGradient
from motet.core.settings import Config
from motet.core.suggestions import doubled_in
from motet.core.types import MOST_ROLES

MOST_RANK = 512
NOT_ON_HOSTS = (
    "team: trains on one host with the embedded engine only; leave engine.hosts, engine.ranks, engine.shard, --ray and "
    "rollout.engine out"
)
_ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}")


class RoleConfig(Config):
    """The adapter of one role. Fields that you leave out are those of the job."""

    rank: int | None = Field(None, ge=1, le=MOST_RANK)
    """Rank of its adapter. By default `adapter.rank`."""
    lr: float | None = Field(None, gt=0, lt=1)
    """Its learning rate. By default that of the job, from `optimizer.lr` and `lr_multiplier`."""


def _by_role(value: Any) -> Any:
    """Accept a list of roles."""
    if not isinstance(value, list):
        return value
    if doubled := doubled_in(map(str, value)):
        raise ValueError(f"names the role {doubled[0]:.80} more than once; name each role once")
    return {str(role): {} for role in value}


TeamConfig = Annotated[dict[str, RoleConfig], Field(max_length=MOST_ROLES), BeforeValidator(_by_role)]


def team_mistake(roles: Collection[str], algorithm: Algorithm, environment: str, init: str | None) -> str | None:
    """Why a job cannot train its team; None if it can."""
    if len(roles) == 1:
        return "team: has one role; name two or more, or leave it out"
    if wrong := next((role for role in roles if not _ROLE.fullmatch(role)), None):
        return f"team: {wrong!r} is no role: use small letters, digits and _, a letter first, at most 32 characters"
    if ":" not in environment:
        return "team: needs environment: file.py:Class, a class that says in self.role whose turn it is"
    if not isinstance(algorithm, PolicyGradient) or not algorithm.needs_rewards:
        return f"team: each role learns from rewards of its own, and {algorithm.type} learns otherwise; use grpo"
    if algorithm.needs_values is not None or algorithm.companions(started=False):
        return "team: a critic or a reference adapter has one policy, and a team has several; leave it out"
    for field in ("oversampling", "over_provision"):
        if getattr(algorithm, field) > 1:
            return f"team: algorithm.{field} chooses groups by one reward, and each role has its own; leave it out"
    if algorithm.in_flight == "continue" or algorithm.credit != "episode":
        return "team: algorithm.in_flight: continue and credit: return_to_go do not know roles; leave them out"
    if init is not None:
        return "team: adapter.init names one adapter, and a team has several; leave it out"
    return None
