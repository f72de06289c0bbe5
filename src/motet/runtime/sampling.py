"""The sample loop's half of a job: problems of a step become groups of scored rollouts.

What is sampled is a function of the job's seed, the step, the problem's place in it and the version; never of when.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from motet import seeds
from motet.errors import EngineError
from motet.runtime.job import Job, Services
from motet.runtime.versions import Versions
from motet.tasks.dataset import data_window
from motet.tasks.episode import ENVIRONMENTS
from motet.tasks.reward_pool import Scored
from motet.types import AdapterRef, Chunk, GenerateRequest, Group, IntArray, Problem, Rollout, SamplingParams

_request_numbers = itertools.count()


@dataclass
class SampledStep:
    """All groups of one step, in data order, and what they cost."""

    step: int
    version: int
    groups: list[Group]
    seconds: float
    reward_seconds: float
    tokens: int
    """Tokens that were sampled."""


@dataclass
class _Cost:
    tokens: int = 0
    reward_seconds: float = 0.0
    requests: set[str] = field(default_factory=set)


class JobSampler:
    """Samples the steps and evaluations of one job."""

    def __init__(self, job: Job, services: Services, versions: Versions) -> None:
        self._job = job
        self._services = services
        self._versions = versions

    async def step(self, step: int) -> SampledStep:
        """Wait until the step may be sampled, then sample and score all its groups."""
        job, algorithm = self._job, self._job.config.algorithm
        version = max(0, step - algorithm.max_off_policy_steps)
        await self._versions.wait_for(version)
        width = round(algorithm.groups_per_step * algorithm.oversampling)
        problems = data_window(job.data.train, step, width, job.seed, job.config.data.shuffle)
        job.progress.phase, job.progress.rollouts_done = "sampling", 0
        job.progress.rollouts_wanted = width * algorithm.group_size
        return await self._sample(problems, step, version, "train", algorithm.group_size, job.sampling())

    async def evaluation(self, version: int) -> SampledStep:
        """Sample and score the held-out problems from a published version."""
        job = self._job
        return await self._sample(
            job.data.holdout, version, version, "eval", job.config.eval.n, job.evaluation_sampling()
        )

    async def _sample(
        self, problems: Sequence[Problem], step: int, version: int, purpose: str, n: int, sampling: SamplingParams
    ) -> SampledStep:
        cost, started = _Cost(), time.monotonic()
        with self._versions.hold(version) as ref:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._group(problem, place, step, purpose, n, sampling, ref, cost))
                    for place, problem in enumerate(problems)
                ]
        await self._versions.collect()
        groups = [Group(problem, step, version, task.result()) for problem, task in zip(problems, running, strict=True)]
        return SampledStep(step, version, groups, time.monotonic() - started, cost.reward_seconds, cost.tokens)

    async def _group(
        self,
        problem: Problem,
        place: int,
        step: int,
        purpose: str,
        n: int,
        sampling: SamplingParams,
        ref: AdapterRef,
        cost: _Cost,
    ) -> tuple[Rollout, ...]:
        job, services = self._job, self._services

        async def generate(prompt_ids: IntArray, indices: tuple[int, ...], turn: int) -> list[Chunk]:
            keys = tuple(seeds.key(job.seed, purpose, step, place, problem.id, index, turn) for index in indices)
            name = f"{job.name}/{purpose}/{step}/{place}/{turn}/{next(_request_numbers)}"
            request = GenerateRequest(name, job.name, prompt_ids, ref, sampling, keys)
            async with services.scheduler.permit(job.name, len(indices)):
                chunks = [chunk async for chunk in services.engine.generate(request)]
                tokens = sum(len(chunk.token_ids) for chunk in chunks)
                services.scheduler.spend(job.name, tokens)  # before whoever is next is chosen
            cost.tokens += tokens
            job.progress.tokens += tokens
            return sorted(chunks, key=lambda chunk: chunk.index)

        async def score(problem: Problem, completions: list[str]) -> list[Scored]:
            started = time.monotonic()
            scored = await services.rewards.score(job.name, problem, completions)
            cost.reward_seconds += time.monotonic() - started
            if any(item.clock_limited for item in scored):
                job.note_inexact("a reward ran into its wall-clock limit")
            return scored

        try:
            rollouts = await ENVIRONMENTS[job.config.environment].run(problem, job.chat, n, generate, score)
        except EngineError as error:
            rollouts = tuple(_failed(problem, index, str(error)) for index in range(n))
        if purpose == "train":
            job.progress.rollouts_done += n
        return rollouts


def _failed(problem: Problem, index: int, reason: str) -> Rollout:
    empty = np.zeros(0, np.int32)
    nothing = np.zeros(0, np.float32)
    return Rollout(problem, index, empty, np.zeros(0, np.bool_), nothing, empty, (), error=reason)
