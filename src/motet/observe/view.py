"""The base of all views of a run: console, clock and watched servers."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from motet.core.types import HostNow, JobState, ServerLoad
from motet.observe.text import glyphs_of
from motet.runtime.progress import JobProgress

_SLOW_SECONDS = 20.0  # of scoring without sampling after which rewards are called slow
_WINDOW = 15.0  # seconds over which the rate of all jobs is measured


class RunClock:
    """Measures how long each job ran, and the current speed of all, because snapshots have only counts."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._counts: deque[tuple[float, int]] = deque()
        self.seconds: dict[str, float] = {}
        """Seconds that each job ran; fixed while it waits and when it ends."""
        self._scoring: dict[str, float] = {}
        """Since when only rewards of a job run."""
        self._earlier: dict[str, tuple[float, float]] = {}
        """When each job began to run, and its seconds before."""

    def slow(self, job: JobProgress) -> str:
        """What to do if rewards hold up a job; empty if they do not, or have not yet for long."""
        if self._now() - self._scoring.get(job.name, math.inf) < _SLOW_SECONDS:
            return ""
        return "rewards are slow: score more at once (engine.reward_processes), or make the function async if it is not"

    def begin(self) -> None:
        """Count the elapsed time from now."""
        self._began = self._now()

    @property
    def elapsed(self) -> float:
        """Seconds since `begin`, or since this clock was made."""
        return self._now() - self._began

    @property
    def rate(self) -> float:
        """Tokens per second of all jobs over the last seconds."""
        if len(self._counts) < 2:
            return 0.0
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return max(after - before, 0) / (end - start) if end > start else 0.0

    def see(self, jobs: Sequence[JobProgress]) -> None:
        """Record a snapshot."""
        now = self._now()
        self._counts.append((now, sum(job.tokens for job in jobs)))
        while len(self._counts) > 2 and now - self._counts[0][0] > _WINDOW:
            self._counts.popleft()
        scoring = {job.name for job in jobs if job.state is JobState.RUNNING and job.activity.startswith("scoring")}
        self._scoring = {name: self._scoring.get(name, now) for name in scoring}
        for job in jobs:
            if job.started and (job.state is JobState.RUNNING or job.name not in self.seconds):
                started, earlier = self._earlier.get(job.name, (job.started, 0.0))
                if job.started != started:
                    earlier = self.seconds[job.name]
                self._earlier[job.name] = job.started, earlier
                self.seconds[job.name] = earlier + max(now - job.started, 0.0)


class View(ABC):
    """Shows jobs while they run."""

    def __init__(self, console: Console) -> None:
        self.console, self.glyphs, self.clock = console, glyphs_of(console), RunClock()
        self.servers: Callable[[], Sequence[ServerLoad | HostNow]] = tuple

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each job ran, as seen by this view."""
        return self.clock.seconds

    def watch(self, servers: Callable[[], Sequence[ServerLoad | HostNow]]) -> None:
        """Show the state of these servers or hosts besides jobs."""
        self.servers = servers

    def start(self) -> None:
        """Start the display."""
        self.clock.begin()

    @abstractmethod
    def update(self, jobs: Sequence[JobProgress]) -> None:
        """Show the current state."""

    @abstractmethod
    def print_line(self, line: str) -> None:
        """Print a text."""

    @abstractmethod
    def stop(self) -> None:
        """End the display, with the last state on the screen."""
