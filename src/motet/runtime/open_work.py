"""Work of a job's unfinished steps. It is charged when it is done, also if its step never ends."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS = 1.0
"""Seconds between reports, because each is written to a database."""


class OpenWork:
    """Tokens that are in no finished step yet."""

    def __init__(self, report: Callable[[], None]) -> None:
        """`report` is called when there is more, at intervals."""
        self._report = report
        self.sampled = 0
        """For any step or evaluation that is not finished."""
        self.trained = 0
        """In the current step."""
        self._reported = (0, 0)
        self._at = time.monotonic()

    def add(self, *, sampled: int = 0, trained: int = 0) -> None:
        """Count tokens that were just sampled or trained."""
        self.sampled += sampled
        self.trained += trained
        if time.monotonic() - self._at >= _SECONDS:
            self.report()

    def finished(self, sampled: int) -> None:
        """A step or an evaluation is recorded, with all tokens that were sampled for it."""
        self.sampled = max(0, self.sampled - sampled)
        self.trained = 0
        self._reported = (self.sampled, self.trained)

    def report(self) -> None:
        """Report what is not reported."""
        self._at = time.monotonic()
        if (now := (self.sampled, self.trained)) != self._reported:
            self._reported = now
            self._report()
