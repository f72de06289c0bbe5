"""A pool of threads for work that may take long: tenants take turns, and each has at most one running piece of work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from motet.core.errors import LimitError

Result = TypeVar("Result")
_IDLE_SECONDS = 60.0
"""Idle time after which a thread ends, and with it the process that it has."""


class QueuedWork:
    """One piece of work: waiting, running or done."""

    def __init__(self, key: str, call: Callable[[QueuedWork], Any]) -> None:
        self.key, self.call = key, call
        self.future: Future[Any] = Future()
        self.abandoned = False
        self.end: Callable[[], None] | None = None
        """Stops running work, if possible."""

    def settle(self) -> None:
        """Do it."""
        try:
            self.future.set_result(self.call(self))
        except BaseException as error:
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Cancel work that nobody waits for."""
        self.abandoned = True
        if not self.future.cancel() and (end := self.end) is not None:
            end()


class ThreadTurns:
    """A pool of threads. Keys take turns, and each key has at most one running piece of work."""

    def __init__(self, threads: int, waiting: int, name: str = "motet-turns") -> None:
        """`waiting`: most pieces of work of one key that may wait."""
        self._most, self._waiting, self._name = threads, waiting, name
        self._queues: OrderedDict[str, deque[QueuedWork]] = OrderedDict()
        """Waiting work by key; the key whose turn is next comes first."""
        self._busy: set[str] = set()
        self._changed = threading.Condition()
        self._threads, self._idle, self._closed = 0, 0, False

    async def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Do work in a thread when this key's turn comes. Raises LimitError if too much of the key's waits already."""
        result: Result = await self._run(key, lambda _: work())
        return result

    def begin(self, key: str, work: Callable[[], object]) -> None:
        """`run` for work whose end nobody waits for; it must not raise."""
        self._put(QueuedWork(key, lambda _: work()))

    async def _run(self, key: str, call: Callable[[QueuedWork], Any]) -> Any:
        work = QueuedWork(key, call)
        self._put(work)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            work.abandon()
            raise

    def close(self) -> None:
        """Start no further work; waiting work is cancelled."""
        with self._changed:
            self._closed = True
            left = [work for queue in self._queues.values() for work in queue]
            self._queues.clear()
            self._changed.notify_all()
        for work in left:
            work.future.cancel()

    def _put(self, work: QueuedWork) -> None:
        with self._changed:
            queue = deque(other for other in self._queues.get(work.key, ()) if not other.abandoned)
            if len(queue) >= self._waiting:
                raise LimitError(
                    f"{self._waiting} of your requests wait for such work already, which is the limit; try again in a moment",
                    429, 1,
                )  # fmt: skip
            queue.append(work)
            waits = work.key in self._queues or work.key in self._busy
            self._queues[work.key] = queue
            if waits:  # the thread that does this key's work before it takes this too
                return
            if self._idle < len(self._queues.keys() - self._busy) and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        """The loop of one thread."""
        try:
            while (work := self._next()) is not None:
                try:
                    if work.future.set_running_or_notify_cancel():
                        work.settle()
                finally:
                    with self._changed:
                        self._busy.discard(work.key)  # this thread takes the next piece, so it wakes no other
                del work  # all that its work holds
        finally:
            self._leave()

    def _next(self) -> QueuedWork | None:
        """The next piece of work; None if there was none for a while."""
        until = time.monotonic() + _IDLE_SECONDS
        with self._changed:
            while True:
                if (work := self._take()) is not None:
                    return work
                left = until - time.monotonic()
                if self._closed or left <= 0:
                    self._threads -= 1
                    return None
                self._idle += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._idle -= 1

    def _take(self) -> QueuedWork | None:
        for key, queue in list(self._queues.items()):
            if key in self._busy:
                continue
            work = queue.popleft()
            del self._queues[key]
            if queue:
                self._queues[key] = queue  # behind all others
            self._busy.add(key)
            return work
        return None

    def _leave(self) -> None:
        """Record that a thread has ended."""
