"""Samples in memory, indexed by tenant: a request does not look at those of others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from motet.service.http.open_bytes import OpenBytes
from motet.service.tinker.requests import Sample


@dataclass(eq=False)
class OpenSample:
    """A sample that was requested, until long after its answer was fetched."""

    name: str
    tenant_id: str
    key: str
    """Id of the API key that requested it."""
    wanted: Sample | None
    """None once it was fetched."""
    size: int
    """Approximate memory in bytes."""
    rows: int = 1
    """Its completions."""
    stored: int = 0
    """Bytes of its file."""
    task: asyncio.Task[bytes] | None = None
    """None while its tenant's limits hold it."""
    since: float | None = field(default_factory=time.monotonic)
    """When it ended; for a held one, when it was last requested. None while it is running."""
    fetched: bool = False
    cancelled: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is accepted or refused."""


class OpenSamples:
    """All samples, and the memory that they take."""

    def __init__(self, room: OpenBytes) -> None:
        """`room` accounts for their memory."""
        self._room = room
        self.by_name: dict[str, OpenSample] = {}
        self.running: dict[str, OpenSample] = {}
        """Those that have not ended, by name."""
        self.waiting = Counter[str]()
        """By tenant: how many completions are running or not fetched yet."""
        self.fetched = defaultdict[str, set[str]](set)
        """By tenant: the names of the others."""

    def add(self, sample: OpenSample) -> None:
        """Keep a sample, and reserve its memory. Raises `HTTPException` if there is no room."""
        self._room.take(sample.tenant_id, sample.size)
        self.by_name[sample.name] = self.running[sample.name] = sample
        self.waiting[sample.tenant_id] += sample.rows

    def remove(self, name: str) -> OpenSample | None:
        """Forget a sample; None if it is not there."""
        if (sample := self.by_name.pop(name, None)) is None:
            return None
        self.running.pop(name, None)
        self.fetched[sample.tenant_id].discard(name)
        self.waiting[sample.tenant_id] -= 0 if sample.fetched else sample.rows
        self._room.give_back(sample.tenant_id, sample.size)
        sample.size = 0
        return sample

    def started(self, sample: OpenSample, work: Coroutine[Any, Any, bytes]) -> asyncio.Task[bytes]:
        """Run a sample in a task, with whose end its own is recorded."""
        task = asyncio.create_task(work)
        sample.since, sample.task = None, task
        task.add_done_callback(lambda _: self._ended(sample, task))
        return task

    def hold(self, sample: OpenSample, task: asyncio.Task[bytes]) -> None:
        """Let a sample begin again whose task found that its tenant has not so many tokens left."""
        if sample.task is task and self.by_name.get(sample.name) is sample:
            sample.task, self.running[sample.name] = None, sample

    def _ended(self, sample: OpenSample, task: asyncio.Task[bytes]) -> None:
        """Account for a finished answer even without room; no further sample starts then."""
        sample.since = time.monotonic()
        if self.running.get(sample.name) is sample:
            del self.running[sample.name]
        failed = task.cancelled() or task.exception() is not None  # the client that fetches it gets the error
        if sample.size and not failed and (more := len(task.result()) - sample.size) > 0:
            self._room.take(sample.tenant_id, more, always=True)
            sample.size += more

    def shrink(self, sample: OpenSample, size: int) -> None:
        """Record that a sample was fetched: keep only its answer of `size` bytes."""
        if not sample.fetched and self.by_name.get(sample.name) is sample:
            self.waiting[sample.tenant_id] -= sample.rows
            self.fetched[sample.tenant_id].add(sample.name)
            sample.fetched, sample.wanted = True, None
            self._room.give_back(sample.tenant_id, sample.size - min(size, sample.size))
            sample.size = min(size, sample.size)
