"""Who may have the interpreter for a while: work that takes long for one request is done for few of them at a time.

It runs in threads of its own, one request of a key after another, so that a key that asks for much waits for itself, and
whoever asks for little is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
_AT_ONCE = 2


class Turns:
    """Lives in one event loop."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._threads = ThreadPoolExecutor(_AT_ONCE, "motet-turns")
        self._gates: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Do a piece of work when it is this key's turn."""
        gate = self._gates.setdefault(key, asyncio.Lock())
        async with gate:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Begin no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
