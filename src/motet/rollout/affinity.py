"""Which servers a job's versions go to: so many that all servers have work, those with the fewest other jobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence


class Homes:
    """The homes of each adapter: found again at each publish, so that they spread as adapters and servers come and go."""

    def __init__(self) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._adapters: Counter[str] = Counter()
        """By URL: how many adapters are at home there."""

    def find(self, adapter: str, urls: Sequence[str], away: Container[str] = ()) -> frozenset[str]:
        """Those of these servers where the next version of an adapter is at home.

        Fewer adapters than servers share the servers out among them; of more, each has one. Servers that are away come last,
        and are handed the version when they are back.
        """
        before = self._of.get(adapter, frozenset())
        self.leave(adapter)
        count = math.ceil(len(urls) / (len(self._of) + 1))
        ranked = sorted(urls, key=lambda url: (url in away, self._adapters[url], url not in before))
        homes = self._of[adapter] = frozenset(ranked[:count])
        self._adapters.update(homes)
        return homes

    def leave(self, adapter: str) -> None:
        """An adapter has no version any more."""
        self._adapters.subtract(self._of.pop(adapter, ()))
