"""From the groups of a step to the next version: samples, reference logprobs, micro-batches and optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.critic import credited
from motet.batch import LossStats, Segment, Trained
from motet.runtime.critic import Critic
from motet.runtime.learning_rate import adamw
from motet.runtime.reference import Reference
from motet.runtime.session import Session
from motet.runtime.steps import LearnedStep, SampledStep, Valued


@dataclass(frozen=True)
class _Lesson:
    """Training data of a critic in the same step."""

    critic: Critic
    segments: tuple[Segment, ...]
    explained: float


async def learn(
    session: Session, reference: Reference, critic: Critic | None, sampled: SampledStep, *, with_reference: bool
) -> LearnedStep:
    """Run all updates of a step. Without a trainable sample, weights and moments stay unchanged."""
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
    lesson = None
    if batch.samples and critic is not None:
        credit = credited(batch, await critic.values(batch), critic.config)
        batch, lesson = credit.policy, _Lesson(critic, critic.segments(credit.critic), credit.explained)
    return await train(session, batch, segments(), sampled.step, algorithm.updates_per_batch, lesson)


async def train(
    session: Session,
    batch: StepBatch,
    segments: tuple[Segment, ...],
    step: int,
    updates: int = 1,
    lesson: _Lesson | None = None,
) -> LearnedStep:
    """Run `updates` optimizer updates on the segments of a step, with a critic's segments in the same packed batches."""
    job = session.job
    if not batch.samples:
        return LearnedStep(batch, LossStats(), None, 0)
    first, optim, valued = LossStats(), None, None
    if lesson is not None and step < lesson.critic.config.warmup_steps:  # only the critic trains during its warm-up
        segments = ()
    beside = () if lesson is None else lesson.segments
    tokens = batch.tokens * (bool(segments) + bool(beside))
    with session.services.scheduler.working(job.name):
        for update in range(updates):
            trained = await session.forward_backward((*segments, *beside))
            if segments:
                optim = await session.optim_step(adamw(job.config.optimizer, job.base_rate, step, job.config.steps))
            if lesson is not None:
                await lesson.critic.optim_step(step)
            if update == 0:
                first = _summed(trained[: len(segments)])
                valued = None if lesson is None else Valued(_summed(trained[len(segments) :]).loss, lesson.explained)
    return LearnedStep(batch, first, optim, tokens * updates, valued)


def _summed(trained: Sequence[Trained]) -> LossStats:
    return sum((one.stats for one in trained), LossStats())
