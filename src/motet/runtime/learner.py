"""The shared part of learning: micro-batches of all jobs are packed into passes, which take turns on the device.

While the device is busy, micro-batches of several jobs collect. The next pass takes as many as the budget allows, first
from tenants that have consumed the least. A pass larger than the budget releases the device between its pieces. Each
turn is charged when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from motet.algorithms.packing import Waiting, merge
from motet.core.batch import Batch, Optimizer, OptimStats, Segment, Trained
from motet.core.device import Device, used_by
from motet.core.errors import DeviceError, DeviceLost
from motet.core.tenant_turns import Cost, Payer
from motet.core.types import FloatArray
from motet.protocols import Parking, Pausing, Pieces, Trainer
from motet.runtime.due_steps import DueSteps
from motet.runtime.scheduler import FairScheduler

_AHEAD = 4
"""Turns of work of a call that wait at a time."""
Executed = Callable[[int], None]
"""Called with the work just done for a job, in tokens times targets."""


def unheard(work: int) -> None:
    """Ignore the work."""


@dataclass(frozen=True, eq=False)
class _Entry:
    job: str
    segment: Segment
    done: asyncio.Future[Any]
    executed: Executed
    learns: bool = True
    base: bool = False
    """Whether to score without the adapter."""


@dataclass(eq=False)
class _Pass:
    """Entries that the device computes in one or several turns."""

    entries: list[_Entry]
    pieces: Pieces[Any] | None = None
    """Set once it has begun."""
    charged: int = 0
    """Work charged so far; only a pass of one entry has several turns."""
    payers: Mapping[str, Payer] = field(default_factory=dict)
    """By job."""
    begun: bool = False
    """Whether its turn on the device has begun; entries cancelled before that are skipped."""


class Learner:
    """Trains and scores the segments of all jobs on one device."""

    def __init__(
        self,
        trainer: Trainer,
        device: Device,
        budget: int,
        scheduler: FairScheduler,
        alone: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`budget` is the largest work of a turn; in a context of `alone`, the device's memory is the trainer's."""
        self._trainer = trainer
        self._device = device
        self._budget = budget
        self._scheduler = scheduler
        self._alone = alone
        self._waiting: list[_Entry] = []
        self._paused: _Pass | None = None
        """The paused pass; at most one, because it keeps its memory."""
        self._running: asyncio.Task[None] | None = None
        self._turn_of: _Pass | None = None
        self._charged = asyncio.Event()
        """Set when the turn of `_turn_of` is over."""
        self._apart = False
        self._cost = Cost()
        self._steps = DueSteps(trainer, device, scheduler)
        self._parking = trainer if isinstance(trainer, Parking) and trainer.parks else None

    async def train(self, job: str, segments: tuple[Segment, ...], executed: Executed = unheard) -> tuple[Trained, ...]:
        """Add the gradients of a job's segments in order. Returns the results of each."""
        loop = asyncio.get_running_loop()
        return await self._all([_Entry(job, segment, loop.create_future(), executed) for segment in segments])

    async def score(
        self, job: str, segments: tuple[Segment, ...], executed: Executed = unheard, *, base: bool = False
    ) -> list[FloatArray]:
        """Logprobs [T] of each sample, without a gradient; `base=True` disables the adapter."""
        loop = asyncio.get_running_loop()
        entries = [_Entry(job, part, loop.create_future(), executed, learns=False, base=base) for part in segments]
        return [logprobs for scored in await self._all(entries) for logprobs in scored]

    async def step(self, job: str, name: str, optimizer: Optimizer) -> OptimStats:
        """Clip, step and clear the gradient of a job's adapter; steps of several jobs may be taken at once."""
        return await self._steps.take(job, name, optimizer)

    async def _all(self, entries: list[_Entry]) -> tuple[Any, ...]:
        """All results; few entries of a call wait at a time, because each turn looks at all that wait."""
        done, first, work = list[Any](), 0, 0
        for end, entry in enumerate(entries, 1):
            work += entry.segment.packed_work
            if work >= _AHEAD * self._budget or end == len(entries):
                done += await self._some(entries[first:end])
                first, work = end, 0
        return tuple(done)

    async def _some(self, entries: list[_Entry]) -> tuple[Any, ...]:
        self._waiting.extend(entries)
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._drain())
        try:
            return tuple([await entry.done for entry in entries])
        finally:
            self._waiting = [entry for entry in self._waiting if entry not in entries]
            for entry in entries:  # after the first failure nobody awaits the others
                if entry.done.done() and not entry.done.cancelled():
                    entry.done.exception()
                entry.done.cancel()
            while (turn := self._turn_of) is not None and turn.begun and not set(entries).isdisjoint(turn.entries):
                await self._charged.wait()  # so a cancelled caller returns after all its work is charged

    async def _drain(self) -> None:
        while self._waiting or self._paused is not None:
            async with self._alone():
                await self._work_off()

    async def _work_off(self) -> None:
        while self._waiting or self._paused is not None:
            if self._paused is not None and self._paused.entries[0].done.cancelled():
                paused, self._paused = self._paused, None  # the gradient of its pieces is discarded
                assert paused.pieces is not None
                await self._device.run(paused.pieces.close, light=True)
                continue
            chosen = self._choose()
            self._waiting = [entry for entry in self._waiting if entry not in chosen.entries]
            self._turn_of, chosen.begun = chosen, False
            self._charged.clear()
            try:
                await self._work_on(chosen)
            finally:
                self._turn_of = None
                self._charged.set()

    async def _work_on(self, chosen: _Pass) -> None:
        try:
            await self._bring_in(chosen.entries)  # the device samples meanwhile
            ahead = asyncio.create_task(self._bring_in_next(chosen.entries))
            try:
                results = await self._on_device(chosen)
            finally:
                await ahead
        except Exception as error:  # passed on to the callers that wait for these segments
            self._paused = None if self._paused is chosen else self._paused
            self._fail(chosen.entries, error)
            return
        self._charge(chosen, ended=results is not None)
        if results is None:
            self._paused = chosen
            return
        self._paused = None if self._paused is chosen else self._paused
        for entry, result in zip(chosen.entries, results, strict=True):
            if not entry.done.done():
                entry.done.set_result(result)

    async def _on_device(self, chosen: _Pass) -> tuple[Any, ...] | None:
        """Run a pass in the turn of the tenant that it was chosen for."""
        chosen.payers = {entry.job: Payer(entry.job, *self._scheduler.payer(entry.job)) for entry in chosen.entries}
        first = chosen.payers[chosen.entries[0].job]
        with used_by("", first.tenant, first.share):  # the turn accounts for its own time
            return await self._device.run(lambda: self._turn(chosen))

    def _charge(self, turn: _Pass, *, ended: bool) -> None:
        """Charge the work of a turn, or the rest of a finished pass."""
        before, entries = turn.charged, turn.entries
        if not entries:
            return
        done = Counter({entry: entry.segment.work for entry in entries})
        if not ended or before:
            turn.charged = entries[0].segment.work if ended else min(before + self._budget, entries[0].segment.work)
            done = Counter({entries[0]: turn.charged - before})
        for entry, work in done.items():
            self._scheduler.spend(entry.job, work)
            entry.executed(work)

    async def _bring_in(self, entries: list[_Entry]) -> None:
        """Load the adapters of the next pass, if adapters may be parked elsewhere."""
        if self._parking is not None and entries:
            await asyncio.to_thread(self._parking.bring_in, _adapters(entries))

    async def _bring_in_next(self, chosen: list[_Entry]) -> None:
        """Load the adapters of the pass after `chosen` if there is room. An error is raised again in their own turn."""
        if self._parking is not None and self._waiting:
            with contextlib.suppress(Exception):  # such as a paused pass whose job has just left
                following = _adapters(self._choose().entries)
                await asyncio.to_thread(self._parking.bring_in, following, _adapters(chosen))

    def _fail(self, chosen: list[_Entry], error: Exception) -> None:
        """Fail a pass. With several jobs the cause is unknown, so each job trains alone from now on."""
        if len({entry.job for entry in chosen}) > 1 and not isinstance(error, DeviceLost):
            self._apart = True
            cause, error = error, DeviceError(f"the device failed while training several jobs: {error!r}")
            error.__cause__ = cause
        for entry in chosen:
            if not entry.done.done():
                entry.done.set_exception(error)

    def _choose(self) -> _Pass:
        """Choose the next turn: a piece of the paused pass, or a new pass.

        While a pass is paused, its job waits for it, and so do jobs whose pass would pause too.
        """
        paused, waiting = self._paused, self._waiting
        if paused is not None:
            job = paused.entries[0].job
            waiting = [entry for entry in waiting if entry.job != job and entry.segment.packed_work <= self._budget]
        standing = self._scheduler.standing
        offers = [Waiting(entry.job, entry.segment.packed_work, standing(entry.job)) for entry in waiting]
        if paused is not None:
            offers.append(Waiting(job, self._budget, standing(job)))
        order = merge(offers, self._room(offers))
        if paused is not None and order[0] == len(waiting):
            return paused
        chosen = [waiting[index] for index in order if index < len(waiting)]
        first = chosen[0]
        if not first.learns:
            return _Pass([first])
        return _Pass([entry for entry in chosen if entry.learns and (entry.job == first.job or not self._apart)])

    def _room(self, offers: list[Waiting]) -> int:
        """Largest work of the next pass, so that a small tenant does not wait for a full budget of other tenants' work."""
        work = Counter[str]()
        for offer in offers:
            work[offer.standing.tenant] += offer.tokens
        first = merge(offers, 1)[0]
        most = self._cost.most(self._budget) if self._device.turns.company else self._budget
        return min(most, len(work) * work[offers[first].standing.tenant])

    def _turn(self, turn: _Pass) -> tuple[Any, ...] | None:
        """Work on a pass in the device's thread; None if it is not finished."""
        turn.begun = True  # set before the check: a later cancellation waits for the turn
        wanted = [entry for entry in turn.entries if not entry.done.cancelled()]
        if not wanted:  # cancelled since it was chosen
            if turn.pieces is not None:
                turn.pieces.close()
            turn.entries = []
            return ()
        if turn.pieces is None:
            turn.entries = wanted
        tokens = defaultdict[Payer, float](float)
        for entry in turn.entries:
            tokens[turn.payers[entry.job]] += entry.segment.n_tokens
        self._device.charge(tokens)
        started = time.perf_counter()
        pieces = turn.pieces = turn.pieces or self._pieces(turn.entries)
        done, pauses = 0, len(turn.entries) == 1 and self._paused in (None, turn)
        try:
            while done < self._budget or not pauses:
                done += next(pieces)
            if isinstance(self._trainer, Pausing):
                self._trainer.wait()  # otherwise the next caller that waits would be charged for it
        except StopIteration as end:
            results: tuple[Any, ...] = end.value
            return results
        finally:
            spent = time.perf_counter() - started
            whole = sum(tokens.values())
            self._device.busy.train += spent
            self._device.busy.full += spent * (done > 0 or whole >= 0.5 * self._budget)
            if turn.entries[0].learns and not done:
                self._cost.add(sum(entry.segment.packed_work for entry in turn.entries), spent)
        return None

    def _pieces(self, entries: list[_Entry]) -> Pieces[Any]:
        trainer, batch, base = self._trainer, Batch(tuple(entry.segment for entry in entries)), entries[0].base
        learns = entries[0].learns
        if isinstance(trainer, Pausing):
            return trainer.train_in_pieces(batch) if learns else trainer.score_in_pieces(batch, base=base)
        return _at_once(lambda: trainer.forward_backward(batch) if learns else trainer.forward(batch, base=base))


def _at_once(call: Callable[[], Any]) -> Pieces[Any]:
    """The generator interface for a trainer that cannot pause."""
    yield from ()
    return call()


def _adapters(entries: list[_Entry]) -> list[str]:
    return sorted({entry.segment.adapter for entry in entries})
