"""Rollouts of steps in pages: each line of a log is parsed once to know its place; later pages read only their own."""

from __future__ import annotations

import itertools
import json
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_MOST_LINES, _MOST_LOGS = 2**20, 1000
"""Known at once; a line takes 24 bytes."""
_NO_PROBLEM = -1
Rollout = dict[str, Any]


@dataclass(frozen=True)
class RolloutPage:
    """Some rollouts of a log, in its order."""

    rollouts: Sequence[Rollout]
    next: int | None
    """The place of the first one after them that fits."""
    problems: Sequence[int]
    """If there are no rollouts: those of the log, sorted."""


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
        """The first `limit` rollouts from a place on whose problem and reward fit.

        Raises FileNotFoundError if the log was deleted.
        """
        found = list[tuple[int, Rollout | None]]()
        with path.open("rb") as file, (log := self._known(path, file)).lock:
            for place in itertools.count(after):
                new = None
                while place >= len(log.problems):
                    if (new := self._read_on(log, file)) is None:
                        return self._of(log, file, found, None)
                if fits(log.problems[place], log.rewards[place]):
                    if len(found) == limit:
                        return self._of(log, file, found, place)
                    found.append((place, new))
        raise AssertionError  # the file ends

    def _of(self, log: _Log, file: BinaryIO, found: list[tuple[int, Rollout | None]], rest: int | None) -> RolloutPage:
        rollouts = [self._again(log, file, place) if new is None else new for place, new in found]
        return RolloutPage(rollouts, rest, () if rollouts else sorted(set(log.problems) - {_NO_PROBLEM}))

    def _again(self, log: _Log, file: BinaryIO, place: int) -> Rollout:
        file.seek(log.ends[place])
        return _parsed(file.read(log.ends[place + 1] - log.ends[place]))

    def _read_on(self, log: _Log, file: BinaryIO) -> Rollout | None:
        """Parse the first line that is not known; None at the end."""
        file.seek(log.ends[-1])
        if not (line := file.readline()):
            return None
        rollout = _parsed(line)
        reward = rollout.get("reward")
        log.ends.append(log.ends[-1] + len(line))
        log.problems.append(rollout.get("problem", _NO_PROBLEM))
        log.rewards.append(float("nan") if reward is None else reward)
        return rollout

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


def _parsed(line: bytes) -> Rollout:
    return json.loads(line)  # type: ignore[no-any-return]
