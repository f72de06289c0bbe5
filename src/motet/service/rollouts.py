"""Rollouts of steps in pages: each line of a log is looked into once to know its place; later pages read only their own."""

from __future__ import annotations

import itertools
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from motet.service.database.store import MOST_OF_A_PAGE

_MOST_LINES, _MOST_LOGS = 2**20, 1000
"""Known at once; a line takes 24 bytes."""
_NO_PROBLEM = -1


@dataclass(frozen=True)
class RolloutPage:
    """Some rollouts of a log, in its order."""

    lines: Sequence[bytes]
    next: int | None
    """The place of the first one after them that fits."""
    problems: Sequence[int]
    """If there are no rollouts: those of the log, sorted."""


class _Known(msgspec.Struct):
    """What is known of a line; the rest of it is skipped."""

    problem: int = _NO_PROBLEM
    reward: float | None = None


@dataclass
class _Log:
    """The lines of a log that were read so far."""

    stamp: tuple[int, ...]
    """Of the file; a step that runs again writes another."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    problems: array[int] = field(default_factory=lambda: array("q"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    """NaN, which no bound fits, for those without a reward."""


class RolloutLogs:
    """Reads rollout logs of jobs; knows the places, problems and rewards of those asked for last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: OrderedDict[Path, _Log] = OrderedDict()
        """The least recently asked first."""

    def page(self, path: Path, fits: Callable[[int, float], bool], after: int, limit: int) -> RolloutPage:
        """The first `limit` rollouts from a place on whose problem and reward fit; fewer if they are large.

        Raises FileNotFoundError if the log was deleted.
        """
        found, size, rest = list[bytes](), 0, None
        with path.open("rb") as file, (log := self._known(path, file)).lock:
            for place in itertools.count(after):
                line = b""
                while place >= len(log.problems) and (line := self._read_on(log, file)):
                    pass
                if place >= len(log.problems):
                    break
                if fits(log.problems[place], log.rewards[place]):
                    begin, end = log.ends[place : place + 2]
                    size += end - begin
                    if found and (len(found) == limit or size > MOST_OF_A_PAGE):
                        rest = place
                        break
                    file.seek(begin)
                    found.append(line or file.read(end - begin))
            return RolloutPage(found, rest, () if found else sorted(set(log.problems) - {_NO_PROBLEM}))

    def _read_on(self, log: _Log, file: BinaryIO) -> bytes:
        """Look into the first line that is not known; empty at the end."""
        file.seek(log.ends[-1])
        if line := file.readline():
            known = _parsed(line)
            log.ends.append(log.ends[-1] + len(line))
            log.problems.append(known.problem)
            log.rewards.append(float("nan") if known.reward is None else known.reward)
        return line

    def _known(self, path: Path, file: BinaryIO) -> _Log:
        status = os.fstat(file.fileno())
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            log = self._logs.pop(path, None)
            self._logs[path] = log = log if log is not None and log.stamp == stamp else _Log(stamp)
            lines = sum(len(one.problems) for one in self._logs.values())
            while len(self._logs) > 1 and (lines > _MOST_LINES or len(self._logs) > _MOST_LOGS):
                lines -= len(self._logs.popitem(last=False)[1].problems)
            return log


def _parsed(line: bytes) -> _Known:
    return msgspec.json.decode(line, type=_Known)
