"""Whose rows a tick works on: tenants take turns by the seconds that they took of the decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from motet.types import GenerateRequest

SLACK = 0.02
"""Seconds by which a tenant may be ahead of others and still share their tick: rows that are decoded together cost less."""


class TenantTurns:
    """Seconds of each tenant, divided by its share.

    A tenant that comes, or comes back, starts level with those that are there (start-time fair queueing, Goyal et al. 1996).
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._there: set[str] = set()
        self._level = 0.0

    def come(self, tenants: Iterable[str]) -> None:
        """Say which tenants have anything to do."""
        tenants = set(tenants)
        for name in tenants - self._there:
            self._had[name] = max(self._had.get(name, 0.0), self._level)
        self._there = tenants
        self._had = {name: had for name, had in self._had.items() if name in tenants or had > self._level}

    def had(self, tenant: str) -> float:
        """What orders the tenants that are there."""
        return self._had[tenant]

    def due(self, tenants: Iterable[str]) -> set[str]:
        """Of tenants that could go on now those whose turn it is; all of them where they had about as much."""
        names = set(tenants)
        if not names:
            return names
        least = min(self._had[name] for name in names)
        self._level = max(self._level, least)
        return {name for name in names if self._had[name] <= least + SLACK}

    def charge(self, seconds: float, parts: Iterable[tuple[GenerateRequest, int]]) -> Counter[str]:
        """Share seconds out by parts; microseconds by job."""
        weights, shares = Counter[str](), dict[str, tuple[str, float]]()
        for request, part in parts:
            weights[request.job] += part
            shares[request.job] = request.tenant, request.share
        of_jobs = Counter({job: int(1e6 * seconds * part / weights.total()) for job, part in weights.items()})
        for job, (tenant, share) in shares.items():
            self._had[tenant] = self._had.get(tenant, self._level) + of_jobs[job] / 1e6 / share
        return of_jobs
