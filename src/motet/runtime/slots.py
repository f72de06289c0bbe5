"""Admission to slots, and preemption. Pure functions; the order in which jobs run changes no byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """A job that has a slot or wants one."""

    job: str
    tenant: str = ""
    priority: int = 0
    slots: int = 1
    """Number of its adapters: a critic or a reference adapter counts too."""
    base: str = ""
    """The base that it needs, if there are several."""


@dataclass(frozen=True)
class Rule:
    """Limits on the jobs of one tenant."""

    running: int | None = None
    """Most slots at a time; further jobs wait in the queue."""
    hold: str = ""
    """Why its jobs may not run now, as a message; empty if they may."""
    share: float = 1.0
    """Its share of slots and tokens among tenants."""
    highest: int = 0
    """Cap on priority against other tenants; above it, priority only orders the tenant's own jobs."""
    room: int | None = None
    """Bytes that the tenant may still store; None if that limit is far away."""
    step_tokens: int | Literal["auto"] | None = None
    """The most tokens of a step (`StepLimits`)."""


FREE = Rule()
NOTHING: Mapping[str, float] = {}
"""No past turns."""


def admitted(
    queued: Sequence[Claim],
    running: Sequence[Claim],
    slots: int,
    rules: Mapping[str, Rule],
    had: Mapping[str, float] = NOTHING,
) -> list[str]:
    """The jobs that get the free slots.

    Ordered by capped priority; then by the tenant's slots per share, including past turns; then by priority among its
    own jobs; then by arrival.

    Args:
        queued: waiting jobs, in order of arrival.
        running: jobs that have a slot, in the order they got it.
        slots: number of slots.
        rules: by tenant; tenants without one have no limits.
        had: past turns per share, by tenant (`SlotTurns`).
    """
    waiting, held = list(queued), _held(running)
    free = slots - taken(running)
    chosen_jobs: list[str] = []
    while free > 0:
        able = [claim for claim in waiting if _may_have_another(claim.tenant, held, rules)]
        if not able:
            break
        chosen = min(able, key=lambda claim: _queue_key(claim, held, rules, had))
        # the first in the queue waits for slots, and no other job takes them meanwhile
        if chosen.slots > free and (running or chosen_jobs):
            break
        waiting.remove(chosen)
        held[chosen.tenant] += chosen.slots
        free -= chosen.slots
        chosen_jobs.append(chosen.job)
    return chosen_jobs


def preempted_for_share(
    queued: Sequence[Claim],
    running: Sequence[Claim],
    slots: int,
    rules: Mapping[str, Rule],
    had: Mapping[str, float] = NOTHING,
    stays: str = "",
) -> str | None:
    """The running job to preempt so that tenants hold slots by their shares; None if there is none. It is not `stays`.

    Candidates belong to the tenant with the most slots per share; among those of lowest priority, the newest is chosen.
    No job is preempted for a lower priority, for a tenant with as many slots per share, or if the order would then be
    reversed. Past turns count as slots: where slots are scarce or do not divide evenly, they rotate. Arguments as of
    `admitted`.
    """
    held, free = _held(running), slots - taken(running)
    able = [claim for claim in queued if _may_have_another(claim.tenant, held, rules)]
    if not able:
        return None
    asks = min(able, key=lambda claim: _queue_key(claim, held, rules, had))
    if free >= asks.slots:
        return None
    most = _effective_priority(asks, rules)
    gives = [
        each
        for each in running
        if each.tenant != asks.tenant and each.job != stays and _effective_priority(each, rules) <= most
    ]
    if not gives:
        return None
    richest = max((each.tenant for each in gives), key=lambda tenant: _per_share(tenant, held[tenant], rules, had))
    if _per_share(asks.tenant, held[asks.tenant], rules) >= _per_share(richest, held[richest], rules):
        return None  # equal shares now: past turns move no slot between the two
    given = min(reversed([each for each in gives if each.tenant == richest]), key=lambda each: each.priority)
    gets, left = held[asks.tenant] + asks.slots, held[richest] - max(asks.slots - free, given.slots)
    if _per_share(asks.tenant, gets, rules, had) > _per_share(richest, left, rules, had):
        return None
    return given.job


def preempted_if_idle(
    queued: Sequence[Claim],
    running: Sequence[Claim],
    waiting: Collection[str],
    slots: int,
    rules: Mapping[str, Rule],
    had: Mapping[str, float] = NOTHING,
) -> str | None:
    """The running job to preempt because it only waits; None if no other job would get its slot.

    `waiting` names the running jobs that only wait; other arguments as of `admitted`.
    """
    if not queued or not waiting or (taken(running) < slots and admitted(queued, running, slots, rules, had)):
        return None
    for claim in [claim for claim in reversed(running) if claim.job in waiting]:
        others = [other for other in running if other is not claim]
        first = admitted([*queued, claim], others, slots, rules, had)  # as if it were last in the queue
        if first and first != [claim.job]:
            return claim.job
    return None


def taken(claims: Sequence[Claim]) -> int:
    """Total slots of the jobs."""
    return sum(claim.slots for claim in claims)


def _held(running: Sequence[Claim]) -> Counter[str]:
    held: Counter[str] = Counter()
    for claim in running:
        held[claim.tenant] += claim.slots
    return held


def _queue_key(
    claim: Claim, held: Mapping[str, int], rules: Mapping[str, Rule], had: Mapping[str, float]
) -> tuple[float, float, float]:
    """Sort key of the queue; the least is first."""
    load = _per_share(claim.tenant, held[claim.tenant], rules, had)
    return -_effective_priority(claim, rules), load, -claim.priority


def _per_share(tenant: str, slots: int, rules: Mapping[str, Rule], had: Mapping[str, float] = NOTHING) -> float:
    """Slots per share if the tenant holds `slots`, plus past turns."""
    return slots / rules.get(tenant, FREE).share + had.get(tenant, 0.0)


def _effective_priority(claim: Claim, rules: Mapping[str, Rule]) -> int:
    """A job's priority against other tenants' jobs."""
    return min(claim.priority, rules.get(claim.tenant, FREE).highest)


def _may_have_another(tenant: str, held: Mapping[str, int], rules: Mapping[str, Rule]) -> bool:
    """Whether a tenant is neither on hold nor at its limit of slots."""
    rule = rules.get(tenant, FREE)
    return not rule.hold and (rule.running is None or held[tenant] < rule.running)
