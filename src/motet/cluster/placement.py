"""Which host a job goes to, and which job moves. Pure functions; where a job runs changes no byte of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from motet.runtime.slots import FREE, Claim, Rule


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

    @cached_property
    def jobs(self) -> tuple[Claim, ...]:
        """All that have a slot, want one, or are about to."""
        return self.running + self.waiting + self.coming

    @cached_property
    def fullness(self) -> float:
        """Jobs for each slot."""
        return len(self.jobs) / self.slots

    @cached_property
    def tenants(self) -> Counter[str]:
        """How many of the jobs are whose."""
        return Counter(claim.tenant for claim in self.jobs)


class Move(NamedTuple):
    """A job that goes from one host to another."""

    job: str
    source: int
    to: int


def placed(claim: Claim, hosts: Sequence[HostLoad], rules: Mapping[str, Rule]) -> int | None:
    """The host that a job goes to; None while no host is there, or while its tenant has as many jobs out as may run.

    The emptiest host for its slots; of those that are as empty, the one with the fewest jobs of the tenant, so that tenants
    compete on each host as they do over all of them. One host is given all jobs: it keeps the tenant's limit itself.
    """
    limit = rules.get(claim.tenant, FREE).running
    if len(hosts) > 1 and limit is not None and sum(host.tenants[claim.tenant] for host in hosts) >= limit:
        return None
    least = min((host.fullness for host in hosts), default=0.0)
    emptiest = (host for host in hosts if host.fullness == least)
    return min(((host.tenants[claim.tenant], host.host) for host in emptiest), default=(0, None))[1]


def moved(hosts: Sequence[HostLoad]) -> Move | None:
    """The job that leaves the fullest host, so that the emptiest can have it; None where hosts are as even as they can be.

    One that waits, which costs nothing, before one that runs; of the tenant that the other host has fewest of; the last.
    """
    if len(hosts) < 2:
        return None
    most, least = max(host.fullness for host in hosts), min(host.fullness for host in hosts)
    fullest = min((host for host in hosts if host.fullness == most), key=lambda host: host.host)
    emptiest = min((host for host in hosts if host.fullness == least), key=lambda host: host.host)
    if (len(emptiest.jobs) + 1) / emptiest.slots > (len(fullest.jobs) - 1) / fullest.slots:
        return None
    able = list(reversed(fullest.waiting or fullest.running))
    if not able:  # all that count there are still on their way
        return None
    last = max(able, key=lambda claim: fullest.tenants[claim.tenant] - emptiest.tenants[claim.tenant])
    return Move(last.job, fullest.host, emptiest.host)
