"""The process of `motet.process.isolated_calls`: `python -m motet.process.isolated_process PARENT_PID LIMITS`.

It goes behind the wall, then calls one function after the other, until its input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from motet.process import wall

DONE, FAULT = 0, 1
"""Whether an answer is a result, or the reason why there is none."""
NO_MEMORY, CRASHED = 70, 71
"""Exit statuses of a process whose work met its memory limit, or made a library give up."""
_FRAME = struct.Struct("<IIQ")


@dataclass(frozen=True)
class WorkLimits:
    """What a call in a separate process may take and reach."""

    seconds: float = 5.0
    """CPU time."""
    memory_mb: int = 1024
    """Address space beyond the size of the process as it goes behind the wall."""
    clock: float = 12.0
    """Wall-clock time as a multiple of the CPU time: the machine may be busy."""
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    """Absolute paths."""
    most_written: int = 2**20
    """Bytes of each file that it writes, and of what it prints."""
    walled: bool = True
    """Without a wall it has this process's environment, and no limit but the clock."""
    module: str = ""
    """Imported before the wall goes up; others are imported behind it."""

    @property
    def wall_seconds(self) -> float:
        """Wall-clock time."""
        return self.clock * self.seconds


def write_frame(target: Any, first: int, second: int, data: bytes) -> None:
    """Write two numbers and bytes."""
    target.write(_FRAME.pack(first, second, len(data)))
    target.write(data)
    target.flush()


def read_frame(source: Any) -> tuple[int, int, bytes]:
    """Read what `write_frame` wrote. Raises EOFError at the end."""
    head = source.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise EOFError
    first, second, length = _FRAME.unpack(head)
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return first, second, data


def _serve(requests: BinaryIO, out: BinaryIO, limits: WorkLimits) -> None:
    """Run in the process until its input ends, or lines are written."""
    while True:
        try:
            length, memory_mb, data = read_frame(requests)
        except EOFError:
            return
        module, _, name = data[:length].decode().partition(":")
        began, in_lines = time.process_time(), False
        try:
            _limit(seconds=None, memory=None)  # loading the module does not count
            function: Callable[[bytes], bytes | Iterable[bytes]] = getattr(importlib.import_module(module), name)
            if limits.walled:
                used = resource.getrusage(resource.RUSAGE_SELF)
                memory = space + memory_mb * 2**20 if (space := wall.address_space()) else None
                _limit(seconds=int(used.ru_utime + used.ru_stime + limits.seconds) + 1, memory=memory)
            answer = function(data[length:])
            if in_lines := not isinstance(answer, bytes):
                out.writelines(answer)
                return
            status = DONE
        except MemoryError:
            os._exit(NO_MEMORY)
        except Exception as error:
            if in_lines:
                raise
            with contextlib.suppress(OSError):  # it has printed all that it may
                traceback.print_exc()
            status, answer = FAULT, f"{type(error).__name__}: {error}"[:2000].encode(errors="replace")
        except BaseException:  # such as a panic of a Rust library
            os._exit(CRASHED)
        write_frame(out, status, round(1000 * (time.process_time() - began)), answer)


def _limit(*, seconds: int | None, memory: int | None) -> None:
    """Set the soft limits; None raises them to the hard limits."""
    for kind, wanted in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory)):
        hard = resource.getrlimit(kind)[1]
        soft = hard if wanted is None or (hard != resource.RLIM_INFINITY and wanted > hard) else wanted
        resource.setrlimit(kind, (soft, hard))


def main(parent: int, limits: WorkLimits) -> None:
    """Serve a parent."""
    wall.end_with(parent)
    wall.address_space()  # behind the wall, it needs a call before
    if limits.module:
        importlib.import_module(limits.module)
    if limits.walled:
        readable, writable = map(Path, limits.readable), map(Path, limits.writable)
        wall.enter(
            limits.memory_mb, readable=[*readable], writable=[*writable], most_written=limits.most_written,
            where_possible=True,
        )  # fmt: skip
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's prints must not be read as an answer
    try:
        with out:
            _serve(sys.stdin.buffer, out, limits)
    except MemoryError:  # for what was sent, or the answer
        os._exit(NO_MEMORY)


if __name__ == "__main__":
    main(int(sys.argv[1]), WorkLimits(**json.loads(sys.argv[2])))
