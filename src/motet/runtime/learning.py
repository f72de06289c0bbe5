"""From the groups of a step to the next version: samples, what they need, micro-batches, and one or more optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.schedule import adamw
from motet.batch import LossStats, OptimStats, Segment
from motet.runtime.reference import Reference
from motet.runtime.sampling import SampledStep
from motet.runtime.session import Session


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


async def learn(
    session: Session, reference: Reference, sampled: SampledStep, *, with_reference: bool
) -> LearnedStep:
    """All updates of a step. Without a trainable sample the weights stay as they are (and no moment decays)."""
    job = session.job
    algorithm, sampling = job.config.rl, job.config.sampling
    batch = algorithm.batch(sampled.groups, sampling.max_tokens)

    def segments() -> tuple[Segment, ...]:
        return batch.segments(job.name, algorithm, sampling.temperature, session.services.micro_batch_tokens)

    if batch.samples and (algorithm.needs_reference or with_reference):
        batch = batch.with_logprobs("reference_logprobs", await reference.logprobs(segments()))
        batch = algorithm.weighed(batch)
    if batch.samples and algorithm.needs_proximal:
        batch = batch.with_logprobs("proximal_logprobs", await session.forward(segments()))
    return await train(session, batch, segments(), sampled.step, algorithm.updates_per_batch)


async def train(
    session: Session, batch: StepBatch, segments: tuple[Segment, ...], step: int, updates: int = 1
) -> LearnedStep:
    """So many optimizer updates on the segments of a step."""
    job, scheduler = session.job, session.services.scheduler
    if not batch.samples:
        return LearnedStep(batch, LossStats(), None, 0)
    first, optim = LossStats(), None
    with scheduler.working(job.name):
        for update in range(updates):
            trained = await session.forward_backward(segments)
            scheduler.spend(job.name, batch.tokens)
            optim = await session.optim_step(adamw(job.config.optimizer, job.base_rate, step, job.config.steps))
            if update == 0:
                first = sum((one.stats for one in trained), LossStats())
    return LearnedStep(batch, first, optim, batch.tokens * updates)
