"""Tenants take turns at starting jobs, because reading data, starting processes and taking a slot are not device time.

While other tenants' jobs run, a tenant's starts take no more of the time than its share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakValueDictionary

MOST_PREPARING = 16
"""Preparations that have begun; one of them works, the others have given way."""
MOST_REST = 10.0
"""Longest wait of a tenant after a start, in seconds."""

_LOOKS = 0.5
"""Seconds between checks during a wait."""


class PreparingTurn:
    """The turn of one preparation."""

    def __init__(self, lock: asyncio.Lock, clock: Callable[[], float]) -> None:
        self._lock, self._clock = lock, clock
        self.away = 0.0
        """Seconds in which others had their turn."""

    async def give_way(self) -> None:
        """Let the tenants that wait go first, in the middle of a preparation."""
        begun = self._clock()
        self._lock.release()
        await self._lock.acquire()
        self.away += self._clock() - begun


class StartTurns:
    """Prepares one job at a time, and opens one per tenant at a time. Use it in one event loop.

    A tenant with many jobs to prepare gets one turn, then each other waiting tenant gets one. Starts are `free` for jobs
    that had a slot when their host ended: nobody asked for them, so their tenants neither wait nor rest. They do not wait
    for their tenant's other jobs either, only for each other.
    """

    def __init__(
        self,
        others: Callable[[str], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`others` returns the shares of other tenants with running jobs, divided by the tenant's own."""
        self._others, self._clock, self._sleep = others, clock, sleep
        self._preparing, self._begun = asyncio.Lock(), asyncio.Semaphore(MOST_PREPARING)
        self._locks: WeakValueDictionary[tuple[str, str, bool], asyncio.Lock] = WeakValueDictionary()
        self._rests: dict[str, float] = {}
        """When each tenant may start its next job."""

    @contextlib.asynccontextmanager
    async def preparing(self, tenant: str, *, free: bool = False) -> AsyncIterator[PreparingTurn]:
        """Wait for the turn to prepare a job, and hold it during the block, which may give way."""
        turn = PreparingTurn(self._preparing, self._clock)
        async with self._lock(
            "prepare", tenant, free
        ):  # one job per tenant waits for the next lock, so tenants alternate
            if not free:
                await self._rest(tenant)
            async with self._begun, self._preparing, contextlib.nullcontext() if free else self._charged(tenant, turn):
                yield turn

    @contextlib.asynccontextmanager
    async def opening(
        self, tenant: str, gives_up: Callable[[], bool] = lambda: False, *, free: bool = False
    ) -> AsyncIterator[bool]:
        """Wait for the turn to open a job, and hold it during the block; without a tenant there is no wait.

        Yields whether it is the job's turn; False after `gives_up` returned True.
        """
        if not tenant:
            yield True
            return
        lock = self._lock("open", tenant, free)
        turn = asyncio.ensure_future(lock.acquire())
        try:
            while not turn.done() and not gives_up():
                await asyncio.wait({turn}, timeout=_LOOKS)
            if turn.done() and not free:
                await self._rest(tenant, gives_up)
            if not turn.done() or gives_up():
                yield False
                return
            async with contextlib.nullcontext() if free else self._charged(tenant):
                yield True
        finally:
            if not turn.cancel() and not turn.cancelled():
                lock.release()

    def _lock(self, what: str, tenant: str, free: bool) -> asyncio.Lock:
        return self._locks.setdefault((what, tenant, free), asyncio.Lock())

    async def _rest(self, tenant: str, gives_up: Callable[[], bool] = lambda: False) -> None:
        while self._others(tenant) and (left := self._rests.get(tenant, 0.0) - self._clock()) > 0 and not gives_up():
            await self._sleep(min(left, _LOOKS))  # the others may end meanwhile

    @contextlib.asynccontextmanager
    async def _charged(self, tenant: str, turn: PreparingTurn | None = None) -> AsyncIterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            now, away = self._clock(), 0.0 if turn is None else turn.away
            rest = (now - begun - away) * self._others(tenant)
            self._rests = {name: until for name, until in self._rests.items() if until > now}
            self._rests[tenant] = min(max(now, self._rests.get(tenant, now)) + rest, now + MOST_REST)
