"""Events of jobs: thinned steps for charts, pages of events, and live streams."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from motet.chat.completer import EVENTS
from motet.core.types import JobState
from motet.service.database.tables import Event
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.events import ANY_JOB, EventBus, as_sent, within
from motet.service.http.pages import page
from motet.service.schemas import Events, JobEvent, Steps

router = APIRouter(prefix="/v1", tags=["jobs"])
_PAGE = 500
"""Events read at a time."""
_QUIET_SECONDS = 15.0
"""Interval of keep-alive comments; clients treat a silent stream as dead."""
_ALIVE = ": still here\n\n"
LastEventId = Annotated[str | None, Header(pattern=r"^\d{1,15}$")]


@dataclass(frozen=True)
class Read:
    """What a stream read after its last event."""

    text: str
    """As server-sent events."""
    last: int
    """Id of the newest event read, or the previous one."""
    ended: bool = False
    """Whether the stream ends."""


async def _lines(
    request: Request, bus: EventBus, topic: str, read: Callable[[int], Read], after: int, head: str = ""
) -> AsyncIterator[str]:
    """What `read` returns after an event, again whenever the topic is published.

    Ends when the service stops or the client disconnects.
    """
    sent = time.monotonic() if head else -math.inf
    if head:
        yield head
    while not (bus.closed or await request.is_disconnected()):
        published = bus.next(topic)  # taken before reading, to miss nothing
        found = await asyncio.to_thread(read, after)
        after = found.last
        if found.text:
            yield found.text
        elif not found.ended and time.monotonic() - sent >= _QUIET_SECONDS:
            yield _ALIVE
        elif not found.ended:
            await within(published, _QUIET_SECONDS)
            continue
        sent = time.monotonic()
        if found.ended:
            return


@router.get("/jobs/{job}/events", response_model=Events)
def events(service: ServiceDep, job: NamedJob, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
    """List events after a given one, at most 500."""
    return page(Events(data=[]), map(JobEvent.model_validate, service.store.events(job.id, after, _PAGE)))


@router.get("/jobs/{job}/events/stream", response_class=StreamingResponse)
async def stream_job(
    request: Request,
    service: ServiceDep,
    job: NamedJob,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Stream events as they happen (server-sent events), after `after` or `Last-Event-ID`; ends with the job."""

    def read(after: int) -> Read:
        entries = service.store.events(job.id, after, _PAGE)
        if entries:
            return Read(
                "".join(as_sent(JobEvent.model_validate(one)) for one in entries), entries[-1].id, _ends(entries[-1])
            )
        last = service.store.last_event(job.id)  # None: the job was deleted
        return Read("", after, last is None or (last.id <= after and _ends(last)))

    start = int(last_event_id) if last_event_id is not None else after
    return StreamingResponse(_lines(request, service.bus, job.id, read, start), media_type=EVENTS)


@router.get("/jobs/{job}/steps", response_model=Steps)
def steps(
    service: ServiceDep,
    job: NamedJob,
    field: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None, Query(max_length=50, description="All without one.")
    ] = None,
    points: Annotated[int, Query(ge=2, le=5000, description="Approximate number of steps.")] = 400,
) -> Response:
    """The steps of a job for a chart: lines of metrics.jsonl, thinned evenly; all evaluations are included."""
    lines, last = service.log.steps(job.id, points, field or ())
    return page(Steps(data=[], after=last), lines)


@router.get("/events/stream", response_class=StreamingResponse)
async def stream(
    request: Request,
    who: Asker,
    service: ServiceDep,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="Default: from now on.")] = None,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Stream events of all jobs as they happen (server-sent events), after `after` or `Last-Event-ID`; never ends."""
    start = int(last_event_id) if last_event_id is not None else after
    if start is None:
        start = await asyncio.to_thread(service.log.newest)

    def read(after: int) -> Read:
        entries = service.log.since(who, after, _PAGE)
        return Read("".join(one.text for one in entries), entries[-1].id if entries else after)

    # a client that loses the connection at once knows where to continue
    head = f"id: {start}\n: from here on\n\n"
    return StreamingResponse(_lines(request, service.bus, ANY_JOB, read, start, head), media_type=EVENTS)


def _ends(entry: Event) -> bool:
    return entry.kind == "state" and JobState(entry.data["state"]).final
