"""How often somebody may ask: a bucket of requests for each key, which fills as time goes by."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from motet.config.service import RateConfig

_MOST_KEYS = 10_000


class RateLimit:
    """Buckets in memory: a service that starts begins with full ones."""

    def __init__(self, config: RateConfig | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a configuration, nothing is limited."""
        self._config, self._clock = config, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests left, when that was) by key; those not asked for longest are dropped first."""
        self._lock = threading.Lock()

    def wait(self, key: str) -> int:
        """Take a request out of a key's bucket: 0 where it may go, else whole seconds to wait before it is asked again."""
        rate = None if self._config is None else self._config.requests_per_second
        if self._config is None or rate is None:
            return 0
        with self._lock:
            now = self._clock()
            left, then = self._buckets.pop(key, (float(self._config.burst), now))
            left = min(float(self._config.burst), left + (now - then) * rate)
            goes = left >= 1
            self._buckets[key] = (left - goes, now)
            if len(self._buckets) > _MOST_KEYS:
                self._buckets.popitem(last=False)
        return 0 if goes else math.ceil((1 - left) / rate)
