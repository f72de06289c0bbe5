"""Reinforcement learning, step by step: sample → learn → record → commit → publish.

Sampling runs up to `max_off_policy_steps` ahead; steps are learned in order.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from motet.core.errors import JobFailed
from motet.core.types import NOT_JUDGED, Group
from motet.rewards import reference_check
from motet.runtime.checkpoint import Committed
from motet.runtime.driver import Driver
from motet.runtime.generation import ended
from motet.runtime.held_out import deciding, mean_of
from motet.runtime.job import Job, Services
from motet.runtime.learning import Critic, learn
from motet.runtime.metrics import errors_of, evaluation_record, range_of, rollout_records, step_record
from motet.runtime.replay_log import exact_rows
from motet.runtime.sampling import JobSampler
from motet.runtime.session import Evaluated, FinishedStep
from motet.runtime.shielded import uninterrupted
from motet.runtime.step_records import LearnedStep, SampledStep, Supply

Result = TypeVar("Result")


class RolloutLoop(Driver):
    """Trains an adapter on its own rollouts."""

    evaluation_seconds = ("sample", "reward", "train")

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        super().__init__(job, services, committed)
        done = self.session.done
        supply = Supply(done.position, set(done.pending))
        self._sampler = JobSampler(job, services, self.session.versions, supply)
        self._steps: dict[int, asyncio.Task[SampledStep]] = {}
        self._evaluation: asyncio.Task[SampledStep] | None = None
        critic = job.config.rl.needs_values
        self._critic = None if critic is None else Critic(self.session, critic)

    async def begin(self) -> None:
        """Start rewards, environment and critic."""
        await self._sampler.open()
        job = self.job
        if job.tenant and not self.session.done.steps and self._sampler.supply.position == 0:
            known = self.services.rewards, job.name, job.config.rewards, job.data, job.config.data.answer
            for found in await reference_check.note(*known):
                job.note(found)
        if self._critic is not None:
            await self._critic.open()

    async def step(self, step: int) -> None:
        """Do one step: sample rollouts, learn (gradients and the optimizer's updates), evaluate, commit.

        The driver then publishes the new version.
        """
        sampled = await self._sampled(step)
        learned, seconds = await self._learned(sampled)
        evaluated = await self.evaluated()
        held = await self._commit(sampled, learned, seconds, evaluated)
        del sampled, learned
        await self._apart(partial(_let_go, *held))

    async def _learned(self, sampled: SampledStep) -> tuple[LearnedStep, dict[str, float]]:
        """The step's updates, and the seconds of its parts."""
        self.job.progress.phase, started = "training", time.monotonic()
        wanted = self.job.evaluates(sampled.step)
        learned = await learn(self.session, self.reference, self._critic, sampled, with_reference=wanted)
        took = time.monotonic() - started
        return learned, {"sample": sampled.seconds, "reward": sampled.reward_seconds, "train": took}

    async def _commit(
        self, sampled: SampledStep, learned: LearnedStep, seconds: Mapping[str, float], evaluated: Evaluated | None
    ) -> tuple[list[Any], ...]:
        """Record and commit the step; gives what is no longer needed, to be freed outside the event loop."""
        self._sampler.supply.pending.difference_update(sampled.positions)
        finished = await self._apart(partial(self._finished, sampled, learned, seconds))
        await self.session.finish(finished, evaluated, commit=self.commits)
        known, step = self.job.finished, sampled.step
        kept = known.forget("train", step), known.forget("eval", self.session.done.evaluated)
        return *kept, sampled.groups, [*learned.batch.samples]

    def _finished(self, sampled: SampledStep, learned: LearnedStep, seconds: Mapping[str, float]) -> FinishedStep:
        supply, rows = self._sampler.supply, rollout_records(sampled, "train", self.job.chat.token_texts)
        return FinishedStep(
            record=step_record(sampled, learned),
            seconds=seconds,
            optim=learned.optim,
            tokens_sampled=sampled.tokens,
            tokens_trained=learned.tokens,
            position=supply.position,
            pending=supply.pending,
            rollouts=exact_rows(sampled, rows) if self.services.exact_logs else rows,
            errors=errors_of(sampled.groups),
            reward_range=range_of(sampled.groups),
        )

    def published(self, version: int) -> None:
        """Start the sampling that this version allows."""
        if self.evaluates(version) and self.session.done.evaluated < version:
            self._evaluation = asyncio.create_task(self._sampler.evaluation(version))
        last = min(self.job.config.steps, version + self.job.config.algorithm.lag + 1)
        for step in range(version, last):
            if not self._pause and not self.ended:
                self._begin(step)

    async def evaluated(self) -> Evaluated | None:
        """The evaluation of the current step's starting version; waits until it is done."""
        if self._evaluation is None:
            return None
        self.job.progress.phase = "evaluating"
        sampled = await self._evaluation
        self._evaluation = None
        name = f"eval-{sampled.version}"
        await self._check(sampled, "eval", name)
        lines = rollout_records(sampled, "eval", self.job.chat.token_texts)
        await uninterrupted(asyncio.to_thread(self.job.directory.write_rollouts, name, lines))
        record, score = await self._apart(lambda: self._figures(sampled))
        self.job.progress.evaluated(sampled.version, record)
        await self._apart(partial(_let_go, sampled.groups))
        return Evaluated(sampled.version, record, score, tokens=sampled.tokens)

    def _figures(self, sampled: SampledStep) -> tuple[dict[str, Any], float]:
        """The record of an evaluation, and what decides between versions."""
        record = evaluation_record(sampled)
        score = float(record["reward"])
        if self.job.config.eval.confirm and math.isfinite(score):
            rows = [mean_of([rollout.reward for rollout in group.scored]) for group in sampled.groups]
            score = mean_of(deciding(rows))
        return record, score

    async def _apart(self, work: Callable[[], Result]) -> Result:
        """The result of work that grows with a step, outside the event loop."""
        return await self.services.rows.run(self.job.tenant, work)

    async def leave(self) -> None:
        """Stop sampling, and close rewards and environment."""
        await ended([*self._steps.values(), *([self._evaluation] if self._evaluation else [])])
        try:
            await self._sampler.close()
        finally:
            if self._critic is not None:
                await self._critic.close()

    @property
    def waits(self) -> bool:
        """Whether the job waits for external scores and does not use the device."""
        return self._sampler.waits(begun=False)

    @property
    def outside(self) -> bool:
        """Whether the job waits for somebody outside, who may be at work, and does not use the device."""
        return self._sampler.waits(begun=True)

    def pause(self) -> None:
        """Stop after the current step; at once if it waits for scores and no scorer is connected."""
        super().pause()
        self.services.rewards.rest(self.job.name, True)

    def go_on(self) -> None:
        """Cancel `pause`, and ask for scores again."""
        super().go_on()
        self.services.rewards.rest(self.job.name, False)

    def _begin(self, step: int) -> asyncio.Task[SampledStep]:
        if step not in self._steps:
            self._steps[step] = asyncio.create_task(self._sampler.step(step))
        return self._steps[step]

    async def _sampled(self, step: int) -> SampledStep:
        task = self._begin(step)
        sampled = await task
        del self._steps[step]
        await self._check(sampled, "train", str(step))
        return sampled

    async def _check(self, sampled: SampledStep, purpose: str, name: str) -> None:
        """Stop a job whose rollouts mostly fail; they are logged first, so that somebody can read why."""
        try:
            await self._apart(lambda: check_failures(sampled.groups, self.job.config.rl.max_failed_fraction))
        except JobFailed:
            lines = rollout_records(sampled, purpose, self.job.chat.token_texts)
            await uninterrupted(asyncio.to_thread(self.job.directory.write_rollouts, name, lines))
            raise


def _let_go(*held: list[Any]) -> None:
    """Free what is held piece by piece: all at once, it would keep the interpreter from the event loop."""
    for pieces in held:
        while pieces:
            pieces.pop()


def check_failures(groups: Sequence[Group], limit: float) -> None:
    """Stop a job whose rollouts mostly fail; that no reward applies to a rollout is no failure.

    Raises:
        JobFailed: with the most common reason.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.error for rollout in rollouts if rollout.error and not rollout.error.startswith(NOT_JUDGED)]
    if rollouts and len(errors) > limit * len(rollouts):
        counts = Counter(errors)
        commonest = max(sorted(counts), key=counts.__getitem__)
        raise JobFailed(
            f"{len(errors)} of {len(rollouts)} rollouts have no reward, commonest reason: {commonest} "
            f"(limit: algorithm.max_failed_fraction = {limit:g})"
        )
