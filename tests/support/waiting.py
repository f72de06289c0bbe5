"""Wait until something is true that other tasks, threads or processes bring about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any

PATIENCE = 240.0
"""Seconds until a test gives up; no measure of speed, as a shared machine may be busy."""


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Let other tasks run until it is."""
    rest = 0.0005
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(rest)
            rest = min(1.2 * rest, 0.01)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE, process: Popen[Any] | None = None) -> None:
    """Let other threads and processes run until it is; a `process` that is named must not end before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(0.02)
