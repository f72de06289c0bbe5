"""Jobs: submit, list, look, steer, watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Request
from fastapi.responses import StreamingResponse

from motet.service.database.tables import Event, StoredJob
from motet.service.database.tenants import Principal
from motet.service.desk import Desk
from motet.service.events.stream import ALIVE, PAGE, QUIET_SECONDS, written
from motet.service.http.asking import Asker, AtDesk, NamedJob, Refusal, known
from motet.service.jobs.specs import masked
from motet.service.jobs.starts import When
from motet.service.schemas import Events, Job, JobEvent, Jobs, Rollouts
from motet.service.schemas.usage import JobChange
from motet.types import JobState

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def shown(desk: Desk, who: Principal, job: StoredJob) -> Job:
    """A job as it is answered."""
    return Job(
        id=job.id, name=job.name, tenant=desk.store.tenants.name_of(job.tenant_id) if who.admin else None,
        state=job.state, message=job.message,
        step=job.step, steps=job.steps, created=job.created, ended=job.ended, spec=masked(job.spec),
        reward=job.reward, after=job.after or [], at=job.start_at,
        progress=desk.progress(job.id),
    )  # fmt: skip


@router.post("", status_code=201)
async def submit(
    who: Asker,
    desk: AtDesk,
    job: Annotated[dict[str, Any], Body(description="A job as it stands in a job file: name, data, reward, …")],
    after: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None,
        Query(max_length=20, description="Jobs, by name or id, that have to succeed before this one starts."),
    ] = None,
    at: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds before which it does not start.")
    ] = None,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Job:
    """Submit a job. A repeated request with the same Idempotency-Key gives the same job."""

    def take() -> Job:
        found = desk.submit(who, job, idempotency_key, When(after or (), at))
        desk.store.audit(who, "submit", found.id)
        return shown(desk, who, found)

    return await desk.checking.run(who.key_id, take)


@router.get("")
def list_jobs(
    who: Asker,
    desk: AtDesk,
    state: JobState | None = None,
    after: Annotated[str | None, Query(pattern=r"^\d{1,15}$", description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Jobs:
    """Jobs, newest first."""
    found = desk.store.jobs(who, state=state, before=None if after is None else int(after), limit=limit + 1)
    page = found[:limit]
    more = str(page[-1].number) if len(found) > limit else None
    return Jobs(data=[shown(desk, who, job) for job in page], next=more)


@router.get("/{job}")
def show(who: Asker, desk: AtDesk, job: NamedJob) -> Job:
    """One job, by id or name."""
    return shown(desk, who, job)


@router.post("/{job}/{word}", status_code=202)
def steer(who: Asker, desk: AtDesk, job: NamedJob, word: Literal["pause", "resume", "cancel"]) -> Job:
    """Pause (after the step under way), resume, or cancel a job; what it saved stays."""
    desk.steer(job, word)
    desk.store.audit(who, word, job.id)
    return shown(desk, who, desk.store.job(who, job.id) or job)


@router.patch("/{job}")
def change(who: Asker, desk: AtDesk, job: NamedJob, wanted: JobChange) -> Job:
    """Give a job that has not ended another budget or priority; it counts from the next step on."""
    desk.change(job, wanted.model_dump(exclude_unset=True))
    desk.store.audit(who, "change", job.id)
    return shown(desk, who, desk.store.job(who, job.id) or job)


@router.delete("/{job}", status_code=204)
def delete(who: Asker, desk: AtDesk, job: NamedJob) -> None:
    """Forget a job that has ended, with its versions, rollouts and events."""
    desk.delete(job)
    desk.store.audit(who, "delete", job.id)


@router.get("/{job}/rollouts")
def rollouts(
    desk: AtDesk,
    job: NamedJob,
    step: Annotated[int | None, Query(ge=0, description="Which step; the newest without one.")] = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    purpose: Annotated[
        Literal["train", "eval"], Query(description="With `eval`, `step` is the version that was evaluated.")
    ] = "train",
    problem: Annotated[int | None, Query(ge=0, description="Only those of this problem.")] = None,
    tokens: Annotated[bool, Query(description="With the text and the logprob of each token.")] = False,
) -> Rollouts:
    """What a step sampled, or what an evaluation did, with rewards."""
    directory, evals = desk.directory(job.id), purpose == "eval"
    steps = directory.sampled(evals=evals)
    chosen = steps[-1] if step is None and steps else step
    if chosen is None or chosen not in steps:
        what = f"the evaluation of version {step}" if evals else f"the rollouts of step {step}"
        nothing = "no evaluation is done yet" if evals else "no step is done yet"
        raise Refusal(404, f"{what} of job {job.name!r} is not there" if steps else nothing)
    found = directory.read_rollouts(chosen, evals=evals)
    if not tokens:
        for one in found:
            one.pop("token_texts", None)
            one.pop("logprobs", None)
    if problem is not None:
        found = [one for one in found if one.get("problem") == problem]
    low, high = min_reward, max_reward
    found = [
        one
        for one in found
        if (low is None or (one["reward"] is not None and one["reward"] >= low))
        and (high is None or (one["reward"] is not None and one["reward"] <= high))
    ]
    return Rollouts(step=chosen, steps=steps, data=found[:limit])


@router.get("/{job}/events")
def events(desk: AtDesk, job: NamedJob, after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> Events:
    """Events after one of them, at most 500."""
    return Events(data=[_event(entry) for entry in desk.store.events(job.id, after, PAGE)])


@router.get("/{job}/events/stream", response_class=StreamingResponse)
async def stream(
    request: Request,
    desk: AtDesk,
    job: NamedJob,
    after: Annotated[int, Query(ge=0, le=2**53)] = 0,
    last_event_id: Annotated[str | None, Header(pattern=r"^\d{1,15}$")] = None,
) -> StreamingResponse:
    """Events as they happen (server-sent events), from `after` or `Last-Event-ID` on; ends when the job has ended."""
    start = int(last_event_id) if last_event_id is not None else after
    return StreamingResponse(_stream(request, desk, job.id, start), media_type="text/event-stream")


async def _stream(request: Request, desk: Desk, job_id: str, after: int) -> AsyncIterator[str]:
    while not (desk.leaving or await request.is_disconnected()):
        # before looking, so that nothing is missed
        waiting = asyncio.create_task(desk.news.wait(job_id, QUIET_SECONDS))
        try:
            if not await asyncio.to_thread(known, request, desk):  # the key was revoked, or has expired, since it began
                return
            found = await asyncio.to_thread(desk.store.events, job_id, after, PAGE)
            for entry in found:
                after = entry.id
                yield written(_event(entry))
            if found and _ends(found[-1]):
                return
            if not found:
                last = await asyncio.to_thread(desk.store.last_event, job_id)
                if last is None or (last.id <= after and _ends(last)):
                    return
                yield ALIVE
                await waiting
        finally:
            waiting.cancel()


def _ends(entry: Event) -> bool:
    return entry.kind == "state" and JobState(entry.data["state"]).final


def _event(entry: Event) -> JobEvent:
    return JobEvent.model_validate({"id": entry.id, "kind": entry.kind, "time": entry.time, "data": entry.data})
