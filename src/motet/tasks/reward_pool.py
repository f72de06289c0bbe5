"""Scores completions in processes: a reward that hangs, floods memory or dies costs one rollout and nothing else.

Every job has processes of its own: a hanging reward holds up only its own job, and nothing that a reward does to its
process (modules, random state, environment) can reach another job's scores. A job alone uses up to `workers` of them;
with company each job keeps the one it is entitled to.

Rewards that are scored elsewhere (`reward_elsewhere`) need no process: the pool asks the function that it was given for them.

A call's outcome must not depend on what its process did before. So a process is replaced after a call that ran out of
CPU time or memory, and a call that ran out of memory or killed a used process is tried once more in a fresh one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks import reward_elsewhere
from motet.tasks.reasoning import ScorerSpec
from motet.tasks.reward_elsewhere import ELSEWHERE, Chance, Elsewhere, Score
from motet.tasks.reward_installed import Installed, without_folder
from motet.tasks.reward_link import Reply, RewardLink, hello
from motet.tasks.reward_walls import Walls
from motet.tasks.worker_link import ClockLimitError, ProcessDiedError
from motet.types import Message, Problem


@dataclass(frozen=True)
class Scored:
    """What became of one completion."""

    reward: float
    """The weighted sum of the parts; NaN where one of them failed."""
    parts: Mapping[str, float]
    """Each reward that applies by name, before its weight; a second reward of the same name is `name#2`."""
    error: str = ""
    """Why there is no reward."""
    clock_limited: bool = False
    """The clock or the network decided, so another run could come out differently."""


Transcript = Sequence[Message]


@dataclass(frozen=True)
class Answer:
    """What is scored."""

    text: str
    transcript: Transcript = ()


@dataclass(frozen=True)
class _Part:
    """What one reward said about one completion."""

    value: float = math.nan
    error: str = ""
    clock_limited: bool = False
    applies: bool = True
    """Whether it counts for this completion at all."""


class _Seat:
    """A place for one process, which is started by the first call that sits down."""

    link: RewardLink | None = None


@dataclass(eq=False)
class _Lane:
    """Processes of one job, all behind a wall or none of them."""

    walled: bool
    hello: bytes
    log: Path | None
    rewards: Mapping[int, RewardConfig]
    """By their places in the job, in the order in which the process has them."""
    together: Sequence[bool] = ()
    """Per reward of the process: whether all completions of a problem go into one call."""
    seats: list[_Seat] = field(default_factory=list)
    idle: list[_Seat] = field(default_factory=list)
    waiting: deque[asyncio.Future[_Seat]] = field(default_factory=deque)
    closed: bool = False

    async def open(self) -> None:
        """Load the rewards in a first process."""
        self.seats.append(_Seat())
        link = self.seats[0].link = await RewardLink.start(self.hello, self.log, walled=self.walled)
        self.together, self.idle = link.together, list(self.seats)

    def index(self, place: int) -> int:
        """Where in the process a reward is."""
        return list(self.rewards).index(place)


@dataclass(frozen=True)
class _Job:
    """One job's rewards."""

    name: str
    rewards: Sequence[RewardConfig]
    labels: Sequence[str]
    lanes: Sequence[_Lane]

    def lane_of(self, place: int) -> _Lane | None:
        """Who scores a reward; None where no process does."""
        return next((lane for lane in self.lanes if place in lane.rewards), None)


