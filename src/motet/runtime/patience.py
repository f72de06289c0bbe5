"""How long a job keeps its slot while it waits for scores and asks nothing of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

USUAL_WAIT = 120.0
"""Seconds."""


class Patience:
    """Each time a job is sent away before it has done a step, it is given twice as long, so that slow rewards get on too."""

    def __init__(self, seconds: float = USUAL_WAIT, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody waits yet; `seconds` is how long a job waits the first time."""
        self._seconds, self._clock = seconds, clock
        self._since: dict[str, float] = {}
        self._sent: dict[str, tuple[int, int]] = {}
        """The step at which a job was sent away, and how often."""

    def over(self, job: str, step: int, *, waits: bool) -> bool:
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

    def sent_away(self, job: str, step: int) -> None:
        """Remember that a job gave its slot away."""
        self._since.pop(job, None)
        self._sent[job] = step, self._times(job, step) + 1

    def forget(self, job: str) -> None:
        """A job has ended."""
        self._since.pop(job, None)
        self._sent.pop(job, None)

    def _times(self, job: str, step: int) -> int:
        at, times = self._sent.get(job, (step, 0))
        return times if at == step else 0
