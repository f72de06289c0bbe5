"""An event loop whose sleeps take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Instant(selectors.DefaultSelector):
    """A selector that returns at once and moves the virtual clock by the time that it should have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self.now += timeout
            return []
        return [] if timeout == 0 else super().select(timeout)


def under_virtual_clock(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work whose sleeps take no time; `loop.time()` begins at 0."""
    selector = _Instant()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)


def now() -> float:
    """Virtual seconds since the loop was made."""
    return asyncio.get_running_loop().time()
