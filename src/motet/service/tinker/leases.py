"""Leases of client sessions: a client that is silent for long has finished. Deletes expired checkpoints too."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from motet.service.database.store import Store
from motet.service.errors import Refusal
from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.futures import Futures
from motet.service.tinker.models import SESSION, Models

LEASE_SECONDS = 24 * 3600.0
"""Clients send a heartbeat every ten seconds."""
_FINISHED = 10_000
"""Finished sessions that are remembered."""
_LOOK_SECONDS = 60.0
_LOOKS = 60
"""Every so many looks, checkpoints are looked at too: there may be thousands."""
_log = logging.getLogger(__name__)


class Leases:
    """Last heartbeat of each session. In memory: a restarted service counts from its start."""

    def __init__(
        self,
        models: Models,
        checkpoints: Checkpoints,
        futures: Futures,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models, self._checkpoints, self._futures = models, checkpoints, futures
        self._store, self._clock = store, clock
        self._seen: dict[str, float] = {}
        self._finished = OrderedDict[str, None]()

    def finish(self, session_id: str) -> None:
        """Let no later heartbeat renew a session."""
        self._finished[session_id] = None
        while len(self._finished) > _FINISHED:
            self._finished.popitem(last=False)

    def renew(self, session_id: str) -> None:
        """Record a heartbeat.

        Raises:
            Refusal: the session was finished. A stock client whose heartbeat is answered otherwise as it closes may never end.
        """
        if session_id in self._finished:
            raise Refusal(410, "the session was finished; create_session makes another")
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
        for look in itertools.count():
            await asyncio.sleep(seconds)
            try:
                self._futures.forget_old()
                await asyncio.to_thread(self.end_silent)
                if look % _LOOKS == 0:
                    await asyncio.to_thread(self._checkpoints.remove_expired)
            except Exception:  # the next check may succeed
                _log.exception("the leases of clients could not be looked at")