class RewardPool:
    """Runs the rewards of all jobs. Lives in one event loop, which must outlive it (`close` before the loop ends)."""

    def __init__(
        self,
        workers: int = 2,
        elsewhere: Mapping[str, Elsewhere] | None = None,
        installed: Mapping[str, Installed] | None = None,
        rest: Callable[[str, bool], None] | None = None,
        walls: Walls | None = None,
    ) -> None:
        """No process is started yet.

        Args:
            workers: processes in all; every job has at least one, and at least one on each side of the wall that it needs.
            elsewhere: who scores the rewards that no process scores, by their names.
            installed: functions that jobs may use by name, besides the built-in rewards.
            rest: told whether a job is to rest, so that it does not wait for scores that nobody is there to give.
            walls: which processes run behind a wall.
        """
        self._workers, self._walls = workers, walls or Walls()
        self._elsewhere, self._installed, self._rest = elsewhere or {}, installed or {}, rest
        self._jobs: dict[str, _Job] = {}

    async def register(
        self, job: str, rewards: Sequence[RewardConfig], scorer: ScorerSpec | None = None, log: Path | None = None
    ) -> None:
        """Load a job's rewards in a first process, where they need one; what they print goes to `log` (standard error).

        Raises:
            RewardError: a reward cannot be found, loaded, or called with its arguments; says what to do.
        """
        await self.unregister(job)
        here = [place for place, reward in enumerate(rewards) if not self._is_elsewhere(reward)]
        walled = {place: self._walls.around(rewards[place], self._known(rewards[place])) for place in here}
        lanes = []
        for side in sorted(set(walled.values())):
            own = {place: rewards[place] for place in here if walled[place] is side}
            first_line = hello([self._found(reward) for reward in own.values()], scorer, side)
            lanes.append(_Lane(side, first_line, log, own))
        self._jobs[job] = _Job(job, tuple(rewards), _labels(rewards), lanes)
        try:
            for lane in lanes:
                await lane.open()
        except BaseException as error:
            await self.unregister(job)
            if isinstance(error, ProcessDiedError | ClockLimitError):
                raise RewardError(f"the rewards of job {job!r} cannot be loaded: the process {error}") from error
            raise

    async def unregister(self, job: str) -> None:
        """End a job's processes; calls in flight come back as failed. Nothing happens where there is no such job."""
        lanes = found.lanes if (found := self._jobs.pop(job, None)) else ()
        for lane in lanes:
            lane.closed = True
        for seat in (seat for lane in lanes for seat in lane.seats):
            if seat.link is not None:
                await seat.link.kill()

    async def close(self) -> None:
        """End all processes and wait until they are gone."""
        for job in list(self._jobs):
            await self.unregister(job)

    def rest(self, job: str, wanted: bool) -> None:
        """Say whether a job is to rest; where nobody is there to score for it, `score` then raises `ScorerAway`."""
        if self._rest is not None and job in self._jobs:
            self._rest(job, wanted)

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], transcripts: Sequence[Transcript] = ()
    ) -> list[Scored]:
        """Score completions of one problem, in their order. What goes wrong is in the result, never raised.

        Args:
            job: whose rewards.
            problem: of all of them.
            completions: the text of each last turn.
            transcripts: the whole conversation of each, for rewards that ask for it.

        Raises:
            RewardError: the job is not registered.
            ScorerAway: nobody is there to score, and the job is to rest.
        """
        known, given = self._registered(job), asdict(problem)
        seen = transcripts or [()] * len(completions)
        answers = [Answer(*one) for one in zip(completions, seen, strict=True)]
        columns = await asyncio.gather(
            *(self._column(known, place, given, answers) for place in range(len(known.rewards)))
        )
        return [_sum(known, parts) for parts in zip(*columns, strict=True)]

    async def scores(self, job: str, problem: dict[str, Any], completions: Sequence[str]) -> list[Score]:
        """What the first reward of a job says of completions of a problem (as plain values), before its weight.

        Raises:
            RewardError: the job is not registered.
        """
        parts = await self._column(self._registered(job), 0, problem, [Answer(text) for text in completions])
        return [_score(part) for part in parts]

    def _registered(self, job: str) -> _Job:
        if job not in self._jobs:
            raise RewardError(f"job {job!r} has no rewards registered: call register first")
        return self._jobs[job]

    def _is_elsewhere(self, reward: RewardConfig) -> bool:
        """Whether no process scores a reward.

        Raises:
            RewardError: nobody here does, or its arguments are wrong.
        """
        if reward.function is not None or reward.name not in ELSEWHERE:
            return False
        if reward.name not in self._elsewhere:
            raise RewardError(
                f"reward {reward.name!r} is scored beside a service: submit the job to `motet serve`, or name a function "
                "of yours as `file.py:function`"
            )
        reward_elsewhere.check(reward)
        return True

    def _known(self, reward: RewardConfig) -> Installed | None:
        return self._installed.get(reward.name) if reward.function is None else None

    def _found(self, reward: RewardConfig) -> RewardConfig:
        """The reward with the function that its name stands for, where that was installed."""
        known = self._known(reward)
        if known is None:
            return reward
        return reward.model_copy(update={"name": known.target, "args": {**known.args, **reward.args}})

    async def _column(self, job: _Job, place: int, problem: dict[str, Any], answers: list[Answer]) -> list[_Part]:
        """One reward's parts, one for each completion."""
        reward, lane = job.rewards[place], job.lane_of(place)
        if lane is None:
            return await self._asked(job, reward, problem, answers)
        parts = await self._in_process(lane, place, problem, answers)
        known = self._known(reward)
        if known is None:
            return parts
        return [replace(part, error=without_folder(part.error, known.target)) for part in parts]

    async def _asked(
        self, job: _Job, reward: RewardConfig, problem: dict[str, Any], answers: list[Answer]
    ) -> list[_Part]:
        """Parts of a reward that is scored elsewhere."""
        found = await self._elsewhere[reward.name](job.name, reward, problem, [answer.text for answer in answers])
        return [_part(score) for score in found]

    async def _in_process(self, lane: _Lane, place: int, problem: dict[str, Any], answers: list[Answer]) -> list[_Part]:
        """Parts of a reward that a process of the job scores.

        A call for several completions that fails is repeated for each alone: only the one at fault loses its rollout.
        """
        if lane.together[lane.index(place)] and len(answers) > 1:
            parts = await self._call(lane, place, problem, answers)
            if parts is not None:
                return parts
        alone = await asyncio.gather(*(self._call(lane, place, problem, [answer], last=True) for answer in answers))
        return [parts[0] for parts in alone if parts is not None]

    async def _call(
        self, lane: _Lane, place: int, problem: dict[str, Any], answers: list[Answer], last: bool = False
    ) -> list[_Part] | None:
        """One call, or None when a call for several failed as a whole and there is a `last` one to come for each."""
        seat = await self._sit_down(lane)
        try:
            reply = await self._ask(lane, seat, place, problem, answers)
        except ClockLimitError as error:
            return [_Part(error=str(error), clock_limited=True)] * len(answers)
        except ProcessDiedError as error:
            return [_Part(error=str(error))] * len(answers) if last else None
        finally:
            self._stand_up(lane, seat)
        if reply.failed and not last:
            return None
        return [_part(error or value) for value, error in zip(reply.values, reply.errors, strict=True)]

    async def _ask(self, lane: _Lane, seat: _Seat, place: int, problem: dict[str, Any], answers: list[Answer]) -> Reply:
        """A reply that a fresh process would have given too."""
        reward, n = lane.rewards[place], len(answers)
        request = {
            "reward": lane.index(place),
            "problem": problem,
            "completions": [answer.text for answer in answers],
            "transcripts": [[asdict(message) for message in answer.transcript] for answer in answers],
            "memory_mb": reward.memory_mb,
        }
        line = json.dumps({**request, "cpu_seconds": reward.cpu_seconds * n}).encode() + b"\n"
        while True:
            fresh = seat.link is None or seat.link.calls == 0
            try:
                if seat.link is None:
                    seat.link = await self._start(lane)
                reply = await seat.link.ask(line, n, reward.wall_seconds * n, reward.cpu_seconds * n)
            except ProcessDiedError:
                seat.link = None
                if fresh or lane.closed:
                    raise
                continue
            except BaseException:  # the clock, or a cancelled caller: a late reply must not meet the next call
                if seat.link is not None:
                    await seat.link.kill()
                seat.link = None
                raise
            if reply.replace:
                await seat.link.kill()
                seat.link = None
            if reply.replace != "memory" or fresh:
                return reply

    async def _start(self, lane: _Lane) -> RewardLink:
        """A new process for a lane that is still there.

        Raises:
            ProcessDiedError: the job was unregistered, or the rewards no longer load.
            ClockLimitError: loading took too long.
        """
        try:
            link = await RewardLink.start(lane.hello, lane.log, walled=lane.walled)
        except RewardError as error:
            raise ProcessDiedError(f"could not be loaded again: {error}") from error
        if lane.closed:  # while the process started
            await link.kill()
            raise ProcessDiedError("was not called: its job has ended")
        return link

    async def _sit_down(self, lane: _Lane) -> _Seat:
        if lane.idle:
            return lane.idle.pop()
        if not lane.seats or sum(len(own.seats) for job in self._jobs.values() for own in job.lanes) < self._workers:
            lane.seats.append(_Seat())
            return lane.seats[-1]
        place: asyncio.Future[_Seat] = asyncio.get_running_loop().create_future()
        lane.waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._stand_up(lane, place.result())
            raise

    def _stand_up(self, lane: _Lane, seat: _Seat) -> None:
        while lane.waiting:
            place = lane.waiting.popleft()
            if not place.done():
                place.set_result(seat)
                return
        lane.idle.append(seat)


