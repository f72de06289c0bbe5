"""Routes for jobs: submit, list, show, control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Header, Query, Request
from fastapi.responses import Response
from msgspec.structs import asdict
from pydantic import Field

from motet.core.json_text import storable
from motet.core.types import JobState, Wanted, Word
from motet.rewards.reward_elsewhere import masked
from motet.service.composition import Service
from motet.service.database.store import jobs_of, size_of
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.depends import After, Asker, NamedJob, OwnJob, ServiceDep, while_there
from motet.service.errors import Refusal
from motet.service.http.bodies import hold
from motet.service.http.pages import page
from motet.service.jobs.submissions import GivenJob
from motet.service.jobs.validation import LONGEST_TEXT, jobs_in
from motet.service.routing import TenantRoute
from motet.service.schemas import Asked, CheckedJobs, HeldOut, Job, Jobs, JobsToSubmit, Rollouts, SubmittedJobs
from motet.service.schemas.usage import JobChange

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=TenantRoute)


class JobText(Asked):
    """A job file, or a single job, as text."""

    text: str = Field(max_length=LONGEST_TEXT)


def _shown(who: Principal, service: Service, job: StoredJob) -> Job:
    spec = {**storable(job.spec), "rewards": [masked(reward) for reward in job.spec.get("rewards", ())]}
    return Job(
        id=job.id, name=job.name, tenant=service.store.tenants.name_of(job.tenant_id) if who.admin else None,
        state=job.state, message=job.message, step=job.step, steps=job.steps, created=job.created, ended=job.ended,
        spec=spec, reward=job.reward, held_out=job.held_out and HeldOut(**job.held_out), after=job.after or [],
        at=job.start_at, progress=_progress(service, job.id), base=service.bases.shown(job.base), submitter=job.submitter,
        may_change=who.may_change(job),
    )  # fmt: skip


def _changed(who: Principal, service: Service, job: StoredJob) -> Job:
    """The response for a job that has just changed."""
    return _shown(who, service, service.store.job(who, job.id) or job)


def _progress(service: Service, job_id: str) -> dict[str, Any] | None:
    standing = service.hosts.progress.get(job_id)
    if standing is None:
        return None
    progress = asdict(standing)
    if standing.host is None:
        del progress["host"]
    waiting = [one.phase for one in (service.reward_workers, service.agent_workers) if one.waits(job_id)]
    return {**progress, "phase": waiting[0]} if waiting else progress


@router.post("/jobs", status_code=201)
async def submit(
    who: Asker,
    service: ServiceDep,
    job: Annotated[dict[str, Any], Body(description="A job, as in a job file: name, data, reward, …")],
    after: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None,
        Query(max_length=20, description="Jobs, by name or id, that must succeed before this one starts."),
    ] = None,
    at: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Earliest start, in Unix seconds.")
    ] = None,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Job:
    """Submit a job. Repeating a request with the same Idempotency-Key returns the same job."""

    def take() -> Job:
        given = GivenJob(job, after or (), at)
        (submitted,) = service.submissions.submit(who, [given], idempotency_key)
        service.store.audit(who, "submit", submitted.id)
        return _shown(who, service, submitted)

    return await service.check_threads.run(who.tenant_id, take)


@router.post("/submissions", status_code=201, response_model=SubmittedJobs)
async def submit_all(
    who: Asker,
    service: ServiceDep,
    asked: JobsToSubmit,
    idempotency_key: Annotated[str | None, Header(max_length=190)] = None,
) -> Response:
    """Submit several jobs, all or none. A job may name an earlier one in `adapter.init`; it then waits for that one."""

    def take() -> Response:
        given = [GivenJob(one.job, one.after, asked.at) for one in asked.jobs]
        submitted = service.submissions.submit(who, given, idempotency_key)
        for job in submitted:
            service.store.audit(who, "submit", job.id)
        return page(SubmittedJobs(data=[]), (_shown(who, service, job) for job in submitted), status=201)

    return await service.check_threads.run(who.tenant_id, take)


@router.get("/jobs", response_model=Jobs)
def list_jobs(
    who: Asker,
    service: ServiceDep,
    state: JobState | None = None,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """List jobs, newest first."""
    query = jobs_of(who, state, None if after is None else int(after))
    jobs, more = service.store.page(query, size_of(StoredJob.spec), limit)
    next_page = str(jobs[-1].number) if more else None
    return page(Jobs(data=[], next=next_page), (_shown(who, service, job) for job in jobs))


@router.get("/jobs/{job}")
def show(who: Asker, service: ServiceDep, job: NamedJob) -> Job:
    """Get a job by id or name."""
    return _shown(who, service, job)


@router.post("/jobs/{job}/{word}", status_code=202)
def steer(who: Asker, service: ServiceDep, job: OwnJob, word: Word) -> Job:
    """Pause (after the current step), resume or cancel a job; its commits stay."""
    service.submissions.steer(job, Wanted.of(word))
    service.store.audit(who, word, job.id)
    return _changed(who, service, job)


@router.patch("/jobs/{job}")
def change(who: Asker, service: ServiceDep, job: OwnJob, wanted: JobChange) -> Job:
    """Change the budget or priority of a job that has not ended, from the next step on."""
    service.submissions.change(job, wanted.model_dump(exclude_unset=True))
    service.store.audit(who, "change", job.id)
    return _changed(who, service, job)


@router.delete("/jobs/{job}", status_code=204)
def delete(who: Asker, service: ServiceDep, job: OwnJob) -> None:
    """Delete a job that has ended, with its versions, rollouts and events."""
    service.submissions.delete(job)
    service.store.audit(who, "delete", job.id)


_OF_A_ROW = "Only rollouts of the problem of this row of the data, counted from 0. Evaluations have held-out rows."


_MOST_NAMED = 20


def _without_rollouts(problem: int, rows: Sequence[int], evals: bool) -> str:
    """Why an answer about a problem is empty; `rows` are those that its step, or its evaluation, has."""
    if problem in rows:
        return f"row {problem} has rollouts here, with other rewards"
    named = ", ".join(map(str, rows[:_MOST_NAMED])) + (", …" if len(rows) > _MOST_NAMED else "")
    others = "training has the rows that are not held out: purpose=train" if evals else "held-out rows: purpose=eval"
    return f"row {problem} is not among those here: {named}; {others}"


@router.get("/jobs/{job}/rollouts", response_model=Rollouts)
async def rollouts(
    request: Request,
    who: Asker,
    service: ServiceDep,
    job: NamedJob,
    step: Annotated[int | None, Query(ge=0, le=2**53, description="The step; default: the newest.")] = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    purpose: Annotated[
        Literal["train", "eval"], Query(description="With `eval`, `step` is the evaluated version.")
    ] = "train",
    problem: Annotated[int | None, Query(ge=0, le=2**53, description=_OF_A_ROW)] = None,
    tokens: Annotated[bool, Query(description="Include the text and logprob of each token.")] = False,
) -> Response:
    """List the rollouts of a step or an evaluation, with rewards; name the step when you ask for a following page."""
    directory, evals = service.storage.job(job.id), purpose == "eval"
    exact = ("trained_on", "sums")  # of servers' rollouts; its errors may contain paths too
    hidden = exact if tokens else (*exact, "token_texts", "logprobs")

    def fits(row: int, reward: float) -> bool:
        return (
            (problem is None or row == problem)
            and (min_reward is None or reward >= min_reward)
            and (max_reward is None or reward <= max_reward)
        )

    def read() -> Response:
        steps = directory.sampled(evals=evals)
        chosen = steps[-1] if step is None and steps else step
        what = f"the evaluation of version {chosen}" if evals else f"the rollouts of step {chosen}"
        missing = f"{what} of job {job.name!r} is not there"
        if chosen is None or chosen not in steps:
            nothing = "no evaluation is done yet" if evals else "no step is done yet"
            raise Refusal(404, missing if steps else nothing)
        rows, log = [], directory.rollout_log(chosen, evals=evals)
        try:
            found = service.rollout_logs.page(log, fits, int(after or 0), limit)
        except FileNotFoundError as error:  # deleted since it was listed
            raise Refusal(404, missing) from error
        for line in found.lines:  # values stay as they are written: one may have a hundred thousand tokens
            values: dict[str, Any] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            shown = {name: value for name, value in values.items() if name not in hidden}
            if fault := msgspec.json.decode(shown.get("error", b"null")):  # of a reward: it may contain its file's path
                shown["error"] = service.storage.without_places(fault)
            rows.append(msgspec.json.encode(shown))
        note = _without_rollouts(problem, found.problems, evals) if problem is not None and not (rows or after) else ""
        next_page = None if found.next is None else str(found.next)
        return page(Rollouts(step=chosen, steps=steps, data=[], note=note, next=next_page), rows)

    answer = await service.read_threads.run(who.tenant_id, lambda: service.access.timed(request.scope, read))
    hold(request, service.open_answers, who.tenant_id, 2 * len(answer.body))
    return answer


@router.post("/check", response_model=CheckedJobs)
async def check(request: Request, who: Asker, service: ServiceDep, given: JobText) -> Response:
    """Parse a job file (YAML or JSON) or a single job, and check its jobs as for a submission; nothing is stored."""
    read = await while_there(request, jobs_in(given.text, service.settings.bases, service.isolated, who.tenant_id))

    def look() -> Response:
        service.submissions.check(who, [GivenJob(job) for job in read])
        return page(CheckedJobs(jobs=[]), jobs=read)

    return await while_there(request, service.check_threads.run(who.tenant_id, look))
