"""Work that is done again and again for as long as the service runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


async def every(seconds: float, work: Callable[[], object]) -> None:
    """Do a piece of work in a thread every so many seconds, until cancelled.

    Whatever it raises is logged, and it is tried again: the next time may succeed.
    """
    while True:
        await asyncio.sleep(seconds)
        try:
            await asyncio.to_thread(work)
        except Exception:
            _log.exception("%s failed", getattr(work, "__qualname__", work))
