"""Rows from parquet. A few kilobytes may expand to terabytes, and Arrow has no limits.

Untrusted files are read in a separate process with limits on memory and time, which writes each row as a line of JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

from motet.core.errors import DataError
from motet.core.plain_json import as_json
from motet.data.tables import of_arrow
from motet.process import cpu_time, ending, wall

_log = logging.getLogger(__name__)
_BATCH = 256
_WAITS = 20
"""How many times as long as its limit of the processor a process may take by the clock."""
_NO_MEMORY = 70
"""Exit status of a process that met its memory limit."""
_PRINTED = 2**20
"""Most bytes that the process prints to its standard error."""
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS})
"""Signals by which Arrow ends its process when it gets no memory."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file. Raises DataError if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_BATCH)
        yield from of_arrow(batches)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    # ValueError and OverflowError: also a date that Python cannot represent
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error or type(error).__name__}") from error


def read_apart(path: Path, seconds: float, memory_mb: int, longest: int) -> Generator[bytes]:
    """The rows of a file as lines of JSON, read in a process with limits; a line of more than `longest` bytes comes in pieces.

    `seconds` are of the processor. By the clock there are twenty times as many: it waits for readers and disks.

    Raises:
        DataError: it cannot be read, or not within the limits.
    """
    command = wall.command(__name__, str(path.resolve()), str(memory_mb), str(seconds))
    environment = wall.environment(PYTHONWARNINGS="ignore", ARROW_DEFAULT_MEMORY_POOL="system")
    with tempfile.TemporaryFile() as printed, cpu_time.CountedProcess(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, env=environment
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(longest):
                if not line.endswith(b"\n") and len(line) < longest:  # it was ended while it wrote
                    break
                if line.startswith(b'"'):  # a row is an object; a text says what is wrong
                    raise DataError(json.loads(line))
                yield line
            if (status := process.wait()) != 0:
                late = -status in (signal.SIGXCPU, signal.SIGALRM)
                if late or status == _NO_MEMORY or -status in _CRASHES:
                    limit = (
                        f"{seconds:g} s of the processor ({_WAITS * seconds:g} s by the clock)"
                        if late
                        else f"{memory_mb} MB of memory"
                    )
                    raise DataError(
                        f"{path} cannot be read within {limit}, the limit here; split it, or make it .jsonl"
                    )
                printed.seek(0)
                said = printed.read().decode(errors="replace")
                how = ending.how_it_ended(status, printed=said)
                _log.warning("%s %s:\n%s", __name__, how, said[-2000:])
                raise DataError(f"{path} cannot be read: the process that reads it {how}")
        finally:
            process.kill()


def _write(path: Path, target: IO[str]) -> None:
    """Runs in the process that reads."""
    try:
        for row in read(path):
            target.write(json.dumps(as_json(row, infinite_as_text=True), separators=(",", ":")) + "\n")
    except DataError as error:
        target.write(json.dumps(str(error)) + "\n")
    target.flush()


if __name__ == "__main__":
    wall.enter(int(sys.argv[2]), readable=[Path(sys.argv[1])], most_written=_PRINTED, where_possible=True)
    seconds = float(sys.argv[3])
    signal.setitimer(signal.ITIMER_REAL, _WAITS * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
    try:
        _write(Path(sys.argv[1]), sys.stdout)
    except MemoryError:
        os._exit(_NO_MEMORY)
