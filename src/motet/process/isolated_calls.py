"""Calls a function in a separate process, with limits: it gets bytes and returns bytes.

`IsolatedPool` keeps processes behind the wall, in which tenants take turns. `call` and `read_lines` start a process for one
call, which may read and write the files that they name. A process is killed if it exceeds its time or memory, or if nobody
waits for the result, and ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from typing import Any

from motet.core.errors import EngineError, MotetError
from motet.process import ending, wall
from motet.process.child import ChildProcess
from motet.process.isolated_process import CRASHED, FAULT, NO_MEMORY, WorkLimits, read_frame, write_frame
from motet.process.thread_turns import QueuedWork, ThreadTurns

_log = logging.getLogger(__name__)
_MODULE = "motet.process.isolated_process"
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP, signal.SIGILL})
"""Signals by which compiled code ends its process, usually because it got no memory."""


class TooMuchError(MotetError):
    """A piece of work exceeded its time or memory; the message says which."""

    def __init__(self, message: str, *, by_clock: bool = False) -> None:
        """`by_clock`: the machine may have been busy, and the same work may fit later."""
        super().__init__(message)
        self.by_clock = by_clock


def call(function: Callable[[bytes], bytes], given: bytes, limits: WorkLimits) -> bytes:
    """Call a module's function in a process of its own, and wait for the answer in this thread.

    Raises:
        TooMuchError: it exceeded its time or memory.
        EngineError: its process ended for another reason.
        RuntimeError: it raised an exception, whose traceback is logged.
    """
    with contextlib.closing(_Process(replace(limits, module=function.__module__))) as process:
        return process.call(_name(function), given, limits.memory_mb)[0]


def read_lines(
    function: Callable[[bytes], Iterator[bytes]], given: bytes, limits: WorkLimits, longest: int
) -> Generator[bytes]:
    """Yield the lines that a function writes in a process of its own; a line of more than `longest` bytes comes in pieces.

    Raises:
        TooMuchError: it exceeded its time or memory.
        EngineError: its process ended for another reason, such as an exception.
    """
    with contextlib.closing(_Process(replace(limits, module=function.__module__))) as process:
        yield from process.lines(_name(function), given, longest)


class IsolatedPool(ThreadTurns):
    """Processes behind the wall, one for each thread, started when there is work for them."""

    def __init__(
        self, limits: WorkLimits | None = None, processes: int = 2, waiting: int = 32,
        charge: Callable[[str, float], object] = lambda key, seconds: None,
    ) -> None:  # fmt: skip
        """`waiting` as for `ThreadTurns`; `charge` gets the CPU seconds of each piece of work, by key, in any thread."""
        self.limits, self._charge = limits or WorkLimits(), charge
        super().__init__(processes, waiting, "motet-isolated")
        self._here = threading.local()
        self._processes: set[_Process] = set()
        _ALL.add(self)

    async def call(
        self, key: str, function: Callable[[bytes], bytes], given: bytes, memory_mb: int | None = None
    ) -> bytes:
        """Call a module's function in the turn of `key`; `memory_mb` lowers the memory limit.

        Raises:
            LimitError: too many requests of this key are waiting.
            TooMuchError, EngineError, RuntimeError: as the function `call`.
        """
        most = min(memory_mb or self.limits.memory_mb, self.limits.memory_mb)
        answer: bytes = await self._run(key, lambda work: self._called(work, _name(function), given, most))
        return answer

    def close(self) -> None:
        """Start no further work, and end the processes."""
        super().close()
        for process in list(self._processes):
            process.kill()

    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in list(self._processes)]

    def _called(self, work: QueuedWork, name: str, given: bytes, memory_mb: int) -> bytes:
        process: _Process | None = getattr(self._here, "process", None)
        if process is None or not process.alive:
            self._leave()
            process = self._here.process = _Process(self.limits)
            self._processes.add(process)
        work.end, began = process.kill, time.monotonic()
        spent = None
        try:
            if work.abandoned or self._closed:
                process.kill()
            answer, spent = process.call(name, given, memory_mb)
            return answer
        finally:
            work.end = None
            self._charge(work.key, min(self.limits.seconds, time.monotonic() - began) if spent is None else spent)
            if work.abandoned or not process.alive:
                self._leave()

    def _leave(self) -> None:
        process: _Process | None = getattr(self._here, "process", None)
        if process is not None:
            self._here.process = None
            self._processes.discard(process)
            process.close()


_ALL: weakref.WeakSet[IsolatedPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_ALL):
        pool.close()


@functools.cache
def here() -> IsolatedPool:
    """The default pool of a process."""
    return IsolatedPool()


class _Process(ChildProcess):
    """The parent's end of one process. Calls go one at a time; `kill` may come from any thread."""

    def __init__(self, limits: WorkLimits) -> None:
        self._limits, self._late = limits, False
        variables = {"MALLOC_ARENA_MAX": "2", "PYTHONWARNINGS": "ignore", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        environment = wall.environment(**variables) if limits.walled else None
        super().__init__(wall.command(_MODULE, str(os.getpid()), json.dumps(asdict(limits))), env=environment)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.poll() is None

    def call(self, name: str, given: bytes, memory_mb: int) -> tuple[bytes, float]:
        """Do one piece of work; returns its answer and CPU seconds."""
        with self._limited(memory_mb):
            write_frame(self.stdin, len(name.encode()), memory_mb, name.encode() + given)
            status, milliseconds, answer = read_frame(self.stdout)
        if status == FAULT:
            _log.warning("%s failed:\n%s", name, self.printed()[-2000:])
            raise RuntimeError(answer.decode())
        return answer, milliseconds / 1000

    def lines(self, name: str, given: bytes, longest: int) -> Generator[bytes]:
        """Do one piece of work that writes lines."""
        with self._limited(memory_mb := self._limits.memory_mb):
            write_frame(self.stdin, len(name.encode()), memory_mb, name.encode() + given)
            while (line := self.stdout.readline(longest)) and (line.endswith(b"\n") or len(line) >= longest):
                yield line
            if self.hang_up(ending.EXIT_SECONDS) != 0:  # it may have been killed while it wrote
                raise EOFError

    @contextlib.contextmanager
    def _limited(self, memory_mb: int) -> Iterator[None]:
        """Limit work by the clock, and raise the error of a process that ends in it."""
        timer = threading.Timer(self._limits.wall_seconds, self._be_late)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, EOFError):
            raise self._error(memory_mb) from None
        finally:
            timer.cancel()

    def _be_late(self) -> None:
        self._late = True
        self.kill()

    def _error(self, memory_mb: int) -> MotetError:
        how = self.how_it_ended()
        if self._late:
            return TooMuchError(f"it takes more than {self._limits.wall_seconds:g} s by the clock", by_clock=True)
        if self.returncode == -signal.SIGXCPU:
            return TooMuchError(f"it takes more than {self._limits.seconds:g} s of the processor")
        if self.returncode == NO_MEMORY:
            return TooMuchError(f"it takes more than {memory_mb} MB of memory")
        if self.returncode == CRASHED or -self.returncode in _CRASHES:
            return TooMuchError(f"it takes more than {memory_mb} MB of memory, or cannot be done at all")
        if not self._stopped:
            _log.warning("the process for a piece of work %s:\n%s", how, self.printed()[-2000:])
        return EngineError(f"the process for this work {how}")


def _name(function: Callable[[bytes], Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"
