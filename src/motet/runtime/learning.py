"""From the groups of a step to the next version: samples, reference logprobs, micro-batches and optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from motet.algorithms.algorithm import StepBatch
from motet.algorithms.critic import CriticConfig, ValueLoss, credited
from motet.config import AdapterConfig
from motet.core import seeds
from motet.core.batch import LossStats, OptimStats, Segment, Trained
from motet.core.types import FloatArray
from motet.environments.team import groups_of
from motet.protocols import Trainer
from motet.runtime.reference import Reference
from motet.runtime.session import Session, Slot
from motet.runtime.step_records import LearnedStep, SampledStep, Valued
from motet.runtime.versions import adapter_name

Result = TypeVar("Result")


class Critic:
    """A second adapter with a value head, in the job's packed batches and commits: it predicts values of samples."""

    def __init__(self, session: Session, config: CriticConfig) -> None:
        self._session, self.config = session, config
        self._name = f"{session.job.name}#critic"
        self._slot = Slot(session, self._name)

    async def open(self) -> None:
        """Take a slot, before the session opens, which then loads and commits the critic too."""
        session, config = self._session, self.config
        shape = AdapterConfig(rank=config.rank, target_modules=session.job.config.adapter.target_modules)
        seed = seeds.key(session.job.seed, "critic") % (1 << 48)
        await self._slot.take(shape, seed, head=True)
        session.beside.append(self)

    async def close(self) -> None:
        """Release the slot."""
        await self._slot.give_back()

    async def values(self, batch: StepBatch) -> Sequence[FloatArray]:
        """Predicted values of sampled tokens, [T] for each sample."""
        return await self._session.work.forward(await _apart(self._session, lambda: self.segments(batch)))

    def segments(self, batch: StepBatch) -> tuple[Segment, ...]:
        """Micro-batches of samples for the critic."""
        return batch.segments(self._name, ValueLoss(self.config.clip), 1.0, self._session.services.micro_batch_tokens)

    async def optim_step(self, step: int) -> OptimStats:
        """Clip the gradient, update, and clear the gradient."""
        job = self._session.job
        rate = job.base_rate if self.config.lr == "auto" else self.config.lr
        settings = job.config.optimizer.at(rate, step, job.config.steps)
        return await self._session.work.optim_step(settings, name=self._name)

    def save(self, directory: Path) -> None:
        """Write adapter, head and moments into a commit."""
        place = _place(directory)
        place.mkdir()
        self._session.services.trainer.save_adapter(self._name, place, optimizer=True, gradient=False)

    def load(self, trainer: Trainer, directory: Path) -> None:
        """Read what `save` wrote."""
        trainer.load_adapter(self._name, _place(directory), optimizer=True)


def _place(directory: Path) -> Path:
    """The critic's directory in a commit; versions contain only the policy's files."""
    return directory / "critic"


@dataclass(frozen=True)
class _Lesson:
    """Training data of a critic in the same step."""

    critic: Critic
    segments: tuple[Segment, ...]
    explained: float


@dataclass(frozen=True)
class Share:
    """What a step trains of one adapter."""

    batch: StepBatch
    segments: tuple[Segment, ...]
    role: str = ""
    """Of a team."""


async def learn(
    session: Session, reference: Reference, critic: Critic | None, sampled: SampledStep, *, with_reference: bool
) -> LearnedStep:
    """Run all updates of a step. Without a trainable sample, weights and moments stay unchanged."""
    updates = session.job.config.rl.updates_per_batch
    if session.job.config.team:
        shares = [
            await _share(session, reference, sampled, member.role, with_reference=with_reference)
            for member in session.members
        ]
        learned = await train(session, shares, sampled.step, updates)
        return _of_team({share.role: step for share, step in zip(shares, learned, strict=True)})
    share, lesson = await _share(session, reference, sampled, "", with_reference=with_reference), None
    if share.batch.samples and critic is not None:
        values = await critic.values(share.batch)
        credit = await _apart(session, lambda: credited(share.batch, values, critic.config))
        segments = await _apart(session, lambda: critic.segments(credit.critic))
        lesson = _Lesson(critic, segments, credit.explained)
        share = Share(credit.policy, await _segments(session, credit.policy))
    return (await train(session, [share], sampled.step, updates, lesson))[0]


