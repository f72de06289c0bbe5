"""The device's work for a step: passes and updates in order. It is done once, also if the job gives its slot away meanwhile.

Each call has a name, by default its number in the step. A resumed step makes the same calls: those that are done return what
they returned, without the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from motet.core.batch import AdamW, OptimStats, Segment, Trained
from motet.core.errors import GaveWay, StorageFull
from motet.core.types import FloatArray
from motet.runtime.job import Job, Services
from motet.runtime.learner import Executed, unheard
from motet.runtime.unfinished import KeptArray, KeptGradient, KeptPass, KeptScores, KeptUpdate, Unfinished
from motet.runtime.versions import adapter_name

Result = TypeVar("Result")


class StepWork:
    """What a job computes for its current step."""

    def __init__(
        self,
        job: Job,
        services: Services,
        save: Callable[[Path], None],
        load: Callable[[Path], Awaitable[None]],
    ) -> None:
        """`save` and `load` write and read all adapters with moments and gradients."""
        self._job, self._services, self._save, self._load = job, services, save, load
        self.kept = Unfinished(job.directory.path, job.directory.owner)
        self.moved = False
        """Whether the trainer has changes that are not in the last finished step."""
        self.stepped = False
        """Whether these include an optimizer step."""
        self.giving_way = asyncio.Event()
        """Set if the job must give its slot away within this step."""
        self.keeps_logprobs = False
        """Whether whoever calls `forward_backward` needs logprobs."""
        self.may_give_way = True
        """Whether results are kept in memory until the step is finished."""
        self._calls = 0

    async def open(self, step: int) -> None:
        """Read what an earlier turn of the job has done of this step; it counts again as it is used."""
        self._job.open_work.trained = 0
        await asyncio.to_thread(self.kept.read, step)

    async def finished(self) -> None:
        """Forget the work: its step is finished, or begins again."""
        self.moved, self.stepped, self._calls = False, False, 0
        await asyncio.to_thread(self.kept.drop)

    # --- calls -------------------------------------------------------------------------------------------------------

    async def forward_backward(
        self, segments: tuple[Segment, ...], executed: Executed | None = None, *, call: str = ""
    ) -> tuple[Trained, ...]:
        """Add the gradients of segments in order; they may share a packed batch with other sessions.

        The work is charged, unless `executed` does that. What was done in an earlier turn has logprobs only with
        `keeps_logprobs`.

        Raises:
            GaveWay: the job gives its slot away.
        """
        executed, call = executed or (lambda work: self._job.open_work.add(trained=work)), call or self._next_call()
        before = [one for one in self.kept.of_call(call) if isinstance(one, KeptGradient)]

        def finished(one: Trained) -> None:
            logprobs = tuple(map(KeptArray.of, one.logprobs)) if self.keeps_logprobs else ()
            self._add(KeptGradient(call, one.stats, logprobs))

        for segment in segments[: len(before)]:
            executed(segment.work)
        trained: tuple[Trained, ...] = ()
        if rest := segments[len(before) :]:
            await self._begin()
            self.moved = True
            trained = await self._services.learner.train(self._job.name, rest, executed, finished)
        return (*(one.trained() for one in before), *trained)

    async def forward(
        self, segments: tuple[Segment, ...], executed: Executed = unheard, *, base: bool = False, call: str = ""
    ) -> list[FloatArray]:
        """Logprobs [T] of each sample; `base=True` disables the adapter. Raises as `forward_backward`."""
        call = call or self._next_call()
        before = [one for one in self.kept.of_call(call) if isinstance(one, KeptScores)]

        def finished(logprobs: tuple[FloatArray, ...]) -> None:
            self._add(KeptScores(call, tuple(map(KeptArray.of, logprobs))))

        for segment in segments[: len(before)]:
            executed(segment.work)
        scored: list[FloatArray] = []
        if rest := segments[len(before) :]:
            await self._begin()
            scored = await self._services.learner.score(self._job.name, rest, executed, finished, base=base)
        return [*(one.array() for kept in before for one in kept.logprobs), *scored]

    async def optim_step(self, adamw: AdamW, role: str = "", *, name: str = "") -> OptimStats:
        """Clip the gradient, update, and clear the gradient; the next version can then be committed and published.

        `name` is the adapter's, if it is none of a role.
        """
        name, call = name or adapter_name(self._job.name, role), self._next_call()
        for one in self.kept.of_call(call):
            if isinstance(one, KeptUpdate):
                return one.stats
        await self.take_up()  # it takes no time, and no commit is between two adapters' steps
        stats = await self._services.learner.step(self._job.name, name, adamw)
        self.moved = self.stepped = True
        self._add(KeptUpdate(call, stats))
        return stats

    def answered(self, call: str) -> None:
        """Forget a call without a gradient that is not made again."""
        self.kept.forget_scores(call)

    def _add(self, one: KeptPass) -> None:
        if self.may_give_way:
            self.kept.passes.append(one)

    def _next_call(self) -> str:
        self._calls += 1
        return str(self._calls)

    async def _begin(self) -> None:
        if self.giving_way.is_set():
            raise GaveWay
        await self.take_up()

    # --- giving way --------------------------------------------------------------------------------------------------

    def give_way(self) -> None:
        """Give the slot away within the step: what runs on the device ends, and the next call raises `GaveWay`."""
        self.giving_way.set()
        self._services.learner.withdraw(self._job.name)

    async def unless_giving_way(self, work: asyncio.Future[Result]) -> Result:
        """Wait for work that makes no call here.

        Raises:
            GaveWay: the job gives its slot away; the work goes on.
        """
        gate = asyncio.ensure_future(self.giving_way.wait())
        try:
            await asyncio.wait((work, gate), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
        if not work.done():
            raise GaveWay
        return work.result()

    async def keep(self, step: int) -> None:
        """Keep what is done of the step, whose start is committed, for the job's next turn."""

        def save(path: Path) -> None:
            self._save(path)
            self._services.room.take(self._job.tenant, path)

        try:
            self._job.progress.kept += await asyncio.to_thread(self.kept.keep, step, save if self.moved else None)
        except StorageFull:  # it is done again
            await asyncio.to_thread(self.kept.drop)

    async def take_up(self) -> None:
        """Bring the trainer to where an earlier turn left the step."""
        if (snapshot := self.kept.snapshot) is None:
            return
        self.kept.snapshot = None
        await self._load(snapshot)
        self.moved, self.stepped = True, any(isinstance(one, KeptUpdate) for one in self.kept.passes)
