"""The learn loop's shared half: micro-batches of all jobs, packed together, one forward and backward pass after another.

While the device is busy, cuts of several jobs gather; the next pass takes as many as the token budget holds, those of the
tenants that have consumed least first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from motet.algorithms.packing import Standing, Waiting, merge
from motet.batch import Batch, Segment, Trained
from motet.device import Device
from motet.errors import DeviceError
from motet.protocols import Parking, Trainer


@dataclass(frozen=True, eq=False)
class _Entry:
    job: str
    segment: Segment
    done: asyncio.Future[Trained]


class Learner:
    """Trains the segments of all jobs on one device."""

    def __init__(self, trainer: Trainer, device: Device, budget: int, account: Callable[[str], Standing]) -> None:
        self._trainer = trainer
        self._device = device
        self._budget = budget
        self._account = account
        self._waiting: list[_Entry] = []
        self._running: asyncio.Task[None] | None = None
        self._apart = False
        self._parking = trainer if isinstance(trainer, Parking) and trainer.parks else None

    async def train(self, job: str, segments: tuple[Segment, ...]) -> tuple[Trained, ...]:
        """Add the gradients of a job's segments, in their order, and return what each was trained with."""
        loop = asyncio.get_running_loop()
        entries = [_Entry(job, segment, loop.create_future()) for segment in segments]
        self._waiting.extend(entries)
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._drain())
        try:
            return tuple([await entry.done for entry in entries])
        finally:
            self._waiting = [entry for entry in self._waiting if entry not in entries]
            for entry in entries:  # after the first failure nobody awaits the others
                if entry.done.done() and not entry.done.cancelled():
                    entry.done.exception()
                entry.done.cancel()

    async def _drain(self) -> None:
        while self._waiting:
            chosen = self._choose()
            self._waiting = [entry for entry in self._waiting if entry not in chosen]
            batch = Batch(tuple(entry.segment for entry in chosen))
            try:
                await self._bring_in(chosen)  # the device samples meanwhile
                ahead = asyncio.create_task(self._bring_in_next(chosen))
                try:
                    results = await self._device.run(lambda batch=batch: self._timed(batch))  # type: ignore[misc]
                finally:
                    await ahead
            except Exception as error:  # whoever waits for these segments has to know
                self._fail(chosen, error)
                continue
            for entry, trained in zip(chosen, results, strict=True):
                if not entry.done.done():
                    entry.done.set_result(trained)

    async def _bring_in(self, entries: list[_Entry]) -> None:
        """Have what the device is about to train there, where adapters may be elsewhere."""
        if self._parking is not None and entries:
            await asyncio.to_thread(self._parking.bring_in, _adapters(entries))

    async def _bring_in_next(self, chosen: list[_Entry]) -> None:
        """Have what comes after `chosen` there too, where there is room; what fails now fails again in its own turn."""
        if self._parking is not None and self._waiting:
            following = _adapters(self._choose())
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self._parking.bring_in, following, _adapters(chosen))

    def _fail(self, chosen: list[_Entry], error: Exception) -> None:
        """A batch of one job fails that job. Of several, nobody knows whose fault it was: from now on, each trains apart."""
        if len({entry.job for entry in chosen}) > 1:
            self._apart = True
            cause, error = error, DeviceError(f"the device failed while training several jobs: {error!r}")
            error.__cause__ = cause
        for entry in chosen:
            if not entry.done.done():
                entry.done.set_exception(error)

    def _choose(self) -> list[_Entry]:
        waiting = [Waiting(entry.job, entry.segment.n_tokens, self._account(entry.job)) for entry in self._waiting]
        chosen = [self._waiting[index] for index in merge(waiting, self._budget)]
        if self._apart:
            chosen = [entry for entry in chosen if entry.job == chosen[0].job]
        return chosen

    def _timed(self, batch: Batch) -> tuple[Trained, ...]:
        started = time.perf_counter()
        results = self._trainer.forward_backward(batch)
        spent = time.perf_counter() - started
        tokens: Counter[str] = Counter()
        for segment in batch.segments:
            tokens[segment.adapter] += segment.n_tokens
        self._device.busy.called(spent, tokens)
        self._device.busy.train += spent
        self._device.busy.full += spent * (batch.n_tokens >= 0.5 * self._budget)
        return results


def _adapters(entries: list[_Entry]) -> list[str]:
    return sorted({entry.segment.adapter for entry in entries})
