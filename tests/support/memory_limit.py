"""A memory limit that the system keeps, for tests of processes that meet theirs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

_CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(megabytes: int) -> Iterator[Path]:
    """A file; a process that writes its id into it has so much memory, and is killed when it wants more. Needs root."""
    root, most = (_CGROUPS / "memory", "limit_in_bytes") if (_CGROUPS / "memory").is_dir() else (_CGROUPS, "max")
    place = root / f"motet-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        place.mkdir()
        (place / f"memory.{most}").write_text(str(megabytes << 20))
    except OSError:
        with contextlib.suppress(OSError):
            place.rmdir()
        pytest.skip("a memory limit of the system needs root")
    try:
        yield place / "cgroup.procs"
    finally:
        until = time.monotonic() + PATIENCE
        while (place / "cgroup.procs").read_text() and time.monotonic() < until:  # they are about to end
            time.sleep(0.02)
        place.rmdir()
