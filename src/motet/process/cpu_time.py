"""CPU time of a piece of work: of its thread, and of the processes that it starts by `motet.process.child` and waits for."""

from __future__ import annotations

import contextlib
import os
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


def count(pid: int) -> None:
    """Count what a process has used so far in the block that waits for its end."""
    if (children := _CHILDREN.get()) is not None:
        children[pid] = cpu_seconds_of(pid) or children.get(pid, 0.0)
