"""How much one key may take of the service: requests a second, and threads for work that takes long."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from motet.config.service import RateConfig

Result = TypeVar("Result")
_MOST_KEYS = 10_000
_THREADS = 2


class RateLimit:
    """A bucket of requests for each key, which fills as time goes by. In memory: a service that starts has full ones."""

    def __init__(self, config: RateConfig | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a configuration, nothing is limited."""
        self._config, self._clock = config, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests left, when that was) by key; those not asked for longest are dropped first."""
        self._lock = threading.Lock()

    @property
    def requests_per_second(self) -> float | None:
        """Of one key; None without a limit."""
        return None if self._config is None else self._config.requests_per_second

    def wait(self, key: str) -> int:
        """Take a request out of a key's bucket: 0 where it may go, else whole seconds to wait before it is asked again."""
        rate = self.requests_per_second
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


class KeyedThreads:
    """Two threads that do one piece of work of a key after another: a key that asks for much waits for itself.

    Lives in one event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "motet-requests")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Do a piece of work when it is this key's turn."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Begin no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckThreads(KeyedThreads):
    """For checks of jobs."""


class ReadThreads(KeyedThreads):
    """For files of rows, which may take minutes."""
