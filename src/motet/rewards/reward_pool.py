"""Scores completions in processes: a reward that hangs, floods memory or dies costs only one rollout.

A job's own code has its own processes. So a hanging reward delays only its own job, and changes to a process (modules,
random state, environment) cannot affect another job's scores. A single job uses up to `workers` processes; with several
jobs, each keeps at least one. Rewards that wait rather than compute get more processes, so that many calls wait at once.
Motet's own rewards are run by processes for all jobs (`shared_workers`). Rewards that are scored elsewhere
(`reward_elsewhere`) need no process: the pool calls the given function.

A call's outcome must not depend on what its process did before. So a process is replaced after a call that ran out of
CPU time or memory, and a call that ran out of memory or ended a used process is tried once more in a fresh one. A call
whose process is killed by a signal that Motet did not send is tried again at most twice; then it counts as chance.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from motet.config import RewardConfig
from motet.core.errors import EngineError, RewardError
from motet.core.types import Message, Problem, TurnParts
from motet.data.reasoning import ScorerSpec
from motet.rewards import reward_elsewhere
from motet.rewards.reward_answers import (
    NO_CONTEXT,
    AnswerContext,
    ScoreOutcome,
    TrainerState,
    as_given,
    problem_as_given,
)
from motet.rewards.reward_elsewhere import (
    ELSEWHERE,
    NO_DETAILS,
    AnswerDetails,
    Chance,
    Elsewhere,
    Judging,
    ScoreOrReason,
    labels_of,
    summed,
    to_send,
)
from motet.rewards.reward_installed import Installed, without_folder
from motet.rewards.reward_messages import ScoreCompletions
from motet.rewards.reward_walls import Walls
from motet.rewards.reward_workers import AT_ONCE, WorkerGroup, load_request
from motet.rewards.rewards import BUILTIN
from motet.rewards.shared_workers import SharedGroup, SharedProcesses
from motet.workers.worker_link import LONGEST_FAULT, ClockLimitError, ProcessDiedError


@dataclass(frozen=True)
class RewardLoad:
    """Seconds that calls of a job's rewards took so far, added up over calls that ran at once."""

    each: float = 0.0
    """Of calls for one answer."""
    together: float = 0.0
    """Of calls for all answers of a problem."""
    at_once: int = 1
    """Calls that can run at once."""


_NO_TOKENS = (
    "asks for queries with special tokens, which are not known here: write def reward(prompts, completions, answer)"
)


@dataclass(frozen=True)
class _Job:
    """One job's rewards."""

    name: str
    rewards: Sequence[RewardConfig]
    labels: Sequence[str]
    groups: Sequence[WorkerGroup]
    turn: asyncio.Semaphore
    """Of its calls of shared processes."""
    elsewhere: list[float] = field(default_factory=lambda: [0.0])
    """Seconds of all calls of rewards that are scored elsewhere."""

    def group_of(self, index: int) -> WorkerGroup | None:
        """The processes that score a reward; None if it is scored elsewhere."""
        return next((group for group in self.groups if index in group.rewards), None)

    @property
    def reads_state(self) -> bool:
        """Whether a reward that is trained on takes `trainer_state`."""
        known = [
            pair for group in self.groups for pair in zip(group.rewards.values(), group.loaded.reads_state, strict=True)
        ]
        return any(reads and reward.weight for reward, reads in known)


def _known(installed: Mapping[str, Installed], reward: RewardConfig) -> Installed | None:
    return installed.get(reward.name) if reward.function is None else None


