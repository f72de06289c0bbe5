"""The learn loop's half of a job: the groups of a step become micro-batches, gradients and one or more optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

from motet.algorithms.schedule import adamw
from motet.runtime.job import Job, Services
from motet.runtime.sampling import SampledStep
from motet.runtime.step_batch import StepBatch, make_step_batch
from motet.types import Batch, FloatArray, LossStats, OptimStats, Segment


@dataclass(frozen=True)
class LearnedStep:
    """What a step trained and what came of it."""

    batch: StepBatch
    stats: LossStats
    """Of the first update."""
    optim: OptimStats | None
    """Of the last update; None where nothing was trainable."""
    tokens: int
    """Tokens that were run through the trainer."""


class JobLearning:
    """Trains the steps of one job and looks at no other; the shared `Learner` packs their micro-batches together."""

    def __init__(self, job: Job, services: Services) -> None:
        self._job = job
        self._services = services

    async def step(self, sampled: SampledStep) -> LearnedStep:
        """All updates of a step. Without a trainable sample the weights stay as they are (and no moment decays)."""
        job, services, step = self._job, self._services, sampled.step
        batch = make_step_batch(sampled.groups, job.config, job.algorithm)
        if not batch.samples:
            return LearnedStep(batch, LossStats(), None, 0)
        if job.algorithm.needs_reference or job.evaluates(step):
            batch = await self._with_logprobs(batch, "reference_logprobs", base=True)
        if job.algorithm.needs_proximal:
            batch = await self._with_logprobs(batch, "proximal_logprobs", base=False)
        step_of = adamw(job.config.optimizer, job.base_rate, step, job.config.steps)
        segments, first, optim = self._segments(batch), LossStats(), None
        tokens = sum(sample.n_tokens for sample in batch.samples)
        updates = job.config.algorithm.updates_per_batch
        with services.scheduler.working(job.name):
            for update in range(updates):
                stats = await services.learner.train(job.name, segments)
                services.scheduler.spend(job.name, tokens)
                optim = await services.on_device(job.name, lambda: services.trainer.optim_step(job.name, step_of))
                first = stats if update == 0 else first
        return LearnedStep(batch, first, optim, tokens * updates)

    async def _with_logprobs(self, batch: StepBatch, field: str, *, base: bool) -> StepBatch:
        """Fill in the logprobs of the base, or of the policy at the start of the step."""
        logprobs: list[FloatArray] = []
        for segment in self._segments(batch):
            (found,) = await self._services.on_device(
                self._job.name,
                lambda segment=segment: self._services.trainer.forward(Batch((segment,)), base=base),  # type: ignore[misc]
            )
            logprobs.extend(found)
        return batch.with_logprobs(field, logprobs)

    def _segments(self, batch: StepBatch) -> tuple[Segment, ...]:
        job = self._job
        return batch.segments(
            job.name, job.algorithm, job.config.sampling.temperature, self._services.micro_batch_tokens
        )
