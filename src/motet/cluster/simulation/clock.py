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
    """Run work whose sleeps take no time; `loop.time()` begins at 0. It ends with the first error of a callback, too."""
    selector, failures = _Instant(), list[BaseException]()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]

    async def watched() -> Result:
        working = asyncio.ensure_future(work)

        def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failures.append(context.get("exception") or RuntimeError(context["message"]))
            working.cancel()

        loop.set_exception_handler(fail)
        await asyncio.wait([working])
        if failures:
            raise failures[0]
        return working.result()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(watched())


def now() -> float:
    """Virtual seconds since the loop was made."""
    return asyncio.get_running_loop().time()
