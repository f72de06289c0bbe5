"""The process of `motet.process.apart`: `python -m motet.process.apart_process PARENT_PID MEMORY_MB SECONDS`.

It goes behind the wall, then calls one function after the other, until its input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from motet.process import wall

DONE, FAULT = 0, 1
"""Whether an answer is a result, or the reason why there is none."""
NO_MEMORY, CRASHED = 70, 71
"""Exit statuses of a process whose work met its memory limit, or made a library give up."""
_FRAME = struct.Struct("<IIQ")


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


def _serve(lines: BinaryIO, out: BinaryIO, statm: BinaryIO | None, seconds: float) -> None:
    """Runs in the process until its input ends. `statm` reports its memory, if the system supports it."""
    while True:
        try:
            length, memory_mb, data = read_frame(lines)
        except EOFError:
            return
        module, _, name = data[:length].decode().partition(":")
        began = time.process_time()
        try:
            _limit(seconds=None, memory=None)  # loading the module does not count
            function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
            used = resource.getrusage(resource.RUSAGE_SELF)
            pages = 0 if statm is None else int(os.pread(statm.fileno(), 100, 0).split()[0])
            memory = pages * resource.getpagesize() + memory_mb * 2**20 if pages else None
            _limit(seconds=int(used.ru_utime + used.ru_stime + seconds) + 1, memory=memory)
            status, answer = DONE, function(data[length:])
        except MemoryError:
            os._exit(NO_MEMORY)
        except Exception as error:
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


if __name__ == "__main__":
    wall.end_with(int(sys.argv[1]))
    with contextlib.ExitStack() as opened:
        space = opened.enter_context(open("/proc/self/statm", "rb")) if Path("/proc/self/statm").exists() else None
        nothing = os.open(os.devnull, os.O_WRONLY)
        wall.enter(int(sys.argv[2]), where_possible=True)
        streams = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(nothing, sys.stderr.fileno())  # what fails from here on is an answer
        os.dup2(nothing, sys.stdout.fileno())  # a library's prints must not be read as one
        try:
            _serve(*streams, space, float(sys.argv[3]))
        except MemoryError:  # for what was sent, or the answer
            os._exit(NO_MEMORY)
