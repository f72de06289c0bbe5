"""Events of jobs: wakes waiting readers, who then read from memory or from the database."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic_core import from_json, to_json
from sqlalchemy import Integer, cast, func, select

from motet.service.database.store import Store
from motet.service.database.tables import Event, StoredJob
from motet.service.database.tenants import Principal
from motet.service.schemas import JobEvent, TenantEvent
from motet.service.turns import Turns

ANY_JOB = ""
"""Topic of events of any job; each job's id is a topic too."""
_MOST_KEPT = 2**26
"""Bytes of steps in memory, over all jobs."""
_AT_ONCE = 32
"""Readers that are woken in one turn of the event loop."""
_PAGE = 500
"""Steps read from the database at once."""
WAITING_JOBS = "waiting jobs"
"""Topic of events after which a waiting job may start."""


class EventBus:
    """Wakes readers that wait for a topic. Any thread may publish; readers are in one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: dict[str, asyncio.Event] = {}
        self.turns = Turns(_AT_ONCE)
        """For those who were woken together."""
        self.published = 0
        """Number of published events of all jobs."""
        self.closed = False
        """Whether the service is stopping, so that nobody should wait."""

    def next(self, topic: str) -> asyncio.Event:
        """An event that is set at the topic's next publication, or when the service stops; get it before reading."""
        self._loop = asyncio.get_running_loop()
        event = self._next.setdefault(topic, asyncio.Event())
        if self.closed:
            event.set()
        return event

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for an event, at most `seconds`; few of those that it wakes go on in one turn of the loop."""
        await within(event, seconds)
        await self.turns.enter()

    async def pause(self, seconds: float) -> None:
        """Wait, but not for longer than the service runs."""
        await within(self.next("the service stops"), seconds)

    def publish(self, *topics: str) -> None:
        """Wake all who wait for one of these topics."""
        self.published += ANY_JOB in topics
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake, topics)

    def close(self) -> None:
        """Wake everybody permanently."""
        self.closed = True
        self._wake(tuple(self._next))

    def _wake(self, topics: Collection[str]) -> None:
        for topic in topics:
            if (event := self._next.pop(topic, None)) is not None:
                event.set()


async def within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def as_sent(event: JobEvent) -> str:
    """A server-sent event."""
    # ASCII, because some clients also end a line at U+2028
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json(ensure_ascii=True)}\n\n"


@dataclass(frozen=True)
class Entry:
    """An event of the log."""

    id: int
    tenant_id: str
    text: str
    """As a server-sent event."""


@dataclass(frozen=True)
class _Steps:
    """The steps of a job."""

    last: int = 0
    """The id of the job's newest event when they were read."""
    lines: Sequence[bytes] = ()
    """As JSON."""
    evaluated: Sequence[int] = ()
    """Places of those with an evaluation."""
    size: int = 0
    """Bytes of the lines."""


