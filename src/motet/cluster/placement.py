"""Which host a job goes to, and which job moves. Pure functions; where a job runs changes no byte of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    @property
    def jobs(self) -> tuple[Claim, ...]:
        """All that have a slot or want one."""
        return self.running + self.waiting

    @property
    def fullness(self) -> float:
        """Jobs for each slot."""
        return len(self.jobs) / self.slots

    def of_tenant(self, tenant: str) -> int:
        """How many of the jobs are a tenant's."""
        return sum(claim.tenant == tenant for claim in self.jobs)


def placed(claim: Claim, hosts: Sequence[HostLoad], rules: Mapping[str, Rule]) -> int | None:
    """The host that a job goes to; None while no host is there, or while its tenant has as many jobs out as may run.

    The emptiest host for its slots; of those that are as empty, the one with the fewest jobs of the tenant, so that tenants
    compete on each host as they do over all of them. One host is given all jobs: it keeps the tenant's limit itself.
    """
    limit = rules.get(claim.tenant, FREE).running
    if len(hosts) > 1 and limit is not None and sum(host.of_tenant(claim.tenant) for host in hosts) >= limit:
        return None
    return min(hosts, key=lambda host: (host.fullness, host.of_tenant(claim.tenant), host.host)).host if hosts else None


def moved(hosts: Sequence[HostLoad]) -> str | None:
    """The job that leaves the fullest host, so that the emptiest can have it; None where hosts are as even as they can be.

    One that waits, which costs nothing, before one that runs; of the tenant that the other host has fewest of; the last.
    """
    if len(hosts) < 2:
        return None
    fullest = max(hosts, key=lambda host: (host.fullness, -host.host))
    emptiest = min(hosts, key=lambda host: (host.fullness, host.host))
    if (len(emptiest.jobs) + 1) / emptiest.slots > (len(fullest.jobs) - 1) / fullest.slots:
        return None
    able = reversed(fullest.waiting or fullest.running)
    return max(able, key=lambda claim: fullest.of_tenant(claim.tenant) - emptiest.of_tenant(claim.tenant)).job