class RewardPool:
    """Runs the rewards of all jobs. Lives in one event loop, which must outlive it (`close` before the loop ends)."""

    def __init__(
        self,
        workers: int = 2,
        elsewhere: Mapping[str, Elsewhere] | None = None,
        installed: Mapping[str, Installed] | None = None,
        rest: Callable[[str, bool], None] | None = None,
        walls: Walls | None = None,
        charge: Callable[[str, float], None] = lambda job, seconds: None,
    ) -> None:
        """Processes start with the first job.

        Args:
            workers: processes in all; every job has at least one, and at least one on each side of the wall that it needs.
            elsewhere: scorers of rewards that no process scores, by name.
            installed: functions that jobs may use by name, besides the built-in rewards.
            rest: called with whether a job must pause instead of waiting for an absent scorer.
            walls: which processes run behind a wall.
            charge: called with the CPU seconds that a job's processes use.
        """
        self._workers, self._walls, self._charge = workers, walls or Walls(), charge
        self._elsewhere, self._installed, self._rest = elsewhere or {}, installed or {}, rest
        scorers: Iterable[object] = self._elsewhere.values()
        self._judging = [one for one in scorers if isinstance(one, Judging)]
        self._jobs: dict[str, _Job] = {}
        self._shared: dict[bool, SharedProcesses] = {}

    async def register(
        self, job: str, rewards: Sequence[RewardConfig], scorer: ScorerSpec | None = None, log: Path | None = None,
        columns: Sequence[str] | None = None, payer: str = "",
    ) -> None:  # fmt: skip
        """Load a job's rewards, if need be in a process that prints to `log`; raises RewardError if one cannot be used.

        `columns` are those that every row has, where that is known; one may ask for no other. `payer` is charged for it,
        if that is another job, and shares its turn with it.
        """
        await self.unregister(job)
        here = [index for index, reward in enumerate(rewards) if not self._is_elsewhere(reward)]
        walled = {index: self._walls.around(rewards[index], _known(self._installed, rewards[index])) for index in here}
        payer, groups = payer or job, list[WorkerGroup]()
        charge = functools.partial(self._charge, payer)
        turn = self._jobs[payer].turn if payer in self._jobs else asyncio.Semaphore(self._workers)
        for index in [index for index in here if rewards[index].function is None and rewards[index].name in BUILTIN]:
            reward, side = rewards[index], walled.pop(index)
            request = msgspec.structs.replace(load_request([reward], None, side), rewards=[])
            if side not in self._shared:
                self._shared[side] = SharedProcesses(request, None, {}, kept=self._workers)
            own, lent = {index: reward}, self._shared[side]
            groups.append(SharedGroup(request, None, own, charge=charge, reward=reward, turn=turn, processes=lent))
        sides = {index: (side, rewards[index].code is not None) for index, side in walled.items()}
        for side, sent in sorted(set(sides.values())):  # sent code is alone in its process
            own = {index: rewards[index] for index in sides if sides[index] == (side, sent)}
            request = load_request([self._located(reward) for reward in own.values()], scorer, side, columns)
            groups.append(WorkerGroup(request, log, own, self._may_start_another, self._most_waiting, charge))
        self._jobs[job] = _Job(job, tuple(rewards), labels_of(rewards), groups, turn)
        try:
            for group in groups:
                await group.open()
        except BaseException as error:
            await self.unregister(job)
            if isinstance(error, ProcessDiedError | ClockLimitError):
                raise RewardError(f"the rewards of job {job!r} cannot be loaded: the process {error}") from error
            raise

    async def unregister(self, job: str) -> None:
        """End a job's processes; open calls return as failed. An unknown job is ignored."""
        groups = registered.groups if (registered := self._jobs.pop(job, None)) else ()
        for one in self._judging:
            one.leave(job)
        for group in groups:
            group.closed = True
        for group in groups:
            await group.close()

    async def close(self) -> None:
        """End all processes and wait for them."""
        for job in list(self._jobs):
            await self.unregister(job)
        for one in self._judging:
            await one.close()
        for processes in self._shared.values():
            await processes.close()

    def spend(self, job: str) -> Mapping[str, Any]:
        """A job's spending on judges so far; empty without questions."""
        return self._judging[0].spend(job) if self._judging else {}

    def load(self, job: str) -> RewardLoad:
        """What the calls of a job's rewards took, to forecast a run."""
        if (known := self._jobs.get(job)) is None:  # others judge its answers
            return RewardLoad()
        own = sum(group.seconds[False] for group in known.groups)
        together = sum(group.seconds[True] for group in known.groups) + known.elsewhere[0]
        waits = known.elsewhere[0] or any(group.waits for group in known.groups)
        return RewardLoad(own, together, self._most_waiting() if waits else self._workers)

    def reads_state(self, job: str) -> bool:
        """Whether a reward of a job that is trained on takes `trainer_state`."""
        return job in self._jobs and self._jobs[job].reads_state

    def rest(self, job: str, wanted: bool) -> None:
        """Set whether a job must pause; `score` then raises `ScorerAway` if its scorer is absent."""
        if self._rest is not None and job in self._jobs:
            self._rest(job, wanted)

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        """Score completions of one problem, in order. Failures are in the results, never raised.

        Raises:
            RewardError: the job is not registered.
            ScorerAway: the scorer is absent, and the job must pause.
        """
        known = self._registered(job)
        columns = await asyncio.gather(
            *(self._column(known, index, problem, completions, context) for index in range(len(known.rewards)))
        )
        parts = zip(*columns, strict=True)
        return await asyncio.to_thread(lambda: [summed(known.labels, known.rewards, one) for one in parts])

    async def scores(
        self, job: str, problem: dict[str, Any], completions: Sequence[str], seen: AnswerDetails = NO_DETAILS
    ) -> list[ScoreOrReason]:
        """Unweighted scores by a job's first reward for completions of a problem (all in plain values).

        Raises RewardError if the job is not registered.
        """
        return await self._column(
            self._registered(job), 0, msgspec.convert(problem, Problem), completions, _context(seen)
        )

    def _may_start_another(self) -> bool:
        return sum(len(group.workers) for job in self._jobs.values() for group in job.groups) < self._workers

    def _most_waiting(self) -> int:
        return max(self._workers, AT_ONCE // max(1, len(self._jobs)))

    def _registered(self, job: str) -> _Job:
        if job not in self._jobs:
            raise RewardError(f"job {job!r} has no rewards registered: call register first")
        return self._jobs[job]

    def _is_elsewhere(self, reward: RewardConfig) -> bool:
        """Whether a reward is scored elsewhere. Raises RewardError if it has no scorer here, or its arguments are wrong."""
        if reward.function is not None or reward.name not in ELSEWHERE:
            return False
        if reward.name not in self._elsewhere:
            raise reward_elsewhere.needs_a_service(reward.name)
        reward_elsewhere.check(reward)
        return True

    def _located(self, reward: RewardConfig) -> RewardConfig:
        """The reward, with an installed name replaced by its function."""
        known = _known(self._installed, reward)
        if known is None:
            return reward
        return reward.model_copy(update={"name": known.target, "args": {**known.args, **reward.args}})

    async def _column(
        self, job: _Job, index: int, problem: Problem, texts: Sequence[str], context: AnswerContext
    ) -> list[ScoreOrReason]:
        """One reward's scores, one for each completion."""
        reward, group = job.rewards[index], job.group_of(index)
        if group is None:
            return await self._asked(job, reward, problem, texts, context)
        own, shown = group.index(index), list[tuple[str, str]]()
        if group.loaded.reads_tokens[own]:
            if context.shown is None:
                return [_NO_TOKENS] * len(texts)
            shown = await asyncio.to_thread(context.shown)
        # most rewards read only the answer, so the conversation is not sent
        talks = context.whole(problem, texts) if group.loaded.sees_all[own] else ()
        request = _request(own, reward, problem, texts, replace(context, transcripts=talks), shown)
        scores = await self._in_process(group, reward, request)
        known = _known(self._installed, reward)
        if known is None:
            return scores
        return [type(one)(without_folder(one, known.target)) if isinstance(one, str) else one for one in scores]

    async def _asked(
        self, job: _Job, reward: RewardConfig, problem: Problem, texts: Sequence[str], context: AnswerContext
    ) -> list[ScoreOrReason]:
        """Scores of a reward that is scored elsewhere; an answer with a conversation too long to send has none."""
        given = await asyncio.to_thread(problem_as_given, problem)
        sendable, scores = await asyncio.to_thread(to_send, reward.name, texts, context)
        for some, sent, details in sendable:
            started = time.monotonic()
            answered = await self._elsewhere[reward.name](job.name, reward, given, sent, details)
            job.elsewhere[0] += time.monotonic() - started
            for n, score in zip(some, answered, strict=True):
                scores[n] = score
        return scores

    async def _in_process(
        self, group: WorkerGroup, reward: RewardConfig, request: ScoreCompletions
    ) -> list[ScoreOrReason]:
        """Scores of a reward that processes score."""
        pieces = await asyncio.gather(*(self._piece(group, reward, piece) for piece in group.pieces(request)))
        return list(itertools.chain(*pieces))

    async def _piece(self, group: WorkerGroup, reward: RewardConfig, request: ScoreCompletions) -> list[ScoreOrReason]:
        """Scores of completions that are sent together.

        A failed call for several completions is repeated for each alone, so that only the faulty one loses its rollout. A
        reward that compares completions is not called again.
        """
        own, scored = request.reward, list[ScoreOrReason]()
        while group.loaded.together[own] and len(request.completions) > 1:
            scores = await self._call(group, reward, request, last=group.loaded.compares[own])
            if scores is None:
                break
            scored += scores
            request = request.only(len(scores), len(request.completions))  # shared processes stop at a limit
        single = (
            self._call(group, reward, request.only(place), last=True) for place in range(len(request.completions))
        )
        return scored + await _each(single, AT_ONCE if group.waits else self._workers)

    async def _call(
        self, group: WorkerGroup, reward: RewardConfig, request: ScoreCompletions, last: bool = False
    ) -> list[ScoreOrReason] | None:
        """One call; None if a call for several failed and each completion will be tried alone."""
        worker, n = await group.take(), len(request.completions)
        try:
            reply = await group.ask(worker, reward, request)
        except ClockLimitError as error:
            return [Chance(error)] * n if last or group.source() is None else None
        except ProcessDiedError as error:
            return [Chance(error) if error.killed else str(error)] * n if last else None
        except EngineError as error:
            return [f"cannot be sent to its process: {error}"] * n if last else None
        finally:
            group.give_back(worker)
        if reply.waits and not group.request.walled:  # what is behind a wall may write anything
            group.wait_together()
        if reply.failed and not last:
            return None
        return [error[:LONGEST_FAULT] or value for value, error in zip(reply.noted(), reply.errors, strict=True)]


async def _each(calls: Iterator[Awaitable[list[ScoreOrReason] | None]], at_once: int) -> list[ScoreOrReason]:
    """The scores of calls for one answer each, in order; few begin at once, however many there are."""
    scored, waiting = dict[int, ScoreOrReason](), enumerate(calls)

    async def call_some() -> None:
        for place, call in waiting:  # that nobody took
            if (scores := await call) is not None:
                scored[place] = scores[0]

    await asyncio.gather(*(call_some() for _ in range(at_once)))
    return [scored[place] for place in sorted(scored)]


def _context(seen: AnswerDetails) -> AnswerContext:
    """What plain values say."""
    return AnswerContext(
        msgspec.convert(seen.transcripts, list[tuple[Message, ...]]),
        msgspec.convert(seen.parts, list[TurnParts]),
        state=msgspec.convert(seen.state, TrainerState) if seen.state else None,
    )


def _request(
    own: int,
    reward: RewardConfig,
    problem: Problem,
    texts: Sequence[str],
    context: AnswerContext,
    shown: list[tuple[str, str]],
) -> ScoreCompletions:
    """The message to a process about all completions of a problem; `own` is the position of the reward there."""
    return ScoreCompletions(
        own,
        problem,
        list(texts),
        reward.cpu_seconds,
        reward.memory_mb,
        [as_given(talk) for talk in context.transcripts],
        list(context.parts),
        shown,
        context.state,
    )
