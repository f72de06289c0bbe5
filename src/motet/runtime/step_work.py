"""The device's work for a step: passes and optimizer updates, in order."""

from __future__ import annotations

from motet.core.batch import Optimizer, OptimStats, Segment, Trained
from motet.core.types import FloatArray
from motet.runtime.job import Job, Services
from motet.runtime.learner import Executed, unheard
from motet.runtime.versions import adapter_name


class StepWork:
    """What a job computes for its current step."""

    def __init__(self, job: Job, services: Services) -> None:
        self._job, self._services = job, services
        self.moved = False
        """Whether the trainer has changes that are not in the last finished step."""
        self.stepped = False
        """Whether these may include an optimizer step."""

    def finished(self) -> None:
        """Note that the step is finished, or begins again."""
        self.moved = self.stepped = False

    async def forward_backward(
        self, segments: tuple[Segment, ...], executed: Executed | None = None
    ) -> tuple[Trained, ...]:
        """Add the gradients of segments in order; they may share a packed batch with other sessions.

        The work is charged, unless `executed` does that.
        """
        self.moved = True
        executed = executed or (lambda work: self._job.open_work.add(trained=work))
        return await self._services.learner.train(self._job.name, segments, executed)

    async def forward(
        self, segments: tuple[Segment, ...], executed: Executed = unheard, *, base: bool = False
    ) -> list[FloatArray]:
        """Logprobs [T] of each sample; `base=True` disables the adapter."""
        return await self._services.learner.score(self._job.name, segments, executed, base=base)

    async def optim_step(self, optimizer: Optimizer, role: str = "", *, name: str = "") -> OptimStats:
        """Clip the gradient, update, and clear the gradient; the next version can then be committed and published.

        `name` is the adapter's, if it is none of a role.
        """
        self.moved = self.stepped = True
        return await self._services.learner.step(self._job.name, name or adapter_name(self._job.name, role), optimizer)
