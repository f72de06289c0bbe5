"""Optimizer steps that are due: those of several jobs are taken together, if the trainer can, in the turn of the first."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from motet.core.batch import Optimizer, OptimStats
from motet.core.device import Device, used_by
from motet.core.tenant_turns import Payer
from motet.protocols import SteppingTogether, Trainer
from motet.runtime.scheduler import FairScheduler


@dataclass(eq=False)
class _Due:
    payer: Payer
    name: str
    optimizer: Optimizer
    stats: OptimStats | None = None
    """Set once the step is taken."""


class DueSteps:
    """Steps that wait for the device."""

    def __init__(self, trainer: Trainer, device: Device, scheduler: FairScheduler) -> None:
        self._trainer, self._device, self._scheduler = trainer, device, scheduler
        self._together = trainer if isinstance(trainer, SteppingTogether) and trainer.steps_at_once > 1 else None
        self._due: dict[_Due, None] = {}
        self._changing = threading.Lock()

    async def take(self, job: str, name: str, optimizer: Optimizer) -> OptimStats:
        """Take the step of a job's adapter on the device; its time is charged to all jobs whose steps are taken with it."""
        payer = Payer(job, *self._scheduler.payer(job))
        with used_by(payer.job, payer.tenant, payer.share):
            together = self._together
            if together is None:
                return await self._device.run(lambda: self._trainer.optim_step(name, optimizer))
            own = _Due(payer, name, optimizer)
            with self._changing:
                self._due[own] = None
            try:
                await asyncio.sleep(0)  # jobs of the same pass hear of its end now too
                return await self._device.run(lambda: self._settle(own, together))
            finally:  # a cancelled one is left out
                with self._changing:
                    del self._due[own]

    def _settle(self, own: _Due, trainer: SteppingTogether) -> OptimStats:
        """Take the steps that are due, in the device's thread. If they fail, nothing has changed, and each is taken alone."""
        if own.stats is None:
            with self._changing:
                others = [update for update in self._due if update is not own and update.stats is None]
            others = [due for due in others if type(due.optimizer) is type(own.optimizer)][: trainer.steps_at_once - 1]
            try:
                self._step([own, *others], trainer)
            except Exception:
                if not others:
                    raise
                self._step([own], trainer)
        assert own.stats is not None
        return own.stats

    def _step(self, due: list[_Due], trainer: SteppingTogether) -> None:
        self._device.charge({update.payer: 1.0 for update in due})
        taken = trainer.optim_steps([(update.name, update.optimizer) for update in due])
        for update, stats in zip(due, taken, strict=True):
            update.stats = stats
