"""Room for what is open at a time: questions to judges, rows whose answers are graded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator


class Room:
    """Limits the size of what is open at a time, first come, first served; something larger than that is open alone.

    The smallest of the limits counts that those who are let in or wait have given.
    """

    def __init__(self) -> None:
        self._limits, self._taken = Counter[int](), 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, size: int, most: int) -> AsyncIterator[None]:
        """Wait until there is room within the limit `most`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._limits[most] += 1
        self._waiting.append((size, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():  # a task may be cancelled after it was let in
                self._taken -= size
            self._limits -= Counter([most])
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if self._taken and self._taken + size > min(self._limits):
                    break
                turn.set_result(None)
                self._taken += size
            self._waiting.popleft()
