"""Signs of life of a process, from a thread of its own: a busy event loop, or a long turn of a device, is no silence.

Seconds are counted by those who wait, and not read from a clock, so that a pause of the whole machine is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from motet.process.channel import Alive

SILENT = 9
"""Seconds without a sign of life, or in which the process's event loop does not turn, after which it is ended."""
BEAT_SECONDS = 1.0
LONG_SILENT = 120
"""As `SILENT`, until the process is ready: what it loads may hold the interpreter, and so its signs, for long.

As well for signs that come over a network, which may be away for a while.
"""
NO_MEMORY = "the engine was ended for want of memory"
_WORKED_SECONDS, _LONGEST_WAIT = 60.0, 60.0
_OF = "of job "
_JOB: ContextVar[str] = ContextVar("motet.job", default="")
_IDLE_SHARE = 0.01
"""Of a second: a thread that computes gets more, also beside many others."""


def works_for(job: str) -> None:
    """Name the job for which the current task works; the tasks that it creates work for it, too."""
    _JOB.set(job)
    if (task := asyncio.current_task()) is not None:
        task.set_name(f"{_OF}{job}")


def _named(loop: asyncio.AbstractEventLoop, work: Any, **given: Any) -> asyncio.Task[Any]:
    if (job := _JOB.get()) and not given.get("name"):
        given["name"] = f"{_OF}{job}"
    return asyncio.Task(work, loop=loop, **given)


class Pulse:
    """Says once a second how long the event loop of this process has not turned."""

    def __init__(self, say: Callable[[int | None], object]) -> None:
        """`say` is called in a thread; with None while the loop is not judged: the process starts, or stops."""
        self._say = say
        self._judged = self._turned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._beat, name="motet-pulse", daemon=True).start()

    @property
    def job(self) -> str:
        """The job whose task runs in the loop now; empty for other work."""
        task = None if self._loop is None else asyncio.current_task(self._loop)
        return "" if task is None or not (name := task.get_name()).startswith(_OF) else name.removeprefix(_OF)

    async def turn(self) -> None:
        """Say that the process works, and keep saying that its loop turns; cancel it when the process stops."""
        self._judged, self._loop = True, asyncio.get_running_loop()
        self._loop.set_task_factory(_named)
        try:
            while True:
                self._turned = True
                await asyncio.sleep(BEAT_SECONDS / 2)
        finally:
            self._judged = False

    def _beat(self) -> None:
        still = 0
        while True:
            still, self._turned = 0 if self._turned else still + 1, False
            self._say(still if self._judged else None)
            time.sleep(BEAT_SECONDS)


class Restarts:
    """How long a process that ended again and again stays away, so that what ends it is no end of a service.

    It is started again twice at once, then after 1 s, and each time twice as long, up to a minute. One that worked for a
    minute begins anew.
    """

    def __init__(self) -> None:
        self.quick = 0
        """Ends in a row, each within a minute."""

    def seconds_after(self, worked: float) -> float:
        """Seconds before it is started again, after it worked for so many."""
        self.quick = 1 if worked >= _WORKED_SECONDS else self.quick + 1
        return 0.0 if self.quick <= 2 else min(2.0 ** (self.quick - 3), _LONGEST_WAIT)


class LifeSigns:
    """What a process's owner knows of its life."""

    def __init__(self, silent: int = SILENT) -> None:
        """`silent`: seconds without a sign after which a process that is ready counts as lost."""
        self._most, self._silent, self._handling = silent, 0, False
        self.alive, self._oom_kills = Alive(0, 0), oom_kills()
        """The last sign of life, and the system's count of processes without memory then."""
        self.ready = False
        """Whether the process has loaded all that it needs."""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """A message came; while it is handled, no other is waited for."""
        self._handling = True
        try:
            yield
        finally:
            self._silent, self._handling = 0, False

    def take(self, alive: Alive) -> None:
        """Keep a sign of life."""
        self.alive, self._oom_kills = alive, oom_kills()

    def out_of_memory(self) -> bool:
        """Whether the system has ended a process of this machine for want of memory since the last sign of life."""
        return oom_kills() > self._oom_kills

    async def lost(self) -> str:
        """Wait until the process does not answer; says in which way."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._silent += not self._handling
            alive = self.alive
            signs = (
                ("gives no sign of life", self._silent, self._most),
                ("does not turn its event loop", alive.loop, SILENT),
                ("makes no progress on its device", alive.device, SILENT),
            )
            if found := [
                f"{what} for {seconds} s"
                for what, seconds, most in signs
                if seconds >= (most if self.ready else LONG_SILENT)
            ]:
                return found[0]


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Count the processes that this machine has ended for want of memory, in any container; 0 if it does not say."""
    with contextlib.suppress(OSError):
        for line in vmstat.read_text("utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class TakesTurns(Protocol):
    """A device."""

    @property
    def job(self) -> str:
        """The job whose call runs now; empty without one, or with several."""

    beat: int
    """Counts begins and ends of its turns: odd while one runs."""


class DeviceWatch:
    """Judges turns of a device on this processor by their progress, not by their length."""

    def __init__(self, device: TakesTurns) -> None:
        self._device = device
        self._seen, self._still = (0, 0.0, 0), 0

    @property
    def job(self) -> str:
        """The job that the device works for alone."""
        return self._device.job

    def look(self) -> int:
        """Called once a second: for how many of these the current turn has used neither processor nor disk."""
        beat, (before, worked, moved) = self._device.beat, self._seen
        used = resource.getrusage(resource.RUSAGE_SELF)
        # those of the device, its team and its helpers: without the event loop, and this thread
        now = time.process_time() - time.thread_time() - _time_of(threading.main_thread().ident)
        disk = used.ru_majflt + used.ru_inblock + used.ru_oublock
        idle = beat % 2 == 1 and beat == before and now - worked < _IDLE_SHARE * BEAT_SECONDS and disk == moved
        self._seen, self._still = (beat, now, disk), self._still + 1 if idle else 0
        return self._still


def _time_of(thread: int | None) -> float:
    return 0.0 if thread is None else time.clock_gettime(time.pthread_getcpuclockid(thread))
