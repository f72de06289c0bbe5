"""Few of those who were woken together go on in one turn of the event loop; whoever is refused far too often waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque

_LATE_SECONDS, _LATE_PER_SECOND = 1.0, 200.0
"""How long a request of a flood waits at least, and how many of one party go on in a second."""
_LATE_AT_ONCE, _MOST_FLOODS = 4, 10_000
"""How many that have waited go on in one turn of the event loop, and how many parties are remembered."""


class Turns:
    """Lets a few through in one turn of the event loop; the others wait in line. Use in one event loop."""

    def __init__(self, most: int) -> None:
        self._most = self._room = most
        self._waiting = deque[asyncio.Future[None]]()

    async def enter(self) -> None:
        """Wait for a place in a turn."""
        loop = asyncio.get_running_loop()
        if self._room == self._most:
            loop.call_soon(self._next)
        if self._room > 0:
            self._room -= 1
            return
        self._waiting.append(place := loop.create_future())
        await place

    def _next(self) -> None:
        self._room = self._most
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        while self._waiting and self._room > 0:
            if not (place := self._waiting.popleft()).done():  # its request was not cancelled
                place.set_result(None)
                self._room -= 1


class Floods:
    """Tenants and addresses whose requests wait before they begin. Use in one event loop."""

    def __init__(self) -> None:
        self._until = OrderedDict[str, float]()
        """By whose they are, the oldest first."""
        self._waiting = Counter[str]()
        self._turns = Turns(_LATE_AT_ONCE)

    def add(self, whose: str) -> None:
        """Let the requests of a second wait."""
        self._until.pop(whose, None)
        self._until[whose] = time.monotonic() + _LATE_SECONDS
        if len(self._until) > _MOST_FLOODS:
            self._until.popitem(last=False)

    def floods(self, whose: str) -> bool:
        """Whether the requests of a tenant or an address wait."""
        return self._until.get(whose, 0.0) > time.monotonic()

    async def wait(self, whose: str, gone: asyncio.Event) -> None:
        """Wait, but not for longer than the client."""
        self._waiting[whose] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(_LATE_SECONDS, self._waiting[whose] / _LATE_PER_SECOND)):
                    await gone.wait()
            await self._turns.enter()
        finally:
            self._waiting[whose] -= 1
            if not self._waiting[whose]:
                del self._waiting[whose]
