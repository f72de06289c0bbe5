"""The parts on a base's device, while a run or a host has them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from motet.config import EngineConfig
from motet.device import Device
from motet.protocols import RolloutEngine, Trainer, WeightSync
from motet.types import ServerLoad

if TYPE_CHECKING:
    from motet.rollout.server import ServerEngine
    from motet.rollout.spread import SpreadEngine
    from motet.training.sharded.group import RankGroup


@dataclass(frozen=True)
class FreeMemory:
    """Memory beside a base, in bytes."""

    of_device: int
    """Before anything else was put there."""
    sampling: int = 0
    """Of it, what sampling may take."""
    of_host: int = 0
    """What sampling may take of the memory of the host, where the device has its own."""
    processes: int = 1
    """That have each version."""


@dataclass
class Workshop:
    """Everything that runs on a base's device."""

    device: Device
    engine: RolloutEngine
    trainer: Trainer
    sync: WeightSync
    config: EngineConfig
    notes: list[str] = field(default_factory=list)
    probe_tolerance: float = 0.0
    """Largest mean difference between the engine's and the trainer's logprobs of a probe."""
    keep_versions: int | None = None
    """Versions that the engine keeps besides those that are needed."""
    servers: ServerEngine | None = None
    """The engine, where it asks servers."""
    spread: SpreadEngine | None = None
    """The engine, where processes of their own sample too."""
    kv_tokens: int = 0
    """Room of this process's KV cache; servers have their own."""
    memory: FreeMemory | None = None
    """None where servers sample for a base in shards."""
    inexact: tuple[str, ...] = ()
    """Why the bytes of every job may depend on more than the job."""
    ranks: RankGroup | None = None
    """The processes that a base in shards lies over."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The engine while requests are sent: servers are there, and are let go or ended afterwards.

        Raises:
            MotetError: no server can be used, or a rank of the base ended meanwhile.
        """
        with contextlib.nullcontext() if self.ranks is None else self.ranks.watched():
            if self.servers is None:
                yield
                return
            try:
                await self.servers.ready()
                yield
            finally:
                await self.servers.close()

    def loads(self) -> Sequence[ServerLoad]:
        """What each server is doing; empty where there is none."""
        return () if self.servers is None else self.servers.loads()

    def close(self) -> None:
        """End the device's thread and the sampling processes."""
        self.device.close()
        if self.servers is not None:
            self.notes.extend(self.servers.fleet.notes())
        if self.spread is not None:
            self.notes.extend(self.spread.notes())
            self.spread.close()