class EventLog:
    """Stored events; the newest of all jobs are kept in memory for all readers. Thread-safe."""

    def __init__(self, store: Store, bus: EventBus, most: int = 1000) -> None:
        """`most`: events in memory; readers further behind use the database."""
        self._store, self._bus, self._most = store, bus, most
        self._lock = threading.Lock()
        self._kept: deque[Entry] = deque()
        self._floor: int | None = None
        """Later events up to `_top` are in memory."""
        self._top = 0
        self._published = -1
        self._steps: OrderedDict[str, _Steps] = OrderedDict()
        """By job, the least recently asked first."""

    def newest(self) -> int:
        """The id of the newest event."""
        return self._store.scalar(select(func.max(Event.id))) or 0

    def since(self, who: Principal, after: int, limit: int) -> list[Entry]:
        """Events of a tenant's jobs (an admin's: of all) after a given one, in order, at most about `limit`."""
        with self._lock:
            published = self._bus.published  # before reading: later events are found the next time
            if published != self._published:
                self._load()
                self._published = published
            floor, kept = self._floor, list(self._kept)
        if floor is None or after < floor:
            return self._read(after, limit, None if who.admin else who.tenant_id)
        return [entry for entry in kept if entry.id > after and (who.admin or entry.tenant_id == who.tenant_id)]

    def steps(self, job_id: str, points: int, fields: Collection[str] = ()) -> tuple[list[bytes], int]:
        """About `points` steps of a job, and the id of its newest event, from which a stream can continue.

        Steps are evenly spaced, with the last one, and as many that have an evaluation. `fields` are those of metrics.jsonl
        besides `step`; all if empty. The steps are JSON; each is read from the database once, and kept for a while.
        """
        steps = self._read_steps(job_id)
        places = _spaced(range(len(steps.lines)), points) | _spaced(steps.evaluated, points)
        kept = [steps.lines[place] for place in sorted(places)]
        if fields:
            wanted = ("step", *fields)
            parsed = map(from_json, kept)
            kept = [to_json({name: line[name] for name in wanted if name in line}) for line in parsed]
        return kept, steps.last

    def _read_steps(self, job_id: str) -> _Steps:
        """All steps of a job: those kept, and those since."""
        with self._lock:
            known = self._steps.pop(job_id, None) or _Steps()
        with self._store.transaction() as session:
            last = session.scalar(select(func.max(Event.id)).where(Event.job_id == job_id)) or 0
        lines, evaluated, size, after = list(known.lines), list(known.evaluated), known.size, known.last
        while after < last:
            steps = select(Event.id, Event.data).where(Event.job_id == job_id, Event.kind == "step")
            page = steps.where(Event.id > after, Event.id <= last).order_by(Event.id).limit(_PAGE)
            with self._store.transaction() as session:
                rows = session.execute(page).all()
            for _, data in rows:
                evaluated += [len(lines)] if data.get("eval") else []
                lines.append(to_json(data, inf_nan_mode="null"))
                size += len(lines[-1])
            after = rows[-1][0] if len(rows) == _PAGE else last
        found = _Steps(last, lines, evaluated, size)
        with self._lock:
            self._steps[job_id] = found
            while len(self._steps) > 1 and sum(one.size for one in self._steps.values()) > _MOST_KEPT:
                self._steps.popitem(last=False)
        return found

    def first_missing_step(self, job_id: str) -> int:
        """The first step that may be missing; the engine must send it and later ones again."""
        return self.first_missing_steps((job_id,)).get(job_id, 0)

    def first_missing_steps(self, job_ids: Collection[str]) -> dict[str, int]:
        """`first_missing_step` of each of these jobs that has one above 0."""
        number = cast(Event.key, Integer)
        query = select(Event.job_id, func.count(), func.max(number)).group_by(Event.job_id)
        query = query.where(Event.job_id.in_(job_ids), Event.kind == "step")
        with self._store.transaction() as session:
            rows = session.execute(query).all()
        return {str(job): int(count) for job, count, last in rows if count == last + 1}  # otherwise one is missing

    def _load(self) -> None:
        if self._floor is None:
            self._floor = self._top = self.newest()
            return
        while entries := self._read(self._top, self._most, None):
            self._kept.extend(entries)
            self._top = entries[-1].id
            while len(self._kept) > self._most:
                self._floor = self._kept.popleft().id

    def _read(self, after: int, limit: int, tenant_id: str | None) -> list[Entry]:
        query = select(Event, StoredJob.tenant_id).join(StoredJob, StoredJob.id == Event.job_id)
        query = query.where(Event.id > after).order_by(Event.id).limit(limit)
        if tenant_id is not None:
            query = query.where(StoredJob.tenant_id == tenant_id)
        with self._store.transaction() as session:
            return [_entry(row[0], str(row[1])) for row in session.execute(query)]


def _spaced(places: Sequence[int], points: int) -> set[int]:
    """About as many of these places, with the last one."""
    return {*places[:: -(-len(places) // points) or 1], *places[-1:]}


def _entry(event: Event, tenant_id: str) -> Entry:
    fields = {"id": event.id, "job": event.job_id, "kind": event.kind, "time": event.time, "data": event.data}
    return Entry(event.id, tenant_id, as_sent(TenantEvent.model_validate(fields)))
