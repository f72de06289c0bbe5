"""Rows from parquet. A few kilobytes may expand to terabytes, and Arrow has no limits.

Untrusted files are read in a separate process with limits on memory and time, which writes each row as a line of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from motet.core.errors import DataError, EngineError
from motet.core.plain_json import as_json
from motet.data.tables import of_arrow
from motet.process.isolated_calls import TooMuchError, read_lines
from motet.process.isolated_process import WorkLimits

_BATCH = 256
_CLOCK = 20.0


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


def read_limited(path: Path, seconds: float, memory_mb: int, longest: int) -> Generator[bytes]:
    """The rows of a file as lines of JSON, read in a process with limits; a line of more than `longest` bytes comes in pieces.

    `seconds` are of the processor. By the clock there are twenty times as many: it waits for readers and disks.

    Raises:
        DataError: it cannot be read, or not within the limits.
    """
    limits = WorkLimits(seconds, memory_mb, clock=_CLOCK, readable=(place := str(path.resolve()),))
    try:
        for line in read_lines(_lines, place.encode(), limits, longest):
            if line.startswith(b'"'):  # a row is an object; a text says what is wrong
                raise DataError(json.loads(line))
            yield line
    except TooMuchError as error:
        raise too_much(path, error) from error
    except EngineError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def too_much(path: Path, error: TooMuchError) -> DataError:
    """Say that a file takes more time or memory than it may."""
    return DataError(f"{path} cannot be read: {error}, the limit here; split it, or make it .jsonl")


def _lines(given: bytes) -> Iterator[bytes]:
    """Runs in a separate process."""
    try:
        for row in read(Path(given.decode())):
            yield json.dumps(as_json(row, infinite_as_text=True), separators=(",", ":")).encode() + b"\n"
    except DataError as error:
        yield json.dumps(str(error)).encode() + b"\n"