def _part(score: Score) -> _Part:
    if isinstance(score, str):
        return _Part(error=score, clock_limited=isinstance(score, Chance))
    return _Part(applies=False) if score is None else _Part(score)


def _score(part: _Part) -> Score:
    if part.error:
        return (Chance if part.clock_limited else str)(part.error)
    return part.value if part.applies else None


def _sum(job: _Job, parts: Sequence[_Part]) -> Scored:
    """The weighted sum of those that apply, as in TRL; a completion to which none does has no reward."""
    counted = [one for one in zip(job.labels, job.rewards, parts, strict=True) if one[2].applies]
    failed = [f"reward {label}: {part.error}" for label, _, part in counted if part.error]
    good = {label: part.value for label, _, part in counted if not part.error}
    total = sum(reward.weight * part.value for _, reward, part in counted)
    if not counted:
        failed = [f"no reward applies: {', '.join(job.labels)} returned None"]
    if not failed and not math.isfinite(total):
        failed = [f"the weighted sum of the rewards is {total}: give smaller weights"]
    clock_limited = any(part.clock_limited for part in parts)
    return Scored(math.nan if failed else total, good, "; ".join(failed), clock_limited)


def _labels(rewards: Sequence[RewardConfig]) -> list[str]:
    labels: list[str] = []
    for reward in rewards:
        label = reward_elsewhere.label_of(reward)
        before = sum(label == reward_elsewhere.label_of(other) for other in rewards[: len(labels)])
        labels.append(f"{label}#{before + 1}" if before else label)
    return labels
