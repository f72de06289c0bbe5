"""What one group of rollouts asks the engine for, in its turn, and what that costs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np

from motet.config.step_tokens import check_calls
from motet.core import seeds
from motet.core.errors import EngineError
from motet.core.types import Chunk, IntArray, Problem, Rollout, SamplingParams
from motet.environments.episode import Generate
from motet.runtime.finished_groups import BatchName
from motet.runtime.generation import Generation, together
from motet.runtime.job import Job, Services


@dataclass
class SamplingCost:
    """What the groups of a step cost."""

    tokens: int = 0
    reward_seconds: float = 0.0
    read: int = 0
    """Tokens of prompts, without those that a rollout's last call had too: the base keeps these."""
    excess: str = ""
    """Why nothing more is sampled; empty if more may be."""


@dataclass(eq=False)
class GroupTask:
    """One group; a group that was put aside resumes with its drafts."""

    problem: Problem
    position: int
    """In the step's window; with over-provisioning, in the whole sequence of problems."""
    step: int
    """The step that it was begun for; its seeds depend on it."""
    generation: Generation
    rollouts: tuple[Rollout, ...] | None = None
    """Set once it is complete."""


@dataclass(frozen=True)
class SamplingPurpose:
    """Sampling settings for training or evaluation."""

    name: str
    """`train` or `eval`; part of the random seed."""
    seed: int
    """The job's for training; for evaluation that of the held-out problems."""
    n: int
    """Completions per problem."""
    sampling: SamplingParams
    renew: bool = False
    can_stop: bool = False
    common_numbers: bool = False
    """Whether every step uses the same random numbers."""
    keeps: bool = True
    """Whether finished groups stay in memory if the job gives its slot away before the step's end."""
    cost: SamplingCost = field(default_factory=SamplingCost)
    """What its groups have cost so far."""

    def batch(self, step: int) -> BatchName:
        """The name of all groups of a step."""
        return self.name, step, self.seed

    def key(self, task: GroupTask, *parts: int) -> int:
        """The random key of a group."""
        step = 0 if self.common_numbers else task.step
        return seeds.key(self.seed, self.name, step, task.position, task.problem.id, *parts)


@dataclass(eq=False)
class GroupRequests:
    """What one group asks the engine for."""

    job: Job
    services: Services
    task: GroupTask
    version: int
    purpose: SamplingPurpose
    open: set[asyncio.Task[list[Chunk]]] = field(default_factory=set)
    _last: dict[tuple[int, str], IntArray] = field(default_factory=dict)
    """All tokens of a rollout's last call, by role."""

    def generator(self, role: str = "") -> Generate:
        """What draws completions of the job's adapter, or of a role's of its team."""

        async def generate(
            prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None, /
        ) -> list[Chunk]:
            self._count(role, prompt_ids, indices)
            call = asyncio.create_task(self._complete(role, prompt_ids, indices, turn, sampling))
            self.open.add(call)
            chunks = await self.task.generation.result_of(call)
            for chunk in chunks:
                self._last[chunk.index, role] = np.concatenate([prompt_ids, chunk.token_ids])
            return chunks

        return generate

    def _count(self, role: str, prompt_ids: IntArray, indices: tuple[int, ...]) -> None:
        """Count the tokens of a prompt. Raises EngineError if the step's calls have had too many."""
        cost, most = self.purpose.cost, self.services.steps.of(self.job.tenant)
        read = [self._new_tokens(role, prompt_ids, index) for index in indices]
        cost.read += sum(read)
        if most is not None:
            cost.excess = cost.excess or check_calls(self.job.config, self.purpose.name, cost.read + cost.tokens, most)
        if cost.excess:
            raise EngineError(cost.excess)
        self.services.scheduler.read[self.job.name] += max(read)  # completions of one call share its prompt

    def _new_tokens(self, role: str, prompt_ids: IntArray, index: int) -> int:
        before = self._last.get((index, role))
        goes_on = before is not None and np.array_equal(prompt_ids[: len(before)], before)
        return len(prompt_ids) - (len(before) if before is not None and goes_on else 0)

    async def _complete(
        self, role: str, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None
    ) -> list[Chunk]:
        pieces = self.services.scheduler.pieces(len(indices))
        asked = [self._piece(role, prompt_ids, indices[part], turn, sampling) for part in pieces]
        return [chunk for chunks in await together(asked) for chunk in chunks]

    async def _piece(
        self, role: str, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None
    ) -> list[Chunk]:
        job, services, generation = self.job, self.services, self.task.generation
        keys = {index: self.purpose.key(self.task, index, turn) for index in indices}
        async with contextlib.AsyncExitStack() as admitted:
            permit = services.scheduler.permit(job.name, len(indices))
            await generation.unless_stopped(admitted.enter_async_context(permit))
            before = generation.sampled(turn, indices)
            try:
                return await generation.complete(prompt_ids, keys, turn, self.version, sampling, role)
            finally:
                tokens = generation.sampled(turn, indices) - before
                services.scheduler.spend(job.name, tokens)  # before the next request is chosen
                self.purpose.cost.tokens += tokens
                job.progress.tokens += tokens
                job.open_work.add(sampled=tokens)
