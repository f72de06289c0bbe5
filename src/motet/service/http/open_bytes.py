"""Memory of open requests, or of answers until they are read: so much in total, and for each tenant."""

from __future__ import annotations

import threading
from collections import Counter

from starlette.exceptions import HTTPException

from motet.config.service import HttpConfig

SOON = {"Retry-After": "1"}
_NOBODYS_PART = 8


class OpenBytes:
    """Memory of open requests, in total and per tenant. Thread-safe."""

    def __init__(self, config: HttpConfig) -> None:
        self._most = int(config.open_mb * 2**20)
        self.most_of_one = min(self._most, int(config.open_mb_per_tenant * 2**20))
        self._taken = Counter[str]()
        self._total = 0
        self._lock = threading.Lock()

    def take(self, payer: str, size: int, *, always: bool = False) -> None:
        """Count bytes of a tenant, with `always` even without room; requests without a tenant share a small part.

        Raises:
            HTTPException: no room now (429), or too large for the limit (413).
        """
        most = self.most_of_one if payer else self._most // _NOBODYS_PART
        if size > most and not always:
            raise HTTPException(413, f"this request takes {size >> 20} MB of memory; {most >> 20} MB are the most here")
        with self._lock:
            if not always and (self._taken[payer] + size > most or self._total + size > self._most):
                whose = "your" if self._taken[payer] + size > most else "all"
                words = f"{whose} open requests use all the memory for requests; try again in a moment"
                raise HTTPException(429, words, SOON)
            self._taken[payer] += size
            self._total += size

    def give_back(self, payer: str, size: int) -> None:
        """Release counted bytes."""
        with self._lock:
            self._taken[payer] -= size
            self._total -= size
            if not self._taken[payer]:
                del self._taken[payer]

    def holds(self, payer: str) -> bool:
        """Whether a tenant has taken anything."""
        with self._lock:
            return self._taken[payer] > 0

    def full(self, payer: str) -> bool:
        """Whether a tenant has taken all of its own room, whatever others have."""
        with self._lock:
            return self._taken[payer] >= self.most_of_one

    def fits(self, payer: str, size: int) -> bool:
        """Whether there is room."""
        most = self.most_of_one if payer else self._most // _NOBODYS_PART
        with self._lock:
            return self._taken[payer] + size <= most and self._total + size <= self._most
