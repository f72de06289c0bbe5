"""Reports to the service: events of jobs, each with a unique key and no step left out, and device usage."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import structs

from motet.core.plain_json import as_json
from motet.core.types import JobState
from motet.hosts import messages as m
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import CommandObeyed, Executed, Job, JobEvent, JobObserver, StateChanged, StepDone
from motet.runtime.meter import Meter
from motet.runtime.progress import JobProgress

Send = Callable[[m.FromHost], None]


class JobReports:
    """Sends events of jobs."""

    def __init__(self, send: Send, engine: str) -> None:
        """`engine` is another name for each start."""
        self._send, self._engine, self._numbers = send, engine, itertools.count()

    def changed(
        self, job: str, state: JobState, message: str, inexact: Sequence[str] | None = None, *, spent: bool = False
    ) -> None:
        """A job has another state, or another message with it."""
        because = None if inexact is None else list(inexact)
        self._send(m.JobChanged(job, state, message, because, spent, f"{self._engine}.{next(self._numbers)}"))

    def event(self, job: Job, event: JobEvent, *, leaves: bool) -> None:
        """Something happened to a job; `leaves`: another host takes it up."""
        match event:
            case CommandObeyed():
                self._send(m.Obeyed(job.name))
            case Executed(step, tokens, sampled):
                self._send(m.JobWorked(job.name, step, tokens, sampled))
            case StepDone(line, best, best_by):
                self._send(m.JobStepped(job.name, as_json(line), best, best_by))
            case StateChanged(state, message, inexact):
                if state is JobState.SUCCEEDED:
                    message = message or "; ".join(job.progress.signs.warnings.values())
                if not (leaves and state is JobState.PAUSED):  # it continues elsewhere
                    self.changed(job.name, state, message, inexact, spent=job.progress.spent)


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

    def __init__(self, directory: JobDirectory, first_step: int, observe: JobObserver) -> None:
        """Send commits from `first_step` on; a disconnected process may commit more after this call."""
        self._directory, self._next, self._observe = directory, first_step, observe
        self._send_committed()

    def __call__(self, event: JobEvent) -> None:
        """Handle an event of the job."""
        if isinstance(event, StepDone):
            step = int(event.line["step"])
            if step > self._next:
                self._send_committed(before=step)
            self._next = step + 1
        self._observe(event)

    def _send_committed(self, before: float = math.inf) -> None:
        if (committed := self._directory.newest()) is None:
            return
        tokens = self._directory.read_tokens(committed)
        best, by = committed.best_version, committed.best_by
        for record in self._directory.read_metrics(committed):
            if self._next <= (step := int(record["step"])) < before:
                self._next = step + 1
                self._observe(StepDone({**record, **tokens.get(step, {})}, best=step == best, best_by=by))


def standing(progress: JobProgress) -> m.JobStanding:
    """The progress of a running job, as it is sent."""
    return m.JobStanding(
        phase=progress.activity,
        step=progress.step,
        rollouts_done=progress.rollouts_done,
        rollouts_wanted=progress.rollouts_wanted,
        tokens=progress.tokens,
        tokens_per_second=round(progress.tokens_per_second, 1),
        seconds_left=progress.seconds_left,
        warnings=list(progress.signs.warnings.values()),
    )
