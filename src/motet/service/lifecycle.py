"""What of a service runs beside its requests: its engine, those who watch over jobs, and their end."""

from __future__ import annotations

import asyncio
from typing import Any

from motet.service.engine.client import EngineClient, EngineHandlers
from motet.service.events import EventBus
from motet.service.http.throttle import KeyedThreads
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.rewards.grading import Grading
from motet.service.rewards.workers import RewardWorkers
from motet.service.tenants.enforcement import QuotaEnforcer
from motet.service.tenants.ledger import Ledger


class Lifecycle:
    """Starts and stops the parts that need it, in order."""

    def __init__(
        self,
        engine: EngineClient,
        handlers: EngineHandlers,
        bus: EventBus,
        queue: JobQueue,
        enforcer: QuotaEnforcer,
        recorder: EventRecorder,
        workers: RewardWorkers,
        grading: Grading,
        ledger: Ledger,
        threads: tuple[KeyedThreads, ...],
    ) -> None:
        self._engine, self._handlers, self._bus, self._queue = engine, handlers, bus, queue
        self._enforcer, self._recorder, self._workers = enforcer, recorder, workers
        self._grading, self._ledger, self._threads = grading, ledger, threads
        self._watching: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """Start the engine, and watch over jobs and quotas."""
        self._engine.start(self._handlers)
        self._watching = asyncio.gather(self._queue.watch(), self._enforcer.watch())

    def drain(self, seconds: float) -> None:
        """Let everybody go who waits for events or for work; answers under way have so many seconds."""
        self._bus.close()
        reason = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self._engine.refuse, reason)

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        if self._watching is not None:
            self._watching.cancel()
        self._recorder.close()
        stopping = asyncio.create_task(self._engine.stop())
        await asyncio.sleep(0)  # jobs are asked to stop before those that wait for a worker are sent to rest
        self._workers.close()
        self._bus.close()
        await stopping
        await self._grading.close()
        await asyncio.to_thread(self._ledger.flush)
        for threads in self._threads:
            threads.close()
