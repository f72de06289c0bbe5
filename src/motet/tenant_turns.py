"""Whose turn the device is: tenants take turns by the seconds that they took, in calls and in decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SLACK = 0.003
"""Seconds by which a tenant may be ahead of others and still share their tick: rows that are decoded together cost less."""
QUANTUM = 0.003
"""Seconds that a piece of work should take while other tenants use the device too: nobody can interrupt it."""
_COMPANY_SECONDS = 2.0
"""How long a tenant counts as there after it asked for something: between two steps it asks for nothing."""
_DECAY = 0.95
_PRIOR = 0.02


@dataclass(frozen=True)
class Payer:
    """Who pays for work: a job, its tenant, and the tenant's share."""

    job: str = ""
    tenant: str = ""
    share: float = 1.0


class TenantTurns:
    """Seconds of each tenant, divided by its share. Not for several threads, except `company`.

    A tenant that comes, or comes back, starts level with those that are there (start-time fair queueing, Goyal et al. 1996).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._had: dict[str, float] = {}
        self._there: dict[str, set[str]] = {}
        self._seen: dict[str, float] = {}
        self._level = 0.0

    @property
    def company(self) -> bool:
        """Whether several tenants asked for something in the last seconds."""
        return len(self._seen) > 1

    def come(self, tenants: Iterable[str], place: str = "") -> None:
        """Say which tenants have anything to do at one place, such as the decoder."""
        tenants, before, now = set(tenants), set[str]().union(*self._there.values()), self._clock()
        self._level = max(self._level, min((self._had[name] for name in before), default=0.0))
        for name in tenants - before:
            self._had[name] = max(self._had.get(name, 0.0), self._level)
        self._there[place] = tenants
        there = set[str]().union(*self._there.values())
        self._had = {name: had for name, had in self._had.items() if name in there or had > self._level}
        seen = {name: at for name, at in self._seen.items() if now - at < _COMPANY_SECONDS}
        self._seen = seen | dict.fromkeys(there - {""}, now)

    def had(self, tenant: str) -> float:
        """What orders the tenants that are there."""
        return self._had[tenant]

    def ahead(self, tenant: str, place: str) -> float:
        """Seconds that a tenant has had more than the one with the least at a place; 0 where nobody is there."""
        there = self._there.get(place, ())
        return self._had[tenant] - min((self._had[name] for name in there), default=self._had[tenant])

    def due(self, tenants: Iterable[str]) -> set[str]:
        """Of tenants that could go on now those whose turn it is; all of them where they had about as much."""
        names = set(tenants)
        if not names:
            return names
        least = min(self._had[name] for name in names)
        return {name for name in names if self._had[name] <= least + SLACK}

    def charge(self, seconds: float, parts: Iterable[tuple[Payer, float]]) -> Counter[str]:
        """Share seconds out by parts; microseconds by job."""
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
    """How long work of a size takes: a line through the last few dozen pieces of work."""

    def __init__(self) -> None:
        self._n, self._x, self._y, self._xx, self._xy = _PRIOR, 0.0, 0.0, 0.0, 0.0

    def add(self, size: float, seconds: float) -> None:
        """Hear how long one piece took."""
        self._n = _DECAY * (self._n - _PRIOR) + 1 + _PRIOR
        self._x = _DECAY * self._x + size
        self._y = _DECAY * self._y + seconds
        self._xx = _DECAY * self._xx + size * size
        self._xy = _DECAY * self._xy + size * seconds

    def most(self, whole: int) -> int:
        """As much of a size as takes `QUANTUM`, but a 32nd at least; more where a part would hardly be faster."""
        spread = self._n * self._xx - self._x * self._x
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        if slope <= 0:
            return whole
        same = max(0.0, (self._y - slope * self._x) / self._n)
        return max(whole // 32, min(whole, int(max(QUANTUM - same, same) / slope)), 1)
