"""The parts of a run or host that share a base's device."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from motet.config.budgets import Need
from motet.core.device import Device
from motet.core.types import ServerLoad
from motet.hosts.slot_memory import FreeMemory, SampleMemory
from motet.protocols import RolloutEngine, Trainer, WeightSync

if TYPE_CHECKING:
    from motet.rollout.server import ServerEngine
    from motet.rollout.spread import SpreadEngine


@dataclass
class Workshop:
    """Everything that runs on a base's device."""

    device: Device
    engine: RolloutEngine
    trainer: Trainer
    sync: WeightSync
    notes: list[str] = field(default_factory=list)
    probe_tolerance: float = 0.0
    """Largest mean difference between the engine's and the trainer's logprobs of a probe."""
    servers: ServerEngine | None = None
    """The engine, if it samples on servers."""
    spread: SpreadEngine | None = None
    """The engine, if it uses sampling processes."""
    kv_tokens: int = 0
    """Capacity of this process's KV cache in tokens; servers have their own."""
    memory: FreeMemory | None = None
    """None if servers sample and ranks train."""
    samples: SampleMemory | None = None
    """None if that is not known, or other hosts use the memory, too."""
    inexact: tuple[str, ...] = ()
    """Why the bytes of every job may depend on more than the job."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Context in which requests can be sent: waits for servers, and disconnects or ends them afterwards.

        Raises:
            MotetError: no server can be used, or the device is lost.
        """
        with self.device.watched():
            if self.servers is None:
                yield
                return
            try:
                await self.servers.ready()
                yield
            finally:
                await self.servers.close()

    def training(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Context in which servers on the trainer's GPU sleep, if they do at all."""
        return contextlib.nullcontext() if self.servers is None else self.servers.fleet.asleep()

    def loads(self) -> Sequence[ServerLoad]:
        """The load of each server; empty without servers."""
        return () if self.servers is None else self.servers.loads()

    def check(self, needs: Sequence[Need]) -> None:
        """Raise ConfigError if jobs have a sample that alone cannot be trained."""
        if self.samples is not None:
            self.samples.check(needs)

    def close(self) -> None:
        """End the device's thread and the sampling processes."""
        self.device.close()
        if self.servers is not None:
            self.notes.extend(self.servers.fleet.notes())
        if self.spread is not None:
            self.notes.extend(self.spread.notes())
            self.spread.close()
