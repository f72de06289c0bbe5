"""Choose the host of a job, and the job to move. Pure functions; a job's bytes do not depend on its host."""

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
    """A host and its jobs."""

    host: int
    slots: int
    running: tuple[Claim, ...] = ()
    """Jobs with a slot, in order of arrival."""
    waiting: tuple[Claim, ...] = ()
    """Jobs that wait for a slot."""

    coming: tuple[Claim, ...] = ()
    """Jobs that are moving here: another host was asked to release them."""
    speed: float = 1.0
    """Relative to other hosts of the same base (`speeds`)."""
    base: str = ""
    """The name of its base, if there are several."""
    fresh: tuple[Claim, ...] = ()
    """Waiting jobs that have not had a slot there."""

    @cached_property
    def jobs(self) -> tuple[Claim, ...]:
        """Running, waiting and coming jobs."""
        return self.running + self.waiting + self.coming

    @cached_property
    def fullness(self) -> float:
        """Slots that jobs have or want, relative to the host's slots and speed."""
        return self.fullness_with(0)

    def fullness_with(self, more: int) -> float:
        """Fullness with `more` further slots taken; may be negative."""
        return (taken(self.jobs) + more) / (self.slots * self.speed)

    def has_slots(self, claim: Claim) -> bool:
        """Whether a job would get its slots at once."""
        return taken(self.jobs) + claim.slots <= self.slots

    def has_room(self, claim: Claim, ahead: int) -> bool:
        """Whether a job may run soon: a slot is free, or fewer than `ahead` jobs of its tenant wait here before it.

        Jobs that gave up a slot do not count: idle sessions of clients may wait forever.
        """
        before = (other for other in self.fresh if other.tenant == claim.tenant and other.priority >= claim.priority)
        return self.has_slots(claim) or sum(1 for _ in before) < ahead

    @cached_property
    def tenants(self) -> Counter[str]:
        """Number of jobs by tenant."""
        return Counter(claim.tenant for claim in self.jobs)


class Move(NamedTuple):
    """A job, the host that has it, and the host that it moves to."""

    job: str
    source: int
    to: int


def placed(claim: Claim, hosts: Sequence[HostLoad], rules: Mapping[str, Rule], ahead: int | None = None) -> int | None:
    """The host for a job; None without a host of its base, or if its tenant has as many jobs on hosts as may run.

    With `ahead`, also None if so many jobs of its tenant wait on every host that it would not run soon.

    Hosts with free slots come first, then the emptiest for its slots and speed. Among equals, the host with the fewest
    jobs of the tenant is chosen, so that tenants compete on each host alike.
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
    """Speeds of hosts relative to the fastest, in powers of two: smaller differences are noise.

    `measured` has each host's device and tokens per second. All hosts on one device get the best of them; 0 counts as the
    fastest.
    """
    best: dict[str, float] = {}
    for device, one in measured.values():
        best[device] = max(one, best.get(device, 0.0))
    fastest = max(best.values(), default=0.0)
    alike = {device: 2.0 ** round(math.log2(one / fastest)) if one else 1.0 for device, one in best.items()}
    return {host: alike[device] for host, (device, _) in measured.items()}


def moved(hosts: Sequence[HostLoad]) -> Move | None:
    """The job to move from the fullest host to the emptiest; None if hosts are as even as possible.

    Only hosts of one base are compared. Waiting jobs come before running ones, because their move is free; then jobs of the
    tenant with the fewest on the other host; then the last. A running job moves only to a free slot.
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
    if not able:  # or all its jobs are still on their way
        return None
    last = max(able, key=lambda claim: fullest.tenants[claim.tenant] - emptiest.tenants[claim.tenant])
    return Move(last.job, fullest.host, emptiest.host)
