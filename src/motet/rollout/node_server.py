"""The server that a node agent starts beside itself, keeps running and ends with itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from motet.errors import EngineError
from motet.rollout.server_process import ServerProcess

LOOK_SECONDS = 5.0
"""Between two looks."""
_EARLY_SECONDS = 0.5
"""The same until it answers."""
HANGS_SECONDS = 120.0
"""A server that answered once and then not for so long is started again."""
LOADS_SECONDS = 1800.0
"""So long it may take to answer for the first time."""


class NodeServer:
    """One server: started again when it dies or hangs, given up when it dies again and again without an answer."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        look_seconds: float = LOOK_SECONDS,
        hangs_seconds: float = HANGS_SECONDS,
        loads_seconds: float = LOADS_SECONDS,
    ) -> None:
        """What it prints goes to `log`."""
        self._process = ServerProcess(command, dict(os.environ), log)
        self._look, self._hangs, self._loads = look_seconds, hangs_seconds, loads_seconds
        self._answered = False
        """Since its last start."""
        self._since = 0.0
        """When it answered last, or was started."""
        self.failure = "it is starting"
        """Why it is of no use now, for a person; empty when it is."""

    @contextlib.asynccontextmanager
    async def running(self, healthy: Callable[[], Awaitable[bool]]) -> AsyncIterator[None]:
        """Keep it running meanwhile; `healthy` asks it.

        Raises:
            EngineError: its program cannot be run.
        """
        await self._start()
        keeping = asyncio.create_task(self._keep(healthy))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await asyncio.to_thread(self._process.close)

    async def _keep(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        while True:
            try:
                if not self._process.alive:
                    self.failure = f"it ended: {self._process.ending}"
                    await self._start()
                elif await healthy():
                    self._process.answered()
                    self.failure, self._answered, self._since = "", True, time.monotonic()
                elif time.monotonic() - self._since > (self._hangs if self._answered else self._loads):
                    await asyncio.to_thread(self._process.close)
                elif self._answered:
                    self.failure = "it does not answer"
            except EngineError as error:
                self.failure = f"it is given up: {error}"
                return
            await asyncio.sleep(self._look if self._answered else min(self._look, _EARLY_SECONDS))

    async def _start(self) -> None:
        starting = asyncio.create_task(asyncio.to_thread(self._process.start))
        try:
            await asyncio.shield(starting)
        finally:
            await asyncio.wait([starting])  # nothing is started behind whoever closes it
        self._answered, self._since = False, time.monotonic()
