"""The base class of all loops. A subclass defines a step; this class opens, commits, publishes and closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from motet.core.errors import ScorerAway
from motet.core.types import JobState
from motet.runtime.checkpoint import Committed
from motet.runtime.job import Job, Services
from motet.runtime.reference import reference_of
from motet.runtime.scheduler import weight_of
from motet.runtime.session import Evaluated, Session
from motet.runtime.stopping import stopped_early

Result = TypeVar("Result")


class _Dropped(Exception):
    """The step under way was dropped."""


class Driver:
    """Runs one job's session from taking a slot to releasing it."""

    evaluation_seconds: tuple[str, ...] = ("train",)
    """Keys in timings.jsonl for the time of the last evaluation; earlier evaluations are timed with their steps."""

    def __init__(self, job: Job, services: Services, committed: Committed | None) -> None:
        self.job, self.services = job, services
        self.session = Session(job, services, committed)
        self.reference = reference_of(self.session)
        self._pause = False
        self._step: asyncio.Task[Any] | None = None
        """The step under way, or the last evaluation."""

    async def run(self) -> JobState:
        """Train until done or paused. Cancellation and failure raise; the slot is released in all cases."""
        job, session, scheduler = self.job, self.session, self.services.scheduler
        scheduler.join(job.name, weight_of(job.config.priority), job.tenant)
        try:
            free, starts = job.resumes, self.services.starts
            async with starts.turn("open", job.tenant, lambda: self._pause, free=free) as turn:
                if turn is None:
                    return JobState.PAUSED
                job.resumes = False
                await self.begin()
                await self.reference.open()
                await session.open()
                await self._publish()
            while not self.ended:
                job.progress.spent = self.spent
                if self._pause or self.spent:
                    await session.commit(closed=True)
                    return JobState.PAUSED
                await self._unless_dropped(self.step(session.done.step))
                await self._publish()
            evaluated = await self._unless_dropped(self.evaluated())
            await session.end(evaluated, dict.fromkeys(self.evaluation_seconds, 0.0))
            if self._reason:
                job.progress.message = stopped_early(self._reason, session.done.step, session.done.best_version)
            return JobState.SUCCEEDED
        except (_Dropped, ScorerAway, ExceptionGroup) as error:
            if not isinstance(error, _Dropped) and not _only_away(error):
                raise
            if not session.work.stepped:
                await session.commit()
            return JobState.PAUSED if self._pause else JobState.QUEUED
        finally:
            async with contextlib.AsyncExitStack() as rest:  # close in reverse order, even if one call is cancelled
                rest.push_async_callback(session.close)
                rest.push_async_callback(self.reference.close)
                rest.callback(scheduler.leave, job.name)
                await self.leave()

    async def _unless_dropped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do work that `drop` ends. Raises `_Dropped` then."""
        me, self._step = asyncio.current_task(), asyncio.create_task(work)
        try:
            return await self._step  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            if me is None or me.cancelling():
                raise
            raise _Dropped from None
        finally:
            self._step = None

    # --- methods of subclasses ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start resources that the loop needs; called before the session opens."""

    async def step(self, step: int) -> None:
        """Train step `step` and finish it."""
        raise NotImplementedError

    def published(self, version: int) -> None:
        """Called when a version is loaded and may be sampled from."""

    async def evaluated(self) -> Evaluated | None:
        """The evaluation of the current step's starting version; None if that version is not evaluated."""
        return None

    async def leave(self) -> None:
        """Stop what `begin` started; called before the session closes."""

    @property
    def waits(self) -> bool:
        """Whether the job waits for external scores and does not use the device."""
        return False

    @property
    def outside(self) -> bool:
        """Whether the job waits for somebody outside, who may be at work, and does not use the device."""
        return self.waits

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to train."""
        return self.session.done.step >= self.job.config.steps or bool(self._reason)

    def evaluates(self, version: int) -> bool:
        """Whether this version is evaluated: also the last of a job that ends early."""
        return self.job.evaluates(version) or (bool(self._reason) and bool(self.job.data.holdout))

    # --- requests from outside ----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop after the current step; at once if it waits for scores and no scorer is connected."""
        self._pause = True

    def drop(self) -> bool:
        """Drop the current step or evaluation, and give whether there was one. The job does it again when it has a slot.

        Finished rollouts stay in memory (`Job.finished`).
        """
        return self._step is not None and self._step.cancel()

    def go_on(self) -> None:
        """Cancel `pause`."""
        self._pause = False

    @property
    def _reason(self) -> str:
        """Why the job ends before its last step; empty where it does not."""
        early = self.session.done.step < self.job.config.steps
        return self.session.stopping.reason if early else ""

    @property
    def spent(self) -> bool:
        """Whether the budget is used up before the last step."""
        budget, done = self.job.config.budget, self.session.done
        return budget is not None and done.tokens >= budget and done.step < self.job.config.steps and not self._reason

    @property
    def commits(self) -> bool:
        """Whether the current step is committed: also if it may be the best version, or if a resumed job needs it."""
        config, version = self.job.config, self.session.done.step + 1
        wanted = version % config.checkpoint.every == 0 or version == config.steps or self._pause
        lasting = config.algorithm.lag > 0 or config.algorithm.updates > 1
        return wanted or self.job.evaluates(version) or lasting

    async def _publish(self) -> None:
        """Publish the newest version, unless nothing was trained, or nothing samples from it before the job is opened again."""
        if self.spent or self.session.versions.latest == self.session.done.step:
            return
        await self.session.publish()
        if not self.spent:
            self.published(self.session.done.step)


def _only_away(error: Exception) -> bool:
    """Whether the only cause is a missing scorer."""
    rest = error.split(ScorerAway)[1] if isinstance(error, ExceptionGroup) else None
    return rest is None
