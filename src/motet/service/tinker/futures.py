"""Answers that clients come back for: outcomes of commands from journals, and samples from memory.

A sample's future is gone with the process; a client that asks for it hears so and samples again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from motet.errors import ConfigError, EngineError
from motet.runtime.journal import Done, Failed, Gradient
from motet.service.database.store import Store
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.errors import Refusal
from motet.service.events import EventBus, within
from motet.service.tinker.models import Models
from motet.service.tinker.wire import write_gradient
from motet.types import JobState

POLL_SECONDS = 25.0
"""How long a question waits; clients give up after 45 s and ask again."""
_KEPT_SECONDS = 900.0
MOST_OPEN = 1024
"""Samples of one tenant that are under way or were not fetched yet."""

Answer = bytes | dict[str, Any]
"""A binary message, or JSON."""


@dataclass
class _Sample:
    tenant_id: str
    task: asyncio.Task[bytes]
    done: float | None = None
    fetched: bool = field(default=False)


class Futures:
    """All answers that are waited for."""

    def __init__(self, models: Models, store: Store, bus: EventBus) -> None:
        self._models, self._store, self._bus = models, store, bus
        self._samples: dict[str, _Sample] = {}

    def begin(self, who: Principal, work: Coroutine[Any, Any, bytes]) -> str:
        """Begin a sample; gives the id of its future.

        Raises:
            Refusal: too many of this tenant's are open.
        """
        self._forget_old()
        if self.open(who) >= MOST_OPEN:
            work.close()
            raise Refusal(429, f"{MOST_OPEN} samples are open; fetch some first", headers={"Retry-After": "1"})
        name = f"sample-{secrets.token_hex(12)}"
        sample = self._samples[name] = _Sample(who.tenant_id, asyncio.create_task(work))

        def ended(task: asyncio.Task[bytes]) -> None:
            sample.done = time.monotonic()
            if not task.cancelled():
                task.exception()  # whoever fetches it hears of it

        sample.task.add_done_callback(ended)
        return name

    def open(self, who: Principal) -> int:
        """Samples of a tenant that are under way or were not fetched yet."""
        return sum(one.tenant_id == who.tenant_id and not one.fetched for one in self._samples.values())

    def cancel(self, who: Principal, request_id: str) -> None:
        """Nobody waits for a sample any more."""
        sample = self._samples.get(request_id)
        if sample is not None and sample.tenant_id == who.tenant_id:
            sample.task.cancel()
            del self._samples[request_id]

    async def wait(self, who: Principal, request_id: str, seconds: float = POLL_SECONDS) -> Answer:
        """An answer, or after so many seconds that there is none yet.

        Raises:
            Refusal: there is no such future.
        """
        if request_id.startswith("sample-"):
            return await self._sample(who, request_id, seconds)
        model_id, _, number = request_id.rpartition("/")
        job = await asyncio.to_thread(self._models.find, who, model_id)
        if not number.isdecimal() or len(number) > 10:
            raise Refusal(404, f"there is no request {request_id!r}")
        return await self._command(job, int(number), request_id, seconds)

    async def _command(self, job: StoredJob, number: int, request_id: str, seconds: float) -> Answer:
        journal, until = self._models.journal(job), time.monotonic() + seconds
        while True:
            changed = self._bus.next(job.id)  # before looking: nothing is missed
            outcome = await asyncio.to_thread(journal.outcome, number)
            match outcome:
                case Gradient():
                    return write_gradient(outcome)
                case Done():
                    return outcome.answer
                case Failed():
                    return {"error": outcome.reason, "category": "user"}
            if not journal.known(number):
                raise Refusal(404, f"there is no request {request_id!r}")
            now = await asyncio.to_thread(self._store.job_by_id, job.id)
            if now is None or JobState(now.state).final:
                return {"error": _ended(now), "category": "server"}
            left = until - time.monotonic()
            if left <= 0 or self._bus.closed:
                return _try_again(request_id, now)
            await within(changed, left)

    async def _sample(self, who: Principal, request_id: str, seconds: float) -> Answer:
        sample = self._samples.get(request_id)
        if sample is None or sample.tenant_id != who.tenant_id:
            raise Refusal(410, f"there is no request {request_id!r} any more; sample again")
        await asyncio.wait([sample.task], timeout=0 if self._bus.closed else seconds)
        if not sample.task.done():
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        sample.fetched = True
        try:
            return sample.task.result()
        except ConfigError as error:
            return {"error": str(error), "category": "user"}
        except EngineError as error:
            return {"error": str(error), "category": "server"}

    def _forget_old(self) -> None:
        now = time.monotonic()
        old = [name for name, one in self._samples.items() if one.done is not None and now - one.done > _KEPT_SECONDS]
        for name in old:
            del self._samples[name]


def _ended(job: StoredJob | None) -> str:
    return "the model is gone" if job is None else f"the model has {job.state}: {job.message or 'its client finished'}"


def _try_again(request_id: str, job: StoredJob) -> dict[str, Any]:
    state, reason = "active", job.message
    if job.state == JobState.QUEUED.value:
        state, reason = "paused_capacity", job.message or "all adapter slots are taken; it begins when one is free"
    elif job.state == JobState.PAUSED.value:
        state, reason = "paused_rate_limit", job.message or "the model is paused"
    return {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason}
