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
import base64
import json
import math
import sys
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
from motet.tasks.reward_link import ClockLimitError, ProcessDiedError, RewardLink
from motet.types import Problem


@dataclass(frozen=True)
class Scored:
    """What became of one completion."""

    reward: float
    """The weighted sum of the parts; NaN where one of them failed."""
    parts: Mapping[str, float]
    """Each reward by name, before its weight; a second reward of the same name is `name#2`."""
    error: str = ""
    """Why there is no reward."""
    clock_limited: bool = False
    """The clock or the network decided, so another run could come out differently."""


@dataclass(frozen=True)
class _Part:
    """What one reward said about one completion."""

    value: float = math.nan
    error: str = ""
    clock_limited: bool = False


class _Seat:
    """A place for one process, which is started by the first call that sits down."""

    link: RewardLink | None = None


@dataclass(eq=False)
class _Lane:
    """One job's rewards and processes."""

    job: str
    rewards: Sequence[RewardConfig]
    labels: Sequence[str]
    hello: bytes
    log: Path | None
    places: Mapping[int, int]
    """Where in the process a reward is, by its place in the job; those that are scored elsewhere are not there."""
    together: Sequence[bool] = ()
    """Per reward of the process: whether all completions of a problem go into one call."""
    seats: list[_Seat] = field(default_factory=list)
    idle: list[_Seat] = field(default_factory=list)
    waiting: deque[asyncio.Future[_Seat]] = field(default_factory=deque)
    closed: bool = False


