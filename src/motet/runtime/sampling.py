"""The sampling half of a job: problems of a step become groups of scored rollouts.

Samples depend on the job's seed (in evaluations, on the held-out problems), the step, the problem's place in it, and
the version; never on time. Two options give that up for speed and mark the job inexact: continuing rollouts under newer
versions (`algorithm.in_flight`), and taking the groups that finish first (`algorithm.over_provision`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from motet.chat.template import Chat
from motet.core.errors import EngineError, JobFailed
from motet.core.types import Group, Problem, Rollout, TurnParts
from motet.environments.episode import ENVIRONMENTS, GroupContext, OwnEnvironment
from motet.rewards.reward_answers import AnswerContext, ScoreOutcome, TrainerState, columns_of
from motet.runtime.generation import Generation, PutAside, Result, ended
from motet.runtime.group_requests import GroupRequests, GroupTask, SamplingPurpose
from motet.runtime.job import Job, Services
from motet.runtime.own_environment import own_environment
from motet.runtime.scheduler import FairScheduler
from motet.runtime.step_records import SampledStep, Supply
from motet.runtime.versions import Versions

_BEGUN_AT_ONCE = 16
"""Groups started before other tasks get the event loop."""
_WAITING = 64
"""Waiting requests of a job at which it starts no further groups, to limit the process's time and memory."""
_UNDER_WAY = 256
"""Groups of a job under way at which it starts no further ones, if the engine has no more rows: they may all wait for scores,
and all end in one turn of the event loop.
"""


async def _begun(
    tasks: asyncio.TaskGroup,
    works: Iterator[Coroutine[Any, Any, Result]],
    scheduler: FairScheduler,
    job: str,
    room: asyncio.Semaphore,
) -> list[asyncio.Task[Result]]:
    """Start works as tasks while few requests of the job wait and there is room, and yield to other tasks in between."""
    running = list[asyncio.Task[Result]]()
    while True:
        await room.acquire()
        if (work := next(works, None)) is None:
            room.release()
            return running
        running.append(task := tasks.create_task(work))
        task.add_done_callback(lambda _: room.release())
        await asyncio.sleep(0)
        await scheduler.few_wait(job, _WAITING)


async def _all_begun(
    running: dict[asyncio.Task[Result], GroupTask], works: Iterator[tuple[GroupTask, Coroutine[Any, Any, Result]]]
) -> None:
    """Start the works of groups as tasks, and yield to other tasks in between."""
    for group, work in works:
        running[asyncio.create_task(work)] = group
        if len(running) % _BEGUN_AT_ONCE == 0:
            await asyncio.sleep(0)


def _groups_of(
    problems: Sequence[Problem], running: Sequence[asyncio.Task[tuple[Rollout, ...] | None]], step: int, version: int
) -> list[Group]:
    return [Group(problem, step, version, task.result() or ()) for problem, task in zip(problems, running, strict=True)]


