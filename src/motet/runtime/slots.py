"""Admission to slots and preemption. Pure functions; who runs when changes no byte of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A job that wants a slot or has one."""

    job: str
    tenant: str = ""
    priority: int = 0
    slots: int = 1
    """How many adapters it has: a critic, or a reference that is an adapter, is another one."""
    base: str = ""
    """The name of the base that it is for, where there are several."""


@dataclass(frozen=True)
class Rule:
    """What holds for the jobs of one tenant."""

    running: int | None = None
    """Most slots at a time; further jobs wait in the queue."""
    hold: str = ""
    """Why none of its jobs may run now, for a person; empty when they may."""
    share: float = 1.0
    """Its share of slots and tokens among tenants."""
    highest: int = 0
    """The highest priority that counts against other tenants; a higher one only goes before its own jobs."""
    room: int | None = None
    """Bytes that the tenant may still store; None where the limit is far."""


FREE = Rule()
NOTHING: Mapping[str, float] = {}
"""No turns that were had."""


def admitted(
    queued: Sequence[Claim],
    running: Sequence[Claim],
    slots: int,
    rules: Mapping[str, Rule],
    had: Mapping[str, float] = NOTHING,
) -> list[str]:
    """The jobs that get the free slots.

    By priority, as far as it counts against others; then of the tenant with the fewest slots for its share, those that it has
    had before included; then by priority among its own jobs, and in order.

    Args:
        queued: jobs that wait, in the order they came.
        running: jobs that have a slot.
        slots: how many there are.
        rules: of tenants; those that are not named are free.
        had: turns of a slot that tenants have had, per share (`SlotTurns`).
    """
    waiting, held = list(queued), _held(running)
    free = slots - taken(running)
    chosen_jobs: list[str] = []
    while free > 0:
        able = [claim for claim in waiting if _may_have_another(claim.tenant, held, rules)]
        if not able:
            break
        chosen = min(able, key=lambda claim: _queue_key(claim, held, rules, had))
        if chosen.slots > free and (running or chosen_jobs):  # it is the first, so nobody takes what it waits for
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
) -> str | None:
    """The running job to preempt, so that tenants have slots by their shares; None where nobody has to give way.

    It is the job that came last among those of the lowest priority of the tenant with the most slots for its share, of those
    that may give way: nobody does to a lower priority, to a tenant with as many slots for its share, or where the other would
    have more afterwards. Turns that a tenant has had count as slots: where there are fewer slots than tenants, or they do not
    divide, they go around.

    Args:
        queued: jobs that wait, in the order they came.
        running: jobs that have a slot, in the order they got it.
        slots: how many there are.
        rules: of tenants; those that are not named are free.
        had: turns of a slot that tenants have had, per share (`SlotTurns`).
    """
    if not running or not queued or slots - taken(running) >= min(claim.slots for claim in queued):
        return None
    held = _held(running)
    able = [claim for claim in queued if _may_have_another(claim.tenant, held, rules)]
    if not able:
        return None
    asks = min(able, key=lambda claim: _queue_key(claim, held, rules, had))
    most = _effective_priority(asks, rules)
    gives = [each for each in running if each.tenant != asks.tenant and _effective_priority(each, rules) <= most]
    if not gives:
        return None
    richest = max((each.tenant for each in gives), key=lambda tenant: _part(tenant, held[tenant], rules, had))
    if _part(asks.tenant, held[asks.tenant], rules) >= _part(richest, held[richest], rules):
        return None  # it has as many for its share now: turns that were had move no slot between the two
    if _part(asks.tenant, held[asks.tenant] + 1, rules, had) > _part(richest, held[richest] - 1, rules, had):
        return None
    return min(reversed([each for each in gives if each.tenant == richest]), key=lambda each: each.priority).job


def preempted_if_idle(
    queued: Sequence[Claim],
    running: Sequence[Claim],
    waiting: Collection[str],
    slots: int,
    rules: Mapping[str, Rule],
    had: Mapping[str, float] = NOTHING,
) -> str | None:
    """The running job to preempt because it only waits; None where nobody else would get its slot.

    Args:
        queued: jobs that want a slot, in the order they came.
        running: jobs that have one, in the order they got it.
        waiting: those of them that do nothing but wait.
        slots: how many there are.
        rules: of tenants; those that are not named are free.
        had: turns of a slot that tenants have had, per share (`SlotTurns`).
    """
    for claim in reversed(running if taken(running) >= slots else ()):
        others = [other for other in running if other is not claim]
        first = admitted([*queued, claim], others, taken(running), rules, had)  # as if it stood at the end of the queue
        if claim.job in waiting and first and first != [claim.job]:
            return claim.job
    return None


def taken(claims: Sequence[Claim]) -> int:
    """The slots that jobs have."""
    return sum(claim.slots for claim in claims)


def _held(running: Sequence[Claim]) -> Counter[str]:
    held: Counter[str] = Counter()
    for claim in running:
        held[claim.tenant] += claim.slots
    return held


def _queue_key(
    claim: Claim, held: Mapping[str, int], rules: Mapping[str, Rule], had: Mapping[str, float]
) -> tuple[float, float, float]:
    """The order of the queue; the least is first."""
    part = _part(claim.tenant, held[claim.tenant], rules, had)
    return -_effective_priority(claim, rules), part, -claim.priority


def _part(tenant: str, slots: int, rules: Mapping[str, Rule], had: Mapping[str, float] = NOTHING) -> float:
    """A tenant's part if it holds so many slots for a turn: those and what it has had, per share."""
    return slots / rules.get(tenant, FREE).share + had.get(tenant, 0.0)


def _effective_priority(claim: Claim, rules: Mapping[str, Rule]) -> int:
    """A job's priority against jobs of other tenants."""
    return min(claim.priority, rules.get(claim.tenant, FREE).highest)


def _may_have_another(tenant: str, held: Mapping[str, int], rules: Mapping[str, Rule]) -> bool:
    """Whether a tenant is neither on hold nor at its limit of slots."""
    rule = rules.get(tenant, FREE)
    return not rule.hold and (rule.running is None or held[tenant] < rule.running)
