"""Chooses the tenant that may use the device next, by the seconds that each has used for calls and decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SLACK = 0.003
"""Seconds by which a tenant may be ahead of others and still share their tick: rows that are decoded together cost less."""
LEAD = 0.1
"""Seconds by which a tenant may be ahead of others and still get its interactive requests: its own job took them."""
QUANTUM = 0.003
"""Seconds that a piece of work should take while other tenants use the device too: nobody can interrupt it."""
_COMPANY_SECONDS = 2.0
"""How long a tenant counts as present after a request: between two steps it requests nothing."""
_DECAY = 0.95
_PRIOR = 0.02


@dataclass(frozen=True)
class Payer:
    """Who pays for work: a job, its tenant, and the tenant's share."""

    job: str = ""
    tenant: str = ""
    share: float = 1.0


class TenantTurns:
    """Seconds of each tenant, divided by its share. Not thread-safe, except `company`.

    A tenant that arrives or returns starts level with those that are present (start-time fair queueing, Goyal et al. 1996).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._had: dict[str, float] = {}
        self._there: dict[str, set[str]] = {}
        self._leads: dict[str, frozenset[str]] = {}
        """Of the tenants at a place, those with an interactive request."""
        self._seen: dict[str, float] = {}
        self._level = 0.0

    @property
    def company(self) -> bool:
        """Whether several tenants requested something in the last seconds."""
        return len(self._seen) > 1

    def come(self, tenants: Iterable[str], place: str = "", leads: frozenset[str] = frozenset()) -> None:
        """Set the tenants that have work at one place, such as the decoder, and those that may be `LEAD` ahead there."""
        tenants, before, now = set(tenants), set[str]().union(*self._there.values()), self.clock()
        self._level = max(self._level, min((self._had[name] for name in before), default=0.0))
        for name in tenants - before:
            self._had[name] = max(self._had.get(name, 0.0), self._level)
        self._there[place], self._leads[place] = tenants, leads
        there = set[str]().union(*self._there.values())
        self._had = {name: had for name, had in self._had.items() if name in there or had > self._level}
        seen = {name: at for name, at in self._seen.items() if now - at < _COMPANY_SECONDS}
        self._seen = seen | dict.fromkeys(there - {""}, now)

    def had(self, tenant: str) -> float:
        """The seconds used by a tenant, relative to its share; the tenant with the least is next."""
        return self._had[tenant]

    def ahead(self, tenant: str, place: str) -> float:
        """Seconds by which a tenant is ahead of the one with the least at a place; 0 if nobody has work there.

        Others at the place may be `LEAD` ahead of it; its own work takes turns without.
        """
        there, leads = self._there.get(place, ()), self._leads.get(place, frozenset()) - {tenant}
        least = min((self._had[name] - LEAD * (name in leads) for name in there), default=self._had[tenant])
        return self._had[tenant] - least

    def due_until(self, tenants: Iterable[str]) -> float:
        """The seconds that one of these tenants may have used if it is its turn: about as much as the one with the least."""
        return min((self._had[name] for name in set(tenants)), default=0.0) + SLACK

    def charge(self, seconds: float, parts: Iterable[tuple[Payer, float]]) -> Counter[str]:
        """Charge seconds to payers in proportion to their parts; returns microseconds by job."""
        weights, payers = Counter[str](), dict[str, Payer]()
        for payer, part in parts:
            weights[payer.job] += part  # type: ignore[assignment]
            payers[payer.job] = payer
        whole = weights.total()
        of_jobs = (
            Counter({job: int(1e6 * seconds * part / whole) for job, part in weights.items()}) if whole else Counter()
        )
        for job, payer in payers.items():
            self._had[payer.tenant] = self._had.get(payer.tenant, self._level) + of_jobs[job] / 1e6 / payer.share
        return of_jobs


class Cost:
    """Predicts the time of work from its size, by a line through the last few dozen pieces of work."""

    def __init__(self) -> None:
        self._n, self._x, self._y, self._xx, self._xy = _PRIOR, 0.0, 0.0, 0.0, 0.0

    def add(self, size: float, seconds: float) -> None:
        """Record how long one piece took."""
        self._n = _DECAY * (self._n - _PRIOR) + 1 + _PRIOR
        self._x = _DECAY * self._x + size
        self._y = _DECAY * self._y + seconds
        self._xx = _DECAY * self._xx + size * size
        self._xy = _DECAY * self._xy + size * seconds

    def most(self, whole: int) -> int:
        """The part of a size that takes `QUANTUM`, at least a 32nd; more if a smaller part would hardly be faster."""
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        if slope <= 0:
            return whole
        same = max(0.0, (self._y - slope * self._x) / self._n)
        return max(whole // 32, min(whole, int(max(QUANTUM - same, same) / slope)), 1)
