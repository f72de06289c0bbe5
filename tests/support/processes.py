"""Processes that tests start: none is left when its test fails, or a later test would be told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from subprocess import Popen
from typing import AnyStr


@contextlib.contextmanager
def ending(process: Popen[AnyStr]) -> Iterator[Popen[AnyStr]]:
    """A process that is killed and waited for when the block ends, however it ends."""
    with process:
        try:
            yield process
        finally:
            process.kill()
