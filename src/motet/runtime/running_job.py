"""A job that has a slot: its loop, why it stops, and the state in which it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from motet.algorithms.client import ClientDriven
from motet.algorithms.rows import RowAlgorithm
from motet.core.types import JobState
from motet.runtime.client_loop import ClientLoop
from motet.runtime.driver import Driver
from motet.runtime.job import Job
from motet.runtime.progress import STOPPED_EARLY
from motet.runtime.rollout_loop import RolloutLoop
from motet.runtime.row_loop import RowLoop


@dataclass
class Running:
    """A job that has a slot."""

    job: Job
    task: asyncio.Task[None]
    loop: Driver | None = None
    """None until the task has begun."""
    pause: str | None = None
    """Why it stops after the current step, empty if a person asked; None while it continues."""
    dropped: bool = False
    """Whether it leaves within its step."""
    preempted: bool = False
    """Whether it returns to the queue because another job gets its slot."""

    def stop_after_step(self, reason: str = "") -> None:
        """Stop after the current step, even if the loop does not exist yet."""
        self.pause = reason
        if self.loop is not None:
            self.loop.pause()

    def preempt(self) -> None:
        """Give the slot to another job after the current step, which is dropped if it lasts (`leave`)."""
        self.preempted = True
        self.stop_after_step()

    @property
    def must_go(self) -> bool:
        """Whether the job may not keep the slot until its step ends, however long that takes."""
        return self.pause is not None and (self.preempted or self.job.held)

    def leave(self) -> bool:
        """Release the slot within the step, once; gives whether a step was dropped that did not only wait for somebody."""
        if self.loop is None or self.dropped:
            return False
        waits, self.dropped = self.loop.outside, self.loop.drop()
        return self.dropped and not waits


def driver_of(job: Job) -> type[Driver]:
    """The loop of a job: `RowLoop` for rows of data, `ClientLoop` for a client's commands, else `RolloutLoop`."""
    match job.config.algorithm:
        case ClientDriven():
            return ClientLoop
        case RowAlgorithm():
            return RowLoop
    return RolloutLoop


def outcome(job: Job, state: JobState, reason: str | None, *, preempted: bool) -> tuple[JobState, str]:
    """State and message of a job whose loop returned `state`; `reason` is why it was paused, None if nobody asked."""
    done = f"after step {job.progress.step}"
    if state is JobState.QUEUED:
        waited = "it waited for scores, for an agent or for its client"
        return state, f"released its slot {done} because {waited}; continues when a slot is free"
    if state is not JobState.PAUSED:
        early = job.progress.message.startswith(STOPPED_EARLY)
        return state, job.progress.message if early else ""
    if job.progress.spent:
        return state, (
            f"paused {done}: its budget of {job.config.budget} tokens is spent; to continue, raise it "
            "(`motet resume JOB --budget TOKENS`, or `budget` in the job file and the same command)"
        )
    if preempted:
        return JobState.QUEUED, f"gave its slot to another tenant's job {done}; continues when a slot is free"
    if reason is None:  # it was resumed while it stopped
        return JobState.QUEUED, ""
    return state, f"paused {done}: {reason}" if reason else f"paused {done}"


def cut_off(closing: bool, when: str) -> tuple[JobState, str]:
    """State and message of a job that ended early; if the run closes, it can be resumed."""
    return (JobState.PAUSED, f"stopped {when}") if closing else (JobState.CANCELLED, f"cancelled {when}")
