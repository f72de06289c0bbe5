"""Few requests begin, and few answers are sent, in one turn of the event loop, however many come at the same moment."""

from __future__ import annotations

import asyncio
from collections import deque


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
