"""Requests and the trainer take turns, so that servers on the GPU of the trainer can free its memory meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from motet.config.dialects import HttpRequest
from motet.core.errors import EngineError
from motet.rollout.replica import Replica

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SleepTurns:
    """Servers sleep in `asleep`, after all contexts of `awake` have ended. Contexts of `awake` must not be nested."""

    replicas: Sequence[Replica]
    sleep: HttpRequest
    wake: HttpRequest
    end: Callable[[Replica], None]
    """Ends the process of a server that cannot be woken; it is started again."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _requests: int = 0

    def __post_init__(self) -> None:
        self._open.set()
        self._awake.set()

    @contextlib.asynccontextmanager
    async def awake(self, *, starting: bool = False) -> AsyncIterator[None]:
        """Context for requests. They wait while servers sleep or are about to.

        Only a server that starts goes on while servers are about to sleep, because running requests may wait for it.
        """
        ready = self._awake if starting else self._open
        while not ready.is_set():
            await ready.wait()
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Context for the trainer, one at a time."""
        self._open.clear()
        try:
            while self._requests:
                await self._idle.wait()
            self._awake.clear()
            try:
                await asyncio.gather(*(self._put_to_sleep(replica) for replica in self.replicas if replica.up))
                yield
            finally:
                await asyncio.gather(*(self._wake(replica) for replica in self.replicas if replica.up))
        finally:
            self._awake.set()
            self._open.set()

    async def _put_to_sleep(self, replica: Replica) -> None:
        try:
            await replica.server.request(self.sleep, replica.clocks.load)
        except EngineError as error:
            _log.warning("%s keeps its memory while the trainer works: %s", replica.url, error)

    async def _wake(self, replica: Replica) -> None:
        try:
            await replica.server.request(self.wake, replica.clocks.load)
        except EngineError as error:
            await asyncio.to_thread(self.end, replica)
            replica.leave(f"it did not wake up ({error})")
