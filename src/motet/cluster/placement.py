"""Which host a job goes to, and which job moves. Pure functions; where a job runs changes no byte of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from motet.runtime.slots import FREE, Claim, Rule, taken


@dataclass(frozen=True)
class HostLoad:
    """A host that takes jobs, and those that it has."""

    host: int
    slots: int
    running: tuple[Claim, ...] = ()
    """Jobs that have a slot there, in the order they came."""
    waiting: tuple[Claim, ...] = ()
    """Jobs that wait there for one."""

    coming: tuple[Claim, ...] = ()
    """Jobs that another host was asked to let go, so that they come here."""
    speed: float = 1.0
    """Beside other hosts' of the same base (`speeds`)."""
    base: str = ""
    """The name of its base, where there are several."""
    fresh: tuple[Claim, ...] = ()
    """Those that wait there and have not had a slot there."""

    @cached_property
    def jobs(self) -> tuple[Claim, ...]:
        """All that have a slot, want one, or are about to."""
        return self.running + self.waiting + self.coming

    @cached_property
    def fullness(self) -> float:
        """Slots that jobs have or want for each that there is; one host that is twice as fast as another counts twice."""
        return self.fullness_with(0)

    def fullness_with(self, more: int) -> float:
        """The same with so many slots more taken, or fewer."""
        return (taken(self.jobs) + more) / (self.slots * self.speed)

    def has_slots(self, claim: Claim) -> bool:
        """Whether a job need not wait for one."""
        return taken(self.jobs) + claim.slots <= self.slots

    def has_room(self, claim: Claim, ahead: int) -> bool:
        """Whether a job may run soon: a slot is free, or fewer than `ahead` of its tenant's wait here that go before it.

        Those that gave their slot away do not count: sessions of clients that ask for nothing may do so for ever.
        """
        before = (other for other in self.fresh if other.tenant == claim.tenant and other.priority >= claim.priority)
        return self.has_slots(claim) or sum(1 for _ in before) < ahead

    @cached_property
    def tenants(self) -> Counter[str]:
        """How many of the jobs are whose."""
        return Counter(claim.tenant for claim in self.jobs)


class Move(NamedTuple):
    """A job that goes from one host to another."""

    job: str
    source: int
    to: int


def placed(claim: Claim, hosts: Sequence[HostLoad], rules: Mapping[str, Rule], ahead: int | None = None) -> int | None:
    """The host that a job goes to; None while no host of its base is there, or while its tenant has as many out as may run.

    With `ahead`, also None while so many of its tenant's jobs wait on every host that it would not run soon.

    Of those with free slots, or of all where none has any, the emptiest for its slots and speed; of those that are as empty,
    the one with the fewest jobs of the tenant, so that tenants compete on each host as they do over all of them.
    """
    limit = rules.get(claim.tenant, FREE).running
    if limit is not None and sum(host.tenants[claim.tenant] for host in hosts) >= limit:
        return None
    same = [host for host in hosts if host.base == claim.base and (ahead is None or host.has_room(claim, ahead))]
    able = [host for host in same if host.has_slots(claim)] or same
    least = min((host.fullness for host in able), default=0.0)
    emptiest = (host for host in able if host.fullness == least)
    return min(((host.tenants[claim.tenant], host.host) for host in emptiest), default=(0, None))[1]


def speeds(measured: Mapping[int, tuple[str, float]]) -> dict[int, float]:
    """Speeds of hosts beside the fastest one's, in powers of two: what is nearer to each other is noise, and counts as alike.

    Args:
        measured: each host's device and its tokens a second, of which those on the same device have the best; 0 is as fast as
            the fastest.
    """
    best: dict[str, float] = {}
    for device, one in measured.values():
        best[device] = max(one, best.get(device, 0.0))
    fastest = max(best.values(), default=0.0)
    alike = {device: 2.0 ** round(math.log2(one / fastest)) if one else 1.0 for device, one in best.items()}
    return {host: alike[device] for host, (device, _) in measured.items()}


def moved(hosts: Sequence[HostLoad]) -> Move | None:
    """The job that leaves the fullest host, so that the emptiest can have it; None where hosts are as even as they can be.

    Hosts of one base alone are compared. One that waits, which costs nothing, before one that runs; of the tenant that the
    other host has fewest of; the last. One that runs goes only where a slot is free.
    """
    bases = dict.fromkeys(host.base for host in hosts)
    moves = (_moved_of([host for host in hosts if host.base == base]) for base in bases)
    return next((move for move in moves if move is not None), None)


def _moved_of(hosts: Sequence[HostLoad]) -> Move | None:
    if len(hosts) < 2:
        return None
    most, least = max(host.fullness for host in hosts), min(host.fullness for host in hosts)
    fullest = min((host for host in hosts if host.fullness == most), key=lambda host: host.host)
    emptiest = min((host for host in hosts if host.fullness == least), key=lambda host: host.host)
    able = [
        claim
        for claim in reversed(fullest.waiting or fullest.running)
        if emptiest.fullness_with(claim.slots) <= fullest.fullness_with(-claim.slots)
        and (fullest.waiting or emptiest.has_slots(claim))
    ]
    if not able:  # or all that count there are still on their way
        return None
    last = max(able, key=lambda claim: fullest.tenants[claim.tenant] - emptiest.tenants[claim.tenant])
    return Move(last.job, fullest.host, emptiest.host)
