"""Runs expensive or unbounded work: tenants take turns, and each piece of work has limits.

`ThreadTurns` is a pool of threads. `Apart` gives each of its threads a process behind the wall: a function there gets
bytes and returns bytes. The process is killed if it exceeds its time or memory, or if nobody waits for the result.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from motet.core.errors import EngineError, LimitError, MotetError
from motet.process import ending, wall
from motet.process.apart_process import CRASHED, FAULT, NO_MEMORY, read_frame, write_frame

Result = TypeVar("Result")
_IDLE_SECONDS = 60.0
"""Idle time after which a process ends, to free its memory."""
_MODULE = "motet.process.apart_process"
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP, signal.SIGILL})
"""Signals by which compiled code ends its process, usually because it got no memory."""


class TooMuchError(MotetError):
    """A piece of work exceeded its time or memory; the message says which."""

    def __init__(self, message: str, *, by_clock: bool = False) -> None:
        """`by_clock`: the machine may have been busy, and the same work may fit later."""
        super().__init__(message)
        self.by_clock = by_clock


class _Work:
    """One piece of work: waiting, running or done."""

    def __init__(self, key: str, work: Callable[[_Work], Any]) -> None:
        self.key, self.work = key, work
        self.future: Future[Any] = Future()
        self.abandoned = False
        self.end: Callable[[], None] | None = None
        """Stops running work, if possible."""

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
        self._queues: OrderedDict[str, deque[_Work]] = OrderedDict()
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
        self._put(_Work(key, lambda _: work()))

    async def _run(self, key: str, work: Callable[[_Work], Any]) -> Any:
        one = _Work(key, work)
        self._put(one)
        try:
            return await asyncio.wrap_future(one.future)
        except asyncio.CancelledError:
            one.abandon()
            raise

    def close(self) -> None:
        """Start no further work; waiting work is cancelled."""
        with self._changed:
            self._closed = True
            left = [one for queue in self._queues.values() for one in queue]
            self._queues.clear()
            self._changed.notify_all()
        for one in left:
            one.future.cancel()

    def _put(self, one: _Work) -> None:
        with self._changed:
            queue = deque(other for other in self._queues.get(one.key, ()) if not other.abandoned)
            if len(queue) >= self._waiting:
                raise LimitError(
                    f"{self._waiting} of your requests wait for such work already, which is the limit; try again in a moment",
                    429, 1,
                )  # fmt: skip
            queue.append(one)
            waits = one.key in self._queues or one.key in self._busy
            self._queues[one.key] = queue
            if waits:  # the thread that does this key's work before it takes this too
                return
            if self._idle < len(self._queues.keys() - self._busy) and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._changed.notify()

    def _work(self) -> None:
        """The loop of one thread."""
        try:
            while (one := self._next()) is not None:
                try:
                    if one.future.set_running_or_notify_cancel():
                        _settle(one)
                finally:
                    with self._changed:
                        self._busy.discard(one.key)  # this thread takes the next piece, so it wakes no other
                del one  # all that its work holds
        finally:
            self._leave()

    def _next(self) -> _Work | None:
        """The next piece of work; None if there was none for a while."""
        until = time.monotonic() + _IDLE_SECONDS
        with self._changed:
            while True:
                if (one := self._take()) is not None:
                    return one
                left = until - time.monotonic()
                if self._closed or left <= 0:
                    self._threads -= 1
                    return None
                self._idle += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._idle -= 1

    def _take(self) -> _Work | None:
        for key, queue in list(self._queues.items()):
            if key in self._busy:
                continue
            one = queue.popleft()
            del self._queues[key]
            if queue:
                self._queues[key] = queue  # behind all others
            self._busy.add(key)
            return one
        return None

    def _leave(self) -> None:
        """Record that a thread has ended."""


def _settle(one: _Work) -> None:
    try:
        one.future.set_result(one.work(one))
    except BaseException as error:
        one.future.set_exception(error)


# --- processes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkLimits:
    """Limits of work in separate processes."""

    processes: int = 2
    waiting: int = 32
    """Pieces of work of one key that may wait."""
    seconds: float = 5.0
    """CPU time for one piece of work."""
    memory_mb: int = 1024
    """Per process: address space beyond its size at the start."""

    @property
    def wall_seconds(self) -> float:
        """Wall-clock time for one piece of work: many times its CPU time, because the machine may be busy."""
        return 12 * self.seconds


class Apart(ThreadTurns):
    """Processes behind the wall, one for each thread, started when there is work for them."""

    def __init__(
        self, bounds: WorkLimits | None = None, charge: Callable[[str, float], object] = lambda key, seconds: None
    ) -> None:
        """`charge` is told the CPU seconds of each piece of work, by key, in any thread."""
        self.bounds, self._charge = bounds or WorkLimits(), charge
        super().__init__(self.bounds.processes, self.bounds.waiting, "motet-apart")
        self._here = threading.local()
        self._processes: set[_Process] = set()
        _ALL.add(self)

    async def call(
        self, key: str, function: Callable[[bytes], bytes], given: bytes, memory_mb: int | None = None
    ) -> bytes:
        """Call a module's function with bytes in a separate process; `memory_mb` lowers the memory limit.

        Raises:
            LimitError: too many requests of this key are waiting.
            TooMuchError: it exceeded its time or memory.
        EngineError: its process ended for another reason.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        most = min(memory_mb or self.bounds.memory_mb, self.bounds.memory_mb)
        answer: bytes = await self._run(key, lambda one: self._called(one, key, name, given, most))
        return answer

    def close(self) -> None:
        """Start no further work, and end the processes."""
        super().close()
        for process in list(self._processes):
            process.kill()

    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in list(self._processes)]

    def _called(self, one: _Work, key: str, name: str, given: bytes, memory_mb: int) -> bytes:
        process: _Process | None = getattr(self._here, "process", None)
        if process is None or not process.alive:
            self._leave()
            process = self._here.process = _Process(self.bounds)
            self._processes.add(process)
        one.end, began = process.kill, time.monotonic()
        spent = None
        try:
            if one.abandoned or self._closed:
                process.kill()
            answer, spent = process.call(name, given, memory_mb)
            return answer
        finally:
            one.end = None
            self._charge(key, min(self.bounds.seconds, time.monotonic() - began) if spent is None else spent)
            if one.abandoned or not process.alive:
                self._leave()

    def _leave(self) -> None:
        process: _Process | None = getattr(self._here, "process", None)
        if process is not None:
            self._here.process = None
            self._processes.discard(process)
            process.close()


