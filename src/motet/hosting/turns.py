"""A lock that goes around among tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class PreparationTurns:
    """One holder at a time. A tenant with many waiters gets one turn, then each other tenant that waits gets one."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant; the first tenant is the next one."""

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold the lock while the block runs."""
        if self._held:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._pass_on()
                raise
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, waiters = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            first = waiters.popleft()
            if waiters:
                self._waiting[tenant] = waiters  # behind the others
            if not first.cancelled():
                first.set_result(None)
                return
        self._held = False
