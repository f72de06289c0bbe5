"""What a person may see of a job while it runs: written by the job's loops, read by views."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from motet.types import JobState


@dataclass
class JobProgress:
    """A snapshot of one job, always current."""

    name: str
    steps: int
    """Steps that the job will do."""
    state: JobState = JobState.QUEUED
    step: int = 0
    """Steps done."""
    phase: str = ""
    """What is going on: `sampling`, `training`, `evaluating`, `saving`."""
    rollouts_done: int = 0
    """Of the step that is being sampled."""
    rollouts_wanted: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step done."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(version, held-out reward)."""
    tokens: int = 0
    """Sampled and trained in this process."""
    started: float = 0.0
    """Monotonic time at which the job began to run; 0 before."""
    first_step: int = 0
    """Step from which this process went on."""
    message: str = ""
    """Why the job failed, or what a person should know."""
    spent: bool = False
    """Whether it is paused because its budget is spent."""

    @property
    def tokens_per_second(self) -> float:
        """Since the job began to run."""
        seconds = time.monotonic() - self.started if self.started else 0.0
        return self.tokens / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the steps done so far; None before the first."""
        done = self.step - self.first_step
        if not self.started or done <= 0:
            return None
        return (time.monotonic() - self.started) / done * (self.steps - self.step)