_ALL: weakref.WeakSet[Apart] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for one in list(_ALL):
        one.close()


@functools.cache
def here() -> Apart:
    """The default `Apart` of a process."""
    return Apart()


class _Process:
    """The parent's end of one process. Calls go one at a time; `kill` may come from any thread."""

    def __init__(self, bounds: WorkLimits) -> None:
        self._bounds, self._late, self._stopped = bounds, False, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until the process has begun; open as long as it
        self._child = subprocess.Popen(
            wall.command(_MODULE, str(os.getpid()), str(bounds.memory_mb), str(bounds.seconds)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=wall.environment(MALLOC_ARENA_MAX="2"), start_new_session=True,  # Ctrl-C does not reach it
        )  # fmt: skip
        self.pid = self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._child.poll() is None

    def call(self, name: str, given: bytes, memory_mb: int) -> tuple[bytes, float]:
        """Do one piece of work; returns its answer and CPU seconds. Raises as `Apart.call` does."""
        timer = threading.Timer(self._bounds.wall_seconds, self._be_late)
        timer.daemon = True
        timer.start()
        try:
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            write_frame(self._child.stdin, len(name.encode()), memory_mb, name.encode() + given)
            status, milliseconds, answer = read_frame(self._child.stdout)
        except (OSError, EOFError):
            raise self._how_it_ended(memory_mb) from None
        finally:
            timer.cancel()
        if status == FAULT:
            raise RuntimeError(answer.decode())
        return answer, milliseconds / 1000

    def kill(self) -> None:
        """Kill the process at once."""
        self._stopped = self._stopped or self._child.poll() is None
        self._child.kill()

    def close(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._child.wait()
        self._errors.close()

    def _be_late(self) -> None:
        self._late = True
        self.kill()

    def _how_it_ended(self, memory_mb: int) -> MotetError:
        try:
            status = self._child.wait(ending.EXIT_SECONDS)  # its output ends before it does
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._child.wait()
        if self._late:
            return TooMuchError(f"it takes more than {self._bounds.wall_seconds:g} s by the clock", by_clock=True)
        if status == -signal.SIGXCPU:
            return TooMuchError(f"it takes more than {self._bounds.seconds:g} s of the processor")
        if status == NO_MEMORY:
            return TooMuchError(f"it takes more than {memory_mb} MB of memory")
        if status == CRASHED or -status in _CRASHES:
            return TooMuchError(f"it takes more than {memory_mb} MB of memory, or cannot be done at all")
        self._errors.seek(0)
        said = ending.last_line(self._errors.read(2**16).decode(errors="replace"))
        how = ending.how_it_ended(status, stopped=self._stopped, hint=f": {said}")
        return EngineError(f"the process for this work {how}")
