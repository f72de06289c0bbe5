"""How preparations of other people's jobs share a host: one works at a time, in slices, within limits on time and space.

with Pace(room, seconds).kept(charge):     # in the thread that prepares
    ...                                    # whatever reads rows calls `step` for each
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from motet.core.errors import DataError
from motet.process import cpu_time

SLICE_SECONDS = 0.25
"""After this time, others that wait go first."""
MOST_SECONDS = 600.0
"""CPU time that the rows of one job may take to prepare."""


class _InOrder:
    """A lock that those who wait for it get in the order in which they came."""

    def __init__(self) -> None:
        self._moved, self.came, self._turn = threading.Condition(), 0, 1

    def __enter__(self) -> None:
        with self._moved:
            self.came = mine = self.came + 1
            self._moved.wait_for(lambda: self._turn == mine)

    def __exit__(self, *_: object) -> None:
        with self._moved:
            self._turn += 1
            self._moved.notify_all()


_WORKING = _InOrder()
"""Held by the preparation that works: more at once would hold up the event loop."""


class Pace:
    """The pace of one preparation. Use it in one thread."""

    def __init__(self, room: float = math.inf, seconds: float = MOST_SECONDS) -> None:
        """`room` is in bytes, `seconds` in CPU time."""
        self._room, self._seconds, self._bytes = room, seconds, 0
        self._begun = self._since = 0.0

    @contextlib.contextmanager
    def kept(self, charge: Callable[[float], None] = lambda seconds: None) -> Iterator[None]:
        """Keep this pace in the block; `charge` is told its CPU seconds, with those of processes that read for it."""
        with _WORKING, cpu_time.counted(charge):
            before, self._begun, self._since = _PACE.set(self), time.thread_time(), time.monotonic()
            try:
                yield
            finally:
                _PACE.reset(before)

    def step(self, size: int) -> None:
        """Count a row, and `size` bytes that are kept. Raises DataError above a limit."""
        self._bytes += size
        if self._bytes > self._room:
            raise DataError(
                f"storage_mb: the rows of this job take more than the {self._room / 2**20:.1f} MB that this tenant may still "
                "store; set data.size to use fewer, delete files, adapters, checkpoints or jobs that have ended, or let an "
                "admin raise it with motet tenants limit --storage-mb"
            )
        if time.thread_time() - self._begun > self._seconds:
            raise DataError(
                f"the rows of this job take more than {self._seconds:g} s of the processor to prepare, the limit here; set "
                "data.size to use fewer, or shorten them"
            )
        if time.monotonic() - self._since > SLICE_SECONDS:
            _WORKING.__exit__()
            _WORKING.__enter__()
            self._since = time.monotonic()


_PACE: ContextVar[Pace | None] = ContextVar("motet.pace", default=None)


def step(size: int = 0) -> None:
    """`Pace.step`, where a preparation has one."""
    if (pace := _PACE.get()) is not None:
        pace.step(size)
