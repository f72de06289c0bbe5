"""Reports to the service: device usage, jobs that a host has, and their events without a step left out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from msgspec import structs

from motet.core.types import JobState
from motet.hosts import messages as m
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import Job
from motet.runtime.meter import Meter
from motet.runtime.progress import JobEvent, JobStepped

Send = Callable[[m.FromHost], None]


class HandedOver:
    """Jobs received from the service, with their last wanted state, for the next service."""

    def __init__(self) -> None:
        self._jobs: dict[str, m.AddJob] = {}

    def add(self, message: m.AddJob) -> None:
        """A job comes."""
        self._jobs[str(message.job["name"])] = message

    def steer(self, message: m.SteerJob) -> None:
        """Record a job's new wanted state."""
        if (job := self._jobs.get(message.job)) is not None:
            self._jobs[message.job] = structs.replace(job, wanted=message.wanted)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other jobs."""
        self._jobs = {name: job for name, job in self._jobs.items() if name in names}

    def held(self, jobs: Mapping[str, Job]) -> list[m.Held]:
        """Jobs that have not ended; those not in `jobs` are being prepared."""
        states = {name: jobs[name].state if name in jobs else JobState.QUEUED for name in self._jobs}
        return [
            m.Held(name, job.tenant, job.slots, states[name], job.wanted)
            for name, job in self._jobs.items()
            if not states[name].final
        ]


class CpuTime:
    """CPU time of jobs' rewards and preparations that was not reported yet."""

    def __init__(self) -> None:
        self._used = Counter[str]()

    def add(self, job: str, seconds: float) -> None:
        """Count more of a job."""
        self._used[job] += round(1e6 * seconds)

    def take(self) -> dict[str, int]:
        """Microseconds by job since the last call."""
        used, self._used = self._used, Counter[str]()
        return dict(used)


class UsageReports:
    """Sends device usage, in numbered windows."""

    def __init__(self, meter: Meter, cpu: CpuTime, read: Counter[str], send: Send, engine: str, base: str) -> None:
        """`read`: tokens of prompts by job; it is emptied into each window."""
        self._read = read
        self._meter, self._cpu, self._send, self._engine, self._base = meter, cpu, send, engine, base
        self._used = Counter[str]()
        self._measured, self._windows = time.monotonic(), 0

    def send_due(self, every: float, idle: float) -> None:
        """Read the meter; send the result every `every` seconds, or every `idle` seconds without usage."""
        seconds = every if any(self._used) else idle
        self._used.update(self._meter.window())
        if time.monotonic() - self._measured < seconds or not self._used:
            return
        self._measured = time.monotonic()
        self._windows += 1
        used, read = dict(self._used), dict(self._read)
        self._send(m.UsageWindow(self._engine, self._windows, used, self._base, self._cpu.take(), read))
        self._used.clear()
        self._read.clear()


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
