"""Reports to the service: device usage, and the events of jobs without a step left out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from motet.hosts import messages as m
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.device_usage import Meter
from motet.runtime.progress import JobEvent, JobStepped

Send = Callable[[m.FromHost], object]


class UsageReports:
    """Sends device usage, in numbered windows."""

    def __init__(self, meter: Meter, read: Counter[str], send: Send, engine: str, base: str) -> None:
        """`read`: tokens of prompts by job; it is emptied into each window."""
        self._read, self._cpu = read, Counter[str]()
        self._meter, self._send, self._engine, self._base = meter, send, engine, base
        self._used = Counter[str]()
        self._measured, self._windows = time.monotonic(), 0

    def add_cpu(self, job: str, seconds: float) -> None:
        """Count time of the processor, of a job's rewards or preparation."""
        self._cpu[job] += round(1e6 * seconds)

    def send_due(self, every: float, idle: float) -> None:
        """Read the meter; send the result every `every` seconds, or every `idle` seconds without usage."""
        seconds = every if any(self._used) else idle
        self._used.update(self._meter.window())
        if time.monotonic() - self._measured < seconds or not self._used:
            return
        self._measured = time.monotonic()
        self._windows += 1
        counts = self._used, self._cpu, self._read
        used, cpu, read = map(dict, counts)
        self._send(m.UsageWindow(self._engine, self._windows, used, self._base, cpu, read))
        for count in counts:
            count.clear()


class EveryStep:
    """An observer that leaves no step out: before a step, it sends steps that another process committed but did not send."""

    def __init__(self, directory: JobDirectory, first_step: int, observe: Callable[[JobEvent], None]) -> None:
        """Send commits from `first_step` on; a disconnected process may commit more after this call."""
        self._directory, self._next, self._observe = directory, first_step, observe
        self._send_committed()

    def __call__(self, event: JobEvent) -> None:
        """Handle an event of the job."""
        if isinstance(event, JobStepped):
            step = int(event.line["step"])
            if step > self._next:
                self._send_committed(before=step)
            self._next = step + 1
        self._observe(event)

    def _send_committed(self, before: float = math.inf) -> None:
        if (committed := self._directory.newest()) is None:
            return
        tokens = self._directory.read_tokens(committed)
        name, best, by = self._directory.path.name, committed.best_version, committed.best_by
        for record in self._directory.read_metrics(committed):
            if self._next <= (step := int(record["step"])) < before:
                self._next = step + 1
                self._observe(JobStepped(name, {**record, **tokens.get(step, {})}, step == best, by))
