"""How long a job keeps its slot while it waits for scores and asks nothing of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_IDLE = 120.0
"""Seconds."""


class IdleSlotTimeouts:
    """When a job that only waits loses its slot.

    The time doubles each time that it is preempted without a step since the last time, so that slow rewards get on too.
    """

    def __init__(self, seconds: float = MAX_IDLE, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds` is how long a job may wait the first time."""
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}
        self._preemptions: dict[str, tuple[int, int]] = {}
        """The step at which a job was preempted last, and how often at that step."""

    def expired(self, job: str, step: int, *, waits: bool) -> bool:
        """Whether a job has waited for too long; asked again and again.

        Args:
            job: its name.
            step: steps that it has done.
            waits: whether it waits now.
        """
        if not waits:
            self._since.pop(job, None)
            return False
        waited = self._clock() - self._since.setdefault(job, self._clock())
        return waited >= self._seconds * 2.0 ** self._times(job, step)

    def preempted(self, job: str, step: int) -> None:
        """Count that a job lost its slot after `step` steps."""
        self._since.pop(job, None)
        self._preemptions[job] = step, self._times(job, step) + 1

    def forget(self, job: str) -> None:
        """Drop what is known of a job that has ended."""
        self._since.pop(job, None)
        self._preemptions.pop(job, None)

    def _times(self, job: str, step: int) -> int:
        at, times = self._preemptions.get(job, (step, 0))
        return times if at == step else 0