class JobSampler:
    """Samples the steps and evaluations of one job."""

    def __init__(self, job: Job, services: Services, versions: Versions, supply: Supply | None = None) -> None:
        self._job, self._services, self._versions = job, services, versions
        self.supply = supply or Supply()
        self._unfinished = sorted(self.supply.pending)
        """Positions that an earlier process began."""
        self._aside: list[GroupTask] = []
        self._scoring = 0
        """Groups that wait for scores."""
        self._own_environment: OwnEnvironment | None = None
        self._room = asyncio.Semaphore(max(_UNDER_WAY, services.scheduler.capacity))

    @property
    def _width(self) -> int:
        """Problems of a step that may be sampled."""
        return round(self._job.config.rl.groups_per_step * self._job.config.rl.oversampling)

    async def open(self) -> None:
        """Start the rewards and the environment.

        Raises:
            RewardError, EnvironmentFault: one of them cannot be used.
        """
        job, path, data = self._job, self._job.directory.path, self._job.data
        named = job.config.data.answer
        columns = await self._services.rows.run(job.tenant, lambda: columns_of(data.train, data.holdout, named=named))
        known = job.config.rewards, job.data.scorer, path / "rewards.log", columns
        await self._services.rewards.register(job.name, *known)
        if job.config.environment.own:
            self._own_environment = await own_environment(job, self._services)

    async def close(self) -> None:
        """Close the job's rewards and environment."""
        await self._services.rewards.unregister(self._job.name)
        if self._own_environment is not None:
            await self._own_environment.close()

    def waits(self, *, begun: bool) -> bool:
        """Whether the job waits for scores or an agent, `begun` or not, and does not use the device."""
        own = self._own_environment
        asked = self._scoring > 0 or (own is not None and (own.offers if begun else own.waits))
        return asked and self._services.scheduler.idle(self._job.name)

    async def step(self, step: int) -> SampledStep:
        """Wait until the step may be sampled, then sample and score its groups."""
        job, algorithm = self._job, self._job.config.rl
        version = max(0, step - algorithm.max_off_policy_steps)
        await self._versions.wait_for(version)
        width, over = self._width, algorithm.over_provision
        job.progress.phase, job.progress.rollouts_done = "sampling", 0
        job.progress.rollouts_wanted = (width if over > 1 else algorithm.groups_per_step) * algorithm.group_size
        purpose = SamplingPurpose(
            "train", job.seed, algorithm.group_size, job.sampling(), algorithm.in_flight == "continue",
            can_stop=over > 1, keeps=algorithm.same_groups,
        )  # fmt: skip
        if purpose.renew:
            job.note_inexact("rollouts under way go on under newer versions (algorithm.in_flight)")
        if over > 1:
            return await self._first_done(step, version, width, math.ceil(width * over), purpose)
        problems = await self._read((step * width, width))
        return await self._until_full(problems, step, version, purpose)

    async def evaluation(self, version: int, part: slice = slice(None), seed: int | None = None) -> SampledStep:
        """Sample and score a part of the held-out problems from a version; without a `seed`, that of all of them is taken."""
        job = self._job
        config, common = job.config.eval, job.config.eval.common_random_numbers

        def read() -> tuple[list[Problem], int]:
            return [*job.data.holdout[part]], job.data.evaluation_seed if seed is None else seed

        problems, own = await self._services.rows.run(job.tenant, read)
        purpose = SamplingPurpose("eval", own, config.n, job.evaluation_sampling(), common_numbers=common)
        return await self._all(problems, version, version, purpose, part.start or 0)

    async def _until_full(
        self, problems: Sequence[Problem], step: int, version: int, purpose: SamplingPurpose
    ) -> SampledStep:
        """Dynamic sampling: take problems in data order until enough groups have a signal.

        Their number depends on rewards alone. Without oversampling, all problems are taken.
        """
        wanted = self._job.config.rl.groups_per_step
        sampled = await self._all(problems[:wanted], step, version, purpose)
        while len(sampled.groups) < len(problems):
            missing = wanted - sum(group.has_signal for group in sampled.groups)
            if missing <= 0:
                break
            first = len(sampled.groups)
            self._job.progress.rollouts_wanted += min(missing, len(problems) - first) * purpose.n
            more = await self._all(problems[first : first + missing], step, version, purpose, first)
            sampled = sampled.with_more(more)
        return sampled

    async def _all(
        self, problems: Sequence[Problem], step: int, version: int, purpose: SamplingPurpose, first: int = 0
    ) -> SampledStep:
        """`first` is the index of the first problem in the step's window."""
        cost, started = purpose.cost, time.monotonic()
        with self._versions.hold(version):
            async with asyncio.TaskGroup() as tasks:
                wanted = (self._task(problem, place, step, purpose) for place, problem in enumerate(problems, first))
                works = (self._sample(task, version, purpose) for task in wanted)
                running = await _begun(tasks, works, self._services.scheduler, self._job.name, self._room)
        await self._versions.collect()
        groups = await asyncio.to_thread(_groups_of, problems, running, step, version)
        return SampledStep(step, version, groups, time.monotonic() - started, cost.reward_seconds, cost.tokens)

    async def _first_done(
        self, step: int, version: int, width: int, begin: int, purpose: SamplingPurpose
    ) -> SampledStep:
        """Begin more groups than a step trains, take those that finish first, and put the rest aside.

        The next steps wait for groups put aside, oldest first, so that each is trained within a few steps.
        """
        self._job.note_inexact("steps take the groups that are done first (algorithm.over_provision)")
        cost, started = purpose.cost, time.monotonic()
        aside, unfinished, self._aside, self._unfinished = self._aside, self._unfinished, [], []
        first, n = self.supply.position, max(0, begin - len(aside) - len(unfinished))
        self.supply.position += n
        self.supply.pending.update(range(first, first + n))
        # rows are read at once, so that no other step begins between them
        tasks = await self._tasks(unfinished, first, n, step, purpose)
        due = sorted([*aside, *tasks[: len(unfinished)]], key=lambda task: task.position)
        due, later, fresh = due[:width], due[width:], tasks[len(unfinished) :]
        with self._versions.hold(version):
            running: dict[asyncio.Task[tuple[Rollout, ...] | None], GroupTask] = {}
            try:
                begun = ((problem, self._sample(problem, version, purpose)) for problem in (*due, *later, *fresh))
                await _all_begun(running, begun)
                await _until_done(running, due, width)
                for task in running.values():
                    task.generation.stop.set()
                await asyncio.gather(*running)
            finally:
                await ended(running)
        await self._versions.collect()
        # in data order; groups due from earlier steps first
        done = [task for task in running.values() if task.rollouts is not None]
        taken = done[:width]
        self._aside += [task for task in running.values() if task not in taken]
        groups = [Group(task.problem, step, version, task.rollouts or ()) for task in taken]
        seconds, positions = time.monotonic() - started, tuple(task.position for task in taken)
        return SampledStep(step, version, groups, seconds, cost.reward_seconds, cost.tokens, positions)

    async def _read(self, *windows: tuple[int, int]) -> list[Problem]:
        """The problems from a first position on, as many as its window has."""
        job, width = self._job, self._width
        return await self._services.rows.run(
            job.tenant, lambda: [row for window in windows for row in job.data.window(*window, job.seed, width)]
        )

    async def _tasks(
        self, before: Sequence[int], first: int, n: int, step: int, purpose: SamplingPurpose
    ) -> list[GroupTask]:
        """Of some positions, and of n from a first one on."""
        problems = await self._read(*((position, 1) for position in before), *([(first, n)] if n else []))
        places = zip(problems, (*before, *range(first, first + n)), strict=True)
        return [self._task(problem, position, step, purpose) for problem, position in places]

    def _task(self, problem: Problem, position: int, step: int, purpose: SamplingPurpose) -> GroupTask:
        job = self._job
        generation = Generation(
            job=job.name,
            name=f"{job.name}/{purpose.name}/{step}/{position}",
            engine=self._services.engine,
            versions=self._versions,
            chat=job.chat,
            sampling=purpose.sampling,
            renew=purpose.renew,
            can_stop=purpose.can_stop,
            turns=job.config.environment.name != "single",
            payer=self._services.scheduler.payer(job.name),
        )
        return GroupTask(problem, position, step, generation)

    async def _sample(self, task: GroupTask, version: int, purpose: SamplingPurpose) -> tuple[Rollout, ...] | None:
        """Sample and score one group; None if it was put aside."""
        job, services, problem, generation = self._job, self._services, task.problem, task.generation
        generation.stop.clear()
        requests, cost = GroupRequests(job, services, task, version, purpose), purpose.cost

        under_way = job.progress.training if purpose.name == "train" else job.progress.held_out

        async def score(rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
            started = time.monotonic()
            with under_way.scored(len(rollouts)):
                scored = await self._scored(task, rollouts)
            cost.reward_seconds += time.monotonic() - started
            if any(item.clock_limited for item in scored):
                job.note_inexact("a reward ran into its wall-clock limit, was killed, or could not be asked")
            return scored

        batch, own = purpose.batch(task.step), job.config.environment.own
        if task.rollouts is None and purpose.keeps:
            task.rollouts, tokens = job.finished.take_up(batch, task.position, generation)
            cost.tokens += tokens
        if task.rollouts is None:
            try:
                context = GroupContext(
                    problem,
                    job.chat.of_row(problem),
                    purpose.n,
                    requests.generator(),
                    score,
                    purpose.key(task),
                    bool(job.config.rewards),
                    purpose.sampling,
                    generation.release,
                    {role: requests.generator(role) for role in job.config.team},
                )
                with under_way.sampled(purpose.n):
                    task.rollouts = await self._environment(context)
            except EngineError as error:
                task.rollouts = tuple(Rollout(problem, index, (), (), error=str(error)) for index in range(purpose.n))
            except PutAside:
                await asyncio.wait(requests.open)  # the turns of a group run concurrently, and each keeps its draft
                return None
            finally:
                await ended(requests.open)
                await generation.release(*range(purpose.n))
                if purpose.keeps:
                    job.finished.add(batch, task.position, generation, task.rollouts, own=own)
        if cost.excess:
            raise JobFailed(cost.excess)
        if purpose.name == "train":
            job.progress.rollouts_done = min(job.progress.rollouts_done + purpose.n, job.progress.rollouts_wanted)
        return task.rollouts

    async def _environment(self, context: GroupContext) -> tuple[Rollout, ...]:
        own = self._own_environment
        if own is None:
            return await ENVIRONMENTS[self._job.config.environment.name](context)
        rollouts = await own.run_group(context)
        if own.clock_limited:
            self._job.note_inexact("the environment ran into its wall-clock limit, or was killed")
        return rollouts

    async def _scored(self, task: GroupTask, rollouts: Sequence[Rollout]) -> list[ScoreOutcome]:
        if not self._job.config.rewards:  # a teacher judges them
            return [ScoreOutcome(0.0, {}) for _ in rollouts]
        texts = [rollout.completion for rollout in rollouts]
        context = _context(self._job, task.step, self._width, rollouts)
        self._scoring += 1
        try:
            return await self._services.rewards.score(self._job.name, task.problem, texts, context)
        finally:
            self._scoring -= 1


def _context(job: Job, step: int, width: int, rollouts: Sequence[Rollout]) -> AnswerContext:
    """What rewards may see of answers; the conversations only where they are more than a prompt and one turn."""
    config = job.config
    several = config.environment.own or config.environment.turns > 1
    parts = [rollout.turns[-1].parts if rollout.turns else TurnParts() for rollout in rollouts]
    plain = all(own == TurnParts(speech=rollout.completion) for own, rollout in zip(parts, rollouts, strict=True))
    return AnswerContext(
        [rollout.transcript for rollout in rollouts] if several else [],
        [] if plain else parts,
        lambda: [_with_tokens(job.chat, rollout) for rollout in rollouts],
        TrainerState.at(step, config.steps, width, len(job.data.train)),
    )


def _with_tokens(chat: Chat, rollout: Rollout) -> tuple[str, str]:
    """The prompt, and the whole conversation, with special tokens."""
    prompt, whole = rollout.prompt_ids.tolist(), rollout.branches[-1].token_ids.tolist()
    return "".join(chat.token_texts(prompt)), "".join(chat.token_texts(whole))


async def _until_done(
    running: dict[asyncio.Task[tuple[Rollout, ...] | None], GroupTask], due: list[GroupTask], width: int
) -> None:
    """Wait until `width` groups are done, and all that are due."""
    waiting = set(running)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises the job's error
        if len(running) - len(waiting) >= width and not any(running[task] in due for task in waiting):
            return
