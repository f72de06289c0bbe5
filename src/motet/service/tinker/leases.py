"""Leases of client sessions: a client that is silent for long has finished."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from motet.service.database.store import Store
from motet.service.tinker.futures import Futures
from motet.service.tinker.models import SESSION, Models

LEASE_SECONDS = 24 * 3600.0
"""Clients send a heartbeat every ten seconds."""
_LOOK_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Leases:
    """Last heartbeat of each session. In memory: a restarted service counts from its start."""

    def __init__(
        self, models: Models, futures: Futures, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models, self._futures, self._store, self._clock = models, futures, store, clock
        self._seen: dict[str, float] = {}

    def renew(self, session_id: str) -> None:
        """Record a heartbeat."""
        if session_id in self._seen:  # only sessions with a model
            self._seen[session_id] = self._clock()

    def end_silent(self) -> None:
        """Finish the models of sessions whose lease has expired."""
        now, seen = self._clock(), dict[str, float]()
        self._futures.clear()
        for job in self._store.open_jobs():
            session, driven, _ = (job.idempotency_key or "").partition(":train:")
            if driven and SESSION.fullmatch(session):
                seen[session] = self._seen.get(session, now)
                if now - seen[session] > LEASE_SECONDS:
                    self._models.finish(job)
        self._seen = seen

    async def watch(self, seconds: float = _LOOK_SECONDS) -> None:
        """Check periodically until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                self._futures.forget_old()
                await asyncio.to_thread(self.end_silent)
            except Exception:  # the next check may succeed
                _log.exception("the leases of clients could not be looked at")