async def _apart(session: Session, work: Callable[[], Result]) -> Result:
    """The result of work that grows with a step, outside the event loop."""
    return await session.services.rows.run(session.job.tenant, work)


async def _segments(session: Session, batch: StepBatch, role: str = "") -> tuple[Segment, ...]:
    job, tokens = session.job, session.services.micro_batch_tokens
    name, temperature = adapter_name(job.name, role), job.config.sampling.temperature
    return await _apart(session, lambda: batch.segments(name, job.config.rl, temperature, tokens))


async def _share(
    session: Session, reference: Reference, sampled: SampledStep, role: str, *, with_reference: bool
) -> Share:
    """The samples of one adapter, with all logprobs that its algorithm needs."""
    algorithm = session.job.config.rl
    most = session.job.config.sampling.max_tokens
    batch = await _apart(session, lambda: algorithm.batch(groups_of(sampled.groups, role), most))
    if batch.samples and (algorithm.needs_reference or with_reference):
        logprobs = await reference.logprobs(await _segments(session, batch, role))
        batch = await _apart(session, partial(batch.with_logprobs, "reference_logprobs", logprobs))
    batch = await _apart(session, partial(algorithm.weighed, batch)) if batch.samples else batch
    if batch.samples and algorithm.needs_proximal:
        logprobs = await session.work.forward(await _segments(session, batch, role))
        batch = await _apart(session, partial(batch.with_logprobs, "proximal_logprobs", logprobs))
    return Share(batch, await _segments(session, batch, role), role)


async def train(
    session: Session, shares: Sequence[Share], step: int, updates: int = 1, lesson: _Lesson | None = None
) -> list[LearnedStep]:
    """Run optimizer updates of each adapter on its share, with a critic's lesson, all in the same packed batches."""
    job, firsts, valued = session.job, [LossStats()] * len(shares), None
    optims: list[OptimStats | None] = [None] * len(shares)
    segments = [share.segments if share.batch.samples else () for share in shares]
    if lesson is not None and step < lesson.critic.config.warmup_steps:  # only the critic trains during its warm-up
        segments = [()]
    beside = () if lesson is None else lesson.segments
    if not any((*segments, beside)):
        return [LearnedStep(share.batch, LossStats(), None, 0) for share in shares]
    with session.services.scheduler.working(job.name):
        for update in range(updates):
            trained = await session.work.forward_backward((*(segment for own in segments for segment in own), *beside))
            for place, (share, own) in enumerate(zip(shares, segments, strict=True)):
                if own:
                    settings = job.config.optimizer.at(job.rate_of(share.role), step, job.config.steps)
                    optims[place] = await session.work.optim_step(settings, share.role)
            if lesson is not None:
                await lesson.critic.optim_step(step)
            if update == 0:
                results = iter(trained)
                firsts = [_summed([next(results) for _ in own]) for own in segments]
                valued = None if lesson is None else Valued(_summed(list(results)).loss, lesson.explained)
    return [
        LearnedStep(share.batch, first, optim, share.batch.tokens * (bool(own) + bool(beside)) * updates, valued)
        for share, own, first, optim in zip(shares, segments, firsts, optims, strict=True)
    ]


def _summed(trained: Sequence[Trained]) -> LossStats:
    return sum((result.stats for result in trained), LossStats())


def _of_team(learned: Mapping[str, LearnedStep]) -> LearnedStep:
    """The steps of all roles as one."""
    steps = list(learned.values())
    samples = tuple(sample for step in steps for sample in step.batch.samples)
    batch = StepBatch(samples, 1.0, max(step.batch.groups for step in steps))
    stats = sum((step.stats for step in steps), LossStats())
    optims = [step.optim for step in steps if step.optim is not None]
    return LearnedStep(batch, stats, _together(optims), sum(step.tokens for step in steps), roles=learned)


def _together(optims: Sequence[OptimStats]) -> OptimStats | None:
    """The norms of all roles' vectors in one, the largest rate, and whether any was skipped."""
    if not optims:
        return None
    norms = [optim.adapter_norm for optim in optims]
    return OptimStats(
        grad_norm=math.hypot(*(optim.grad_norm for optim in optims)),
        lr=max(optim.lr for optim in optims),
        skipped=any(optim.skipped for optim in optims),
        adapter_norm=math.hypot(*(norm or 0.0 for norm in norms)) if all(norm is not None for norm in norms) else None,
    )
