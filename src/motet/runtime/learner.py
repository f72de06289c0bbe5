"""The learn loop's shared half: micro-batches of all jobs, packed together, one forward and backward pass after another.

While the device is busy, cuts of several jobs gather; the next pass takes as many as the token budget holds, those of the
jobs that have consumed least first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from motet.algorithms.packing import Waiting, merge
from motet.device import Device
from motet.protocols import Trainer
from motet.types import Batch, LossStats, Segment


@dataclass(frozen=True, eq=False)
class _Entry:
    job: str
    segment: Segment
    done: asyncio.Future[LossStats]


class Learner:
    """Trains the segments of all jobs on one device."""

    def __init__(
        self, trainer: Trainer, device: Device, budget: int, account: Callable[[str], tuple[float, float]]
    ) -> None:
        self._trainer = trainer
        self._device = device
        self._budget = budget
        self._account = account
        self._waiting: list[_Entry] = []
        self._running: asyncio.Task[None] | None = None

    async def train(self, job: str, segments: tuple[Segment, ...]) -> LossStats:
        """Add the gradients of a job's segments, in their order, and return the sum of their statistics."""
        loop = asyncio.get_running_loop()
        entries = [_Entry(job, segment, loop.create_future()) for segment in segments]
        self._waiting.extend(entries)
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._drain())
        try:
            results = [await entry.done for entry in entries]
        finally:
            self._waiting = [entry for entry in self._waiting if entry not in entries]
        total = LossStats()
        for stats in results:
            total = total + stats
        return total

    async def _drain(self) -> None:
        while self._waiting:
            chosen = self._choose()
            batch = Batch(tuple(entry.segment for entry in chosen))
            try:
                results = await self._device.run(lambda batch=batch: self._timed(batch))  # type: ignore[misc]
            except Exception as error:  # whoever waits for these segments has to know
                for entry in chosen:
                    if not entry.done.done():
                        entry.done.set_exception(error)
                continue
            for entry, stats in zip(chosen, results, strict=True):
                if not entry.done.done():
                    entry.done.set_result(stats)

    def _choose(self) -> list[_Entry]:
        waiting = []
        for entry in self._waiting:
            consumed, weight = self._account(entry.job)
            waiting.append(Waiting(entry.job, entry.segment.n_tokens, consumed, weight))
        chosen = [self._waiting[index] for index in merge(waiting, self._budget)]
        self._waiting = [entry for entry in self._waiting if entry not in chosen]
        return chosen

    def _timed(self, batch: Batch) -> tuple[LossStats, ...]:
        started = time.perf_counter()
        stats = self._trainer.forward_backward(batch)
        spent = time.perf_counter() - started
        self._device.busy.train += spent
        self._device.busy.full += spent * (batch.n_tokens >= 0.5 * self._budget)
        return stats