class RewardPool:
    """Runs the rewards of all jobs. Lives in one event loop, which must outlive it (`close` before the loop ends)."""

    def __init__(
        self,
        workers: int = 2,
        elsewhere: Mapping[str, Elsewhere] | None = None,
        installed: Mapping[str, Installed] | None = None,
        rest: Callable[[str, bool], None] | None = None,
    ) -> None:
        """No process is started yet.

        Args:
            workers: processes in all; every job has at least one.
            elsewhere: who scores the rewards that no process scores, by their names.
            installed: functions that jobs may use by name, besides the built-in rewards.
            rest: told whether a job is to rest, so that it does not wait for scores that nobody is there to give.
        """
        self._workers = workers
        self._elsewhere, self._installed, self._rest = elsewhere or {}, installed or {}, rest
        self._lanes: dict[str, _Lane] = {}

    async def register(
        self, job: str, rewards: Sequence[RewardConfig], scorer: ScorerSpec | None = None, log: Path | None = None
    ) -> None:
        """Load a job's rewards in a first process, where they need one; what they print goes to `log` (standard error).

        Raises:
            RewardError: a reward cannot be found, loaded, or called with its arguments; says what to do.
        """
        await self.unregister(job)
        here = [place for place, reward in enumerate(rewards) if not self._is_elsewhere(reward)]
        hello = _hello([self._found(rewards[place]) for place in here], scorer)
        places = {place: index for index, place in enumerate(here)}
        lane = _Lane(job, tuple(rewards), _labels(rewards), hello, log, places)
        if not here:
            self._lanes[job] = lane
            return
        seat = _Seat()
        lane.seats.append(seat)
        try:
            seat.link = await RewardLink.start(lane.hello, log)
        except ProcessDiedError as error:
            raise RewardError(f"the rewards of job {job!r} cannot be loaded: the process {error}") from error
        except ClockLimitError as error:
            raise RewardError(f"the rewards of job {job!r} cannot be loaded: {error}") from error
        lane.together = seat.link.together
        lane.idle.append(seat)
        self._lanes[job] = lane

    async def unregister(self, job: str) -> None:
        """End a job's processes; calls in flight come back as failed. Nothing happens where there is no such job."""
        lane = self._lanes.pop(job, None)
        if lane is None:
            return
        lane.closed = True
        for seat in lane.seats:
            if seat.link is not None:
                await seat.link.kill()

    async def close(self) -> None:
        """End all processes and wait until they are gone."""
        for job in list(self._lanes):
            await self.unregister(job)

    def rest(self, job: str, wanted: bool) -> None:
        """Say whether a job is to rest; where nobody is there to score for it, `score` then raises `ScorerAway`."""
        if self._rest is not None and job in self._lanes:
            self._rest(job, wanted)

    async def score(self, job: str, problem: Problem, completions: Sequence[str]) -> list[Scored]:
        """Score completions of one problem, in their order. What goes wrong is in the result, never raised.

        Raises:
            RewardError: the job is not registered.
            ScorerAway: nobody is there to score, and the job is to rest.
        """
        lane = self._lanes.get(job)
        if lane is None:
            raise RewardError(f"job {job!r} has no rewards registered: call register first")
        given = asdict(problem)
        columns = await asyncio.gather(
            *(self._column(lane, place, given, list(completions)) for place in range(len(lane.rewards)))
        )
        return [_sum(lane, parts) for parts in zip(*columns, strict=True)]

    async def scores(self, job: str, problem: dict[str, Any], completions: Sequence[str]) -> list[Score]:
        """What the first reward of a job says of completions of a problem (as plain values), before its weight.

        Raises:
            RewardError: the job is not registered.
        """
        lane = self._lanes.get(job)
        if lane is None:
            raise RewardError(f"job {job!r} has no rewards registered: call register first")
        parts = await self._column(lane, 0, problem, list(completions))
        return [(Chance if part.clock_limited else str)(part.error) if part.error else part.value for part in parts]

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

    def _found(self, reward: RewardConfig) -> RewardConfig:
        """The reward with the function that its name stands for, where that was installed."""
        known = self._installed.get(reward.name) if reward.function is None else None
        if known is None:
            return reward
        return reward.model_copy(update={"name": known.target, "args": {**known.args, **reward.args}})

    async def _column(self, lane: _Lane, place: int, problem: dict[str, Any], completions: list[str]) -> list[_Part]:
        """One reward's parts, one for each completion."""
        if place not in lane.places:
            return await self._asked(lane, place, problem, completions)
        parts = await self._in_process(lane, place, problem, completions)
        known = self._installed.get(lane.rewards[place].name)
        if known is None:
            return parts
        return [replace(part, error=without_folder(part.error, known.target)) for part in parts]

    async def _asked(self, lane: _Lane, place: int, problem: dict[str, Any], completions: list[str]) -> list[_Part]:
        """Parts of a reward that is scored elsewhere."""
        reward = lane.rewards[place]
        found = await self._elsewhere[reward.name](lane.job, reward, problem, completions)
        return [
            _Part(error=score, clock_limited=isinstance(score, Chance)) if isinstance(score, str) else _Part(score)
            for score in found
        ]

    async def _in_process(
        self, lane: _Lane, place: int, problem: dict[str, Any], completions: list[str]
    ) -> list[_Part]:
        """Parts of a reward that a process of the job scores.

        A call for several completions that fails is repeated for each alone: only the one at fault loses its rollout.
        """
        if lane.together[lane.places[place]] and len(completions) > 1:
            parts = await self._call(lane, place, problem, completions)
            if parts is not None:
                return parts
        alone = await asyncio.gather(*(self._call(lane, place, problem, [text], last=True) for text in completions))
        return [parts[0] for parts in alone if parts is not None]

    async def _call(
        self, lane: _Lane, place: int, problem: dict[str, Any], completions: list[str], last: bool = False
    ) -> list[_Part] | None:
        """One call, or None when a call for several failed as a whole and there is a `last` one to come for each."""
        seat = await self._sit_down(lane)
        try:
            reply = await self._ask(lane, seat, place, problem, completions)
        except ClockLimitError as error:
            return [_Part(error=str(error), clock_limited=True)] * len(completions)
        except ProcessDiedError as error:
            return [_Part(error=str(error))] * len(completions) if last else None
        finally:
            self._stand_up(lane, seat)
        if reply["failed"] and not last:
            return None
        values = (math.nan if value is None else float(value) for value in reply["values"])
        return [_Part(value, error) for value, error in zip(values, reply["errors"], strict=True)]

    async def _ask(
        self, lane: _Lane, seat: _Seat, place: int, problem: dict[str, Any], completions: list[str]
    ) -> dict[str, Any]:
        """A reply that a fresh process would have given too."""
        reward, n = lane.rewards[place], len(completions)
        request = {
            "reward": lane.places[place],
            "problem": problem,
            "completions": completions,
            "memory_mb": reward.memory_mb,
        }
        line = json.dumps({**request, "cpu_seconds": reward.cpu_seconds * n}).encode() + b"\n"
        while True:
            fresh = seat.link is None or seat.link.calls == 0
            try:
                if seat.link is None:
                    seat.link = await self._start(lane)
                reply = await seat.link.ask(line, reward.wall_seconds * n, reward.cpu_seconds * n)
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
            if reply["replace"]:
                await seat.link.kill()
                seat.link = None
            if reply["replace"] != "memory" or fresh:
                return reply

    async def _start(self, lane: _Lane) -> RewardLink:
        """A new process for a lane that is still there.

        Raises:
            ProcessDiedError: the job was unregistered, or the rewards no longer load.
            ClockLimitError: loading took too long.
        """
        try:
            link = await RewardLink.start(lane.hello, lane.log)
        except RewardError as error:
            raise ProcessDiedError(f"could not be loaded again: {error}") from error
        if lane.closed:  # while the process started
            await link.kill()
            raise ProcessDiedError("was not called: its job has ended")
        return link

    async def _sit_down(self, lane: _Lane) -> _Seat:
        if lane.idle:
            return lane.idle.pop()
        if not lane.seats or sum(len(other.seats) for other in self._lanes.values()) < self._workers:
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


def _sum(lane: _Lane, parts: Sequence[_Part]) -> Scored:
    failed = [f"reward {label}: {part.error}" for label, part in zip(lane.labels, parts, strict=True) if part.error]
    good = {label: part.value for label, part in zip(lane.labels, parts, strict=True) if not part.error}
    total = sum(reward.weight * part.value for reward, part in zip(lane.rewards, parts, strict=True))
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


def _hello(rewards: Sequence[RewardConfig], scorer: ScorerSpec | None) -> bytes:
    """The first line to a process: what to load, found along the same import path as here."""
    items = []
    for reward in rewards:
        function = None
        if reward.function is not None:
            import cloudpickle

            try:
                function = base64.b64encode(cloudpickle.dumps(reward.function)).decode()
            except Exception as error:  # whatever the function holds says in its own way that it cannot be pickled
                raise RewardError(
                    f"the function of reward {reward.name!r} cannot be sent to its process: {error}. Open files, locks "
                    "and clients inside the function, or put it in a file and name it `file.py:function`"
                ) from error
        items.append({"name": reward.name, "args": reward.args, "function": function})
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    try:
        hello = {"sys_path": path, "rewards": items, "scorer": scorer.to_json() if scorer else None}
        return json.dumps(hello).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise RewardError(f"args of a reward must be JSON values (text, numbers, lists, mappings): {error}") from error
