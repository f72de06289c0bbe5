"""How preparations of other people's jobs share a host: in slices of time, within limits on time and space.

with Pace(give_way, room, seconds).kept():     # in the thread that prepares
    ...                                         # whatever reads rows calls `step` for each
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from motet.core.errors import DataError
from motet.process import cpu_time

SLICE_SECONDS = 0.25
"""After this time, others that wait go first."""
MOST_SECONDS = 600.0
"""CPU time that the rows of one job may take to prepare."""


class Pace:
    """The pace of one preparation. Use it in one thread."""

    def __init__(
        self, give_way: Callable[[], None] = lambda: None, room: float = math.inf, seconds: float = MOST_SECONDS
    ) -> None:
        """`give_way` returns when it is this one's turn again; `room` is in bytes, `seconds` in CPU time."""
        self._give_way, self._room, self._seconds = give_way, room, seconds
        self._begun, self._since = time.thread_time(), time.monotonic()
        self._bytes, self._others = 0, (0.0, math.inf)
        self.used = 0.0
        """CPU seconds of this thread, and of the processes that read for it, at its end."""

    @property
    def away(self) -> float:
        """Seconds in which others had their turn, until now; other threads may ask."""
        before, since = self._others
        return before + max(0.0, time.monotonic() - since)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep this pace in the block."""
        before, self._begun = _PACE.set(self), time.thread_time()
        try:
            with cpu_time.counted(functools.partial(setattr, self, "used")):
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
        if (now := time.monotonic()) - self._since > SLICE_SECONDS:
            self._others = self.away, now
            self._give_way()
            self._others = self.away, math.inf
            self._since = time.monotonic()


_PACE: ContextVar[Pace | None] = ContextVar("motet.pace", default=None)


def current() -> Pace | None:
    """The pace of the preparation that runs in this thread, if any."""
    return _PACE.get()


def step(size: int = 0) -> None:
    """`Pace.step`, where a preparation has one."""
    if (pace := current()) is not None:
        pace.step(size)
