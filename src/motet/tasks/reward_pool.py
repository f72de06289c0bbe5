"""Scores completions in processes: a reward that hangs, floods memory or dies costs one rollout and nothing else.

Every job has processes of its own: a hanging reward holds up only its own job, and nothing that a reward does to its
process (modules, random state, environment) can reach another job's scores. A job alone uses up to `workers` of them;
with company each job keeps the one it is entitled to.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from motet.config import RewardConfig
from motet.errors import RewardError
from motet.tasks.reasoning import ScorerSpec
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
    """The wall clock decided, so another run could come out differently."""


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

    rewards: Sequence[RewardConfig]
    labels: Sequence[str]
    hello: bytes
    log: Path | None
    together: Sequence[bool] = ()
    """Per reward: whether all completions of a problem go into one call."""
    seats: list[_Seat] = field(default_factory=list)
    idle: list[_Seat] = field(default_factory=list)
    waiting: deque[asyncio.Future[_Seat]] = field(default_factory=deque)
    closed: bool = False


class RewardPool:
    """Runs the rewards of all jobs. Lives in one event loop, which must outlive it (`close` before the loop ends)."""

    def __init__(self, workers: int = 2) -> None:
        self._workers = workers
        self._lanes: dict[str, _Lane] = {}

    async def register(
        self, job: str, rewards: Sequence[RewardConfig], scorer: ScorerSpec | None = None, log: Path | None = None
    ) -> None:
        """Load a job's rewards in a first process; what they print goes to `log` (default: standard error).

        Raises:
            RewardError: a reward cannot be found, loaded, or called with its arguments; says what to do.
        """
        await self.unregister(job)
        lane = _Lane(tuple(rewards), _labels(rewards), _hello(rewards, scorer), log)
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

    async def score(self, job: str, problem: Problem, completions: Sequence[str]) -> list[Scored]:
        """Score completions of one problem, in their order. What goes wrong is in the result, never raised.

        Raises:
            RewardError: the job is not registered.
        """
        lane = self._lanes.get(job)
        if lane is None:
            raise RewardError(f"job {job!r} has no rewards registered: call register first")
        given = asdict(problem)
        columns = await asyncio.gather(
            *(self._column(lane, place, given, list(completions)) for place in range(len(lane.rewards)))
        )
        return [_sum(lane, parts) for parts in zip(*columns, strict=True)]

    async def _column(self, lane: _Lane, place: int, problem: dict[str, Any], completions: list[str]) -> list[_Part]:
        """One reward's parts.

        A call for several completions that fails is repeated for each alone: only the one at fault loses its rollout.
        """
        if lane.together[place] and len(completions) > 1:
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
        request = {"reward": place, "problem": problem, "completions": completions, "memory_mb": reward.memory_mb}
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
        before = sum(reward.name == other.name for other in rewards[: len(labels)])
        labels.append(f"{reward.name}#{before + 1}" if before else reward.name)
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
            except Exception as error:
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
