"""Steps of a job as its engine tells them: none is left out."""

from __future__ import annotations

import math

from motet.runtime.checkpoint import JobDirectory
from motet.runtime.job import CommandObeyed, JobObserver, StateChanged, StepDone


class EveryStep:
    """An observer that leaves no step out: before a step come those that another process committed and did not send."""

    def __init__(self, directory: JobDirectory, first_step: int, observe: JobObserver) -> None:
        """Send what is committed from `first_step` on; a process that was cut off may commit more after this."""
        self._directory, self._next, self._observe = directory, first_step, observe
        self._send_committed()

    def __call__(self, event: StateChanged | StepDone | CommandObeyed) -> None:
        """Take in what happens to the job."""
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
        for record in self._directory.read_metrics(committed):
            if self._next <= (step := int(record["step"])) < before:
                self._next = step + 1
                self._observe(StepDone({**record, **tokens.get(step, {})}))
