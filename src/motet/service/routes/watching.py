"""What a picture of jobs needs: the steps of one, thinned; what happens to all, live; and whether a text holds jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from motet.service.database.tenants import Principal
from motet.service.desk import Desk
from motet.service.events import watching
from motet.service.events.feed import Feed
from motet.service.events.news import EVERYTHING
from motet.service.events.stream import ALIVE, PAGE, QUIET_SECONDS
from motet.service.http.asking import Asker, AtDesk, NamedJob, known
from motet.service.jobs.job_text import LONGEST, read_jobs
from motet.service.schemas import CheckedJobs, Steps

router = APIRouter(prefix="/v1", tags=["jobs"])
_KEY_SECONDS = 30.0


class JobText(BaseModel):
    """A job file, or a single job, as text."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=LONGEST)


@router.get("/jobs/{job}/steps")
def steps(
    desk: AtDesk,
    job: NamedJob,
    field: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None, Query(max_length=50, description="All without one.")
    ] = None,
    points: Annotated[int, Query(ge=2, le=5000, description="About the most steps to give.")] = 400,
) -> Steps:
    """The steps of a job for a picture: lines of metrics.jsonl, thinned evenly; evaluations are all there."""
    found, last = watching.steps(desk.store, job.id, points, field or ())
    return Steps(data=found, after=last)


@router.get("/events/stream", response_class=StreamingResponse)
async def stream(
    request: Request,
    who: Asker,
    desk: AtDesk,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="From now on without one.")] = None,
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,15}$")] = None,
) -> StreamingResponse:
    """Events of all jobs as they happen (server-sent events), from `after` or `Last-Event-ID` on; it does not end."""
    start = int(last_event_id) if last_event_id is not None else after
    if start is None:
        start = await asyncio.to_thread(watching.newest, desk.store)
    return StreamingResponse(_stream(request, desk, who, start), media_type="text/event-stream")


async def _stream(request: Request, desk: Desk, who: Principal, after: int) -> AsyncIterator[str]:
    feed: Feed = request.app.state.feed
    yield f"id: {after}\n: from here on\n\n"  # whoever loses the connection at once knows where to go on
    said = asked = time.monotonic()
    while not (desk.leaving or await request.is_disconnected()):
        waiting = asyncio.create_task(desk.news.wait(EVERYTHING, QUIET_SECONDS))  # before looking: nothing is missed
        try:
            found = await asyncio.to_thread(feed.since, who, after, PAGE)
            if found:
                after = found[-1].id
                yield "".join(one.text for one in found)
            elif time.monotonic() - said < QUIET_SECONDS:
                await waiting
                continue
            else:
                yield ALIVE
            said = time.monotonic()
            if said - asked > _KEY_SECONDS:
                asked = said
                if not await asyncio.to_thread(known, request, desk):
                    return
        finally:
            waiting.cancel()


@router.post("/check")
async def check(who: Asker, desk: AtDesk, given: JobText) -> CheckedJobs:
    """Read a job file (YAML or JSON), or a single job, and check its jobs as if they were submitted; nothing is kept."""

    def look() -> CheckedJobs:
        found = read_jobs(given.text, desk.settings.base)
        for job in found:
            desk.checked(who, job)
        return CheckedJobs(jobs=found)

    return await desk.checking.run(who.key_id, look)
