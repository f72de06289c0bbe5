"""Which processes descend from one, as Linux tells it. Elsewhere none are found, and process groups have to do."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """Children, their children and so on; each after its parent."""
    children = defaultdict(list)
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found = list(children[pid])
    for child in found:  # grows while it is read
        found.extend(children[child])
    return found


def command_line(pid: int) -> str:
    """How a process was started; empty when it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_text().replace("\0", " ")
    return ""


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other; 0 when it is gone."""
    with contextlib.suppress(OSError):
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    return 0


def peak_resident() -> int:
    """The most bytes that have been resident in this process so far."""
    status = (PROC / "self" / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
