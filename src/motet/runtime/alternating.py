"""Tenants alternate: one piece of work at a time, and nobody's second piece comes before another's first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary


class Alternating:
    """A lock that goes from tenant to tenant. Use it in one event loop."""

    def __init__(self) -> None:
        self._now = asyncio.Lock()
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a tenant's turn, and hold it during the block."""
        # one piece of work of each tenant waits for the second lock, which is given in order
        async with self._own.setdefault(tenant, asyncio.Lock()), self._now:
            yield
