"""Events of jobs: thinned steps for charts, pages of events, and live streams."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from motet.chat.completer import EVENTS
from motet.core.types import JobState
from motet.service.composition import Service
from motet.service.database.tables import Event
from motet.service.depends import Asker, NamedJob, ServiceDep
from motet.service.events import ANY_JOB, as_sent, within
from motet.service.http.pages import page
from motet.service.routing import TenantRoute
from motet.service.schemas import Events, JobEvent, Steps

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=TenantRoute)
_PAGE = 500
"""Events read at a time."""
_QUIET_SECONDS = 15.0
"""Interval of keep-alive comments; clients treat a silent stream as dead."""
_ALIVE = ": still here\n\n"
READS_PER_SECOND = 100.0
"""Of all streams of a tenant together: hundreds of streams would take all of the event loop."""
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
    request: Request,
    service: Service,
    tenant_id: str,
    topic: str,
    read: Callable[[int], Read],
    after: int,
    head: str = "",
) -> AsyncIterator[str]:
    """What `read` returns after an event, again whenever the topic is published.

    Ends when the service stops or the client disconnects.
    """
    bus, sent = service.bus, time.monotonic() if head else -math.inf
    service.streams[tenant_id] += 1
    try:
        if head:
            yield head
        while not (bus.closed or await request.is_disconnected()):
            published = bus.next(topic)  # taken before reading, to miss nothing
            found = await service.stream_threads.run(tenant_id, functools.partial(read, after))
            after, told = found.last, found.text
            if not told and not found.ended and time.monotonic() - sent >= _QUIET_SECONDS:
                told = _ALIVE
            if told:
                yield told
                sent = time.monotonic()
            if found.ended:
                return
            await bus.pause(service.streams[tenant_id] / READS_PER_SECOND)
            if not told:
                await within(published, _QUIET_SECONDS)
    finally:
        service.streams -= Counter((tenant_id,))


@router.get("/jobs/{job}/events", response_model=Events)
def events(service: ServiceDep, job: NamedJob, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Response:
    """List events after a given one, at most 500."""
    return page(Events(data=[]), map(JobEvent.model_validate, service.store.events(job.id, after, _PAGE)))


@router.get("/jobs/{job}/events/stream", response_class=StreamingResponse)
async def stream_job(
    request: Request,
    who: Asker,
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
    return StreamingResponse(_lines(request, service, who.tenant_id, job.id, read, start), media_type=EVENTS)


@router.get("/jobs/{job}/steps", response_model=Steps)
def steps(
    service: ServiceDep,
    job: NamedJob,
    field: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None, Query(max_length=50, description="All without one.")
    ] = None,
    points: Annotated[int, Query(ge=2, le=5000, description="Approximate number of steps.")] = 400,
) -> Response:
    """The steps of a job for a chart: lines of metrics.jsonl, thinned evenly; those with evaluations are thinned apart."""
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
    lines = _lines(request, service, who.tenant_id, ANY_JOB, read, start, head)
    return StreamingResponse(lines, media_type=EVENTS)


def _ends(entry: Event) -> bool:
    return entry.kind == "state" and JobState(entry.data["state"]).final
