"""Plain lines for logs and pipes: finished steps, changes of state, failures, and a sign of life each minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from motet.core.types import HostNow, JobState
from motet.observe.text import (
    Glyphs,
    count_text,
    duration_text,
    evaluation_text,
    held_out_text,
    phase_text,
    reward_text,
)
from motet.observe.view import RunClock, View
from motet.runtime.held_out import recommended
from motet.runtime.progress import JobProgress

QUIET_SECONDS = 60.0
"""Time without a line after which running jobs say what they do."""


@dataclass
class _Printed:
    """What was already printed of one job."""

    state: JobState = JobState.QUEUED
    message: str = ""
    steps: int = 0
    warnings: set[tuple[str, bool]] = field(default_factory=set)
    """Kinds, and whether each was an alarm: a hint that becomes one is printed again."""


class LogView(View):
    """Prints a line when a job finishes a step or changes its state, and when a server leaves or returns."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._printed: dict[str, _Printed] = {}
        self._last: tuple[JobProgress, ...] = ()
        self._up: dict[str, bool] = {}
        self._said = 0.0
        """When a line was printed, on the view's clock."""

    def update(self, jobs: Sequence[JobProgress]) -> None:
        """Print what is new."""
        self.clock.see(jobs)
        self._last = tuple(jobs)
        for server in self.servers():
            name = server.name if isinstance(server, HostNow) else f"server {server.url}"
            told = server.up or server.note  # without a note this run has stopped it
            if server.up is not self._up.get(name, False) and told:
                self.print_line(f"{name} {'answers' if server.up else f'is away: {server.note}'}")
            self._up[name] = server.up
        width = min(max((len(job.name) for job in jobs), default=0), 24)
        for job in jobs:
            for line in self._news(job):
                self.print_line(f"{self.glyphs.plain(job.name):<{width}}  {line}")
        if self.clock.elapsed - self._said >= QUIET_SECONDS:
            for job in jobs:
                if job.state is JobState.RUNNING:
                    self.print_line(f"{self.glyphs.plain(job.name):<{width}}  {now_line(job, self.clock)}")
            self._said = self.clock.elapsed

    def stop(self) -> None:
        """Print what came since the last update."""
        self.update(self._last)

    def print_line(self, line: str) -> None:
        """Print a separate line."""
        self._said = self.clock.elapsed
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _news(self, job: JobProgress) -> list[str]:
        here = job.step - job.first_step if job.started else 0  # the others were done by an earlier process
        printed = self._printed.setdefault(job.name, _Printed(steps=max(len(job.rewards) - here, 0)))
        before, printed.state = printed.state, job.state
        known, printed.message = printed.message, job.message
        lines = []
        if job.state is not before and job.state is JobState.RUNNING:
            lines.append(_running(job.first_step or printed.steps))
        fresh = range(printed.steps, len(job.rewards))
        printed.steps = len(job.rewards)
        lines.extend(step_line(job, index, self.glyphs) for index in fresh)
        warnings = job.diagnoses.warnings
        told = {(kind, warning.startswith("alarm")): warning for kind, warning in warnings.items()}
        lines.extend(told[key] for key in told if key not in printed.warnings)
        printed.warnings |= set(told)
        if job.state is not before and job.state is not JobState.RUNNING:
            lines.append(self._ended(job))
        elif job.message and job.message != known:
            lines.append(f"note: {self.glyphs.plain(job.message)}")
        return lines

    def _ended(self, job: JobProgress) -> str:
        parts = [f"{job.state} after {job.step}/{job.steps} steps" if job.state.final else job.state.value]
        if job.evaluations and job.state.final:
            best = job.step if job.best_version is None else job.best_version
            taken = recommended(job.evaluations, best, [best])
            parts.append(f"eval {held_out_text(job.evaluations, taken, self.glyphs)}")
        if job.state.final and job.name in self.seconds:
            parts.append(duration_text(self.seconds[job.name]))
        message = self.glyphs.plain(job.message)
        return "  ".join(parts) + (f": {message}" if message else "")


def _running(first: int) -> str:
    return f"running from step {first}" if first else "running"


def now_line(job: JobProgress, clock: RunClock) -> str:
    """`step 12/40  scoring 12/64 (evaluation)  after 6m: rewards are slow: …`, in the middle of a step."""
    line = f"step {job.step}/{job.steps}  {phase_text(job)}  after {duration_text(clock.elapsed)}"
    return f"{line}: {slow}" if (slow := clock.slow(job)) else line


def step_line(job: JobProgress, index: int, glyphs: Glyphs) -> str:
    """`step 12/40  reward 0.43  eval 0.38→0.51  1.2k tok/s  2m10s left`.

    `index` is the position in `job.rewards`; not the newest if several steps ended since the last update. An evaluation
    is in the line of the step after it.
    """
    behind = len(job.rewards) - 1 - index
    step = job.step - behind
    parts = [f"step {step}/{job.steps}", f"{job.figure} {reward_text(job.rewards[index])}"]
    evaluations = [item for item in job.evaluations if item[0] < step]  # a step waits for the evaluation of its version
    if evaluations and evaluations[-1][0] == step - 1:  # the lines before have told the others
        parts.append(f"eval {evaluation_text(evaluations, glyphs, gap='')}")
    if job.tokens and job.started:
        parts.append(f"{count_text(job.tokens_per_second)} tok/s")
    if behind == 0 and job.seconds_left and job.state is JobState.RUNNING:
        parts.append(f"{duration_text(job.seconds_left)} left")
    return "  ".join(parts)
