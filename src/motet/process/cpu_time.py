"""CPU time of a piece of work: of its thread, and of the processes that it starts as `CountedProcess` and waits for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path


def cpu_seconds_of(pid: int) -> float | None:
    """CPU seconds of a process and of those that it has waited for; None if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


_CHILDREN: ContextVar[dict[int, float] | None] = ContextVar("motet.children", default=None)


@contextlib.contextmanager
def counted(charge: Callable[[float], None]) -> Iterator[None]:
    """Charge the CPU seconds of the block, when it ends in any way."""
    before, begun = _CHILDREN.set(children := dict[int, float]()), time.thread_time()
    try:
        yield
    finally:
        _CHILDREN.reset(before)
        charge(time.thread_time() - begun + sum(children.values()))


class CountedProcess(subprocess.Popen[bytes]):
    """A process whose CPU time counts in the `counted` block that waits for it."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; it has closed its outputs or was killed, and its time is forgotten with it."""
        if self.returncode is None and (children := _CHILDREN.get()) is not None:
            children[self.pid] = cpu_seconds_of(self.pid) or 0.0
        return super().wait(timeout)
