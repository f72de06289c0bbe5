"""Fine-tuning jobs in the format of the `openai` package, and trials of graders.

They are ordinary Motet jobs: all other routes accept them too.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request

from motet.config import JobConfig
from motet.core.errors import StoreError
from motet.core.types import JobState, Wanted, Word
from motet.data.row_files import UPLOADED
from motet.rewards.graders.shapes import Grader, Multi, judges
from motet.rewards.judging import Graded
from motet.runtime.held_out import ACCURACY, figure_of
from motet.service.composition import Service
from motet.service.database.tables import Event, FineTuning, StoredJob
from motet.service.depends import Asker, ServiceDep, while_there
from motet.service.errors import Refusal, bad_field, existing
from motet.service.http.rights import check_change
from motet.service.jobs.submissions import GivenJob
from motet.service.routing import TenantRoute
from motet.service.schemas import fine_tuning as s

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"], route_class=TenantRoute)
Limit = Annotated[int, Query(ge=1, le=200)]
_EVENT = "ftevent-"
_CHECKPOINT = "ftckpt-"
Made = tuple[StoredJob, FineTuning]


def _named(job: str, who: Asker, service: ServiceDep) -> Made:
    return existing(service.fine_tunings.find(who, job), f"there is no fine-tuning job {job!r}")


NamedMade = Annotated[Made, Depends(_named)]
"""The job named in the path, among the requester's fine-tuning jobs."""


def _shown(service: Service, made: Made) -> s.FineTuningJob:
    job, asked = made[0], made[1].request
    state, standing = JobState(job.state), service.hosts.progress.get(job.id)
    left = None if standing is None else standing.seconds_left
    method = asked.get("method") or {"type": "supervised"}
    kind = method["type"]
    own = method.get(kind) or {}
    given = {name: value for name, value in (own.get("hyperparameters") or {}).items() if value}
    common = {name: given.get(name, "auto") for name in ("n_epochs", "batch_size", "learning_rate_multiplier")}
    tokens = None
    directory = service.storage.job(job.id)
    if state.final and directory.versions() and (committed := directory.newest()) is not None:
        tokens = committed.tokens_trained
    return s.FineTuningJob(
        id=job.id,
        created_at=int(job.created),
        finished_at=None if job.ended is None else int(job.ended),
        estimated_finish=None if left is None else int(time.time() + left),
        model=asked["model"],
        fine_tuned_model=f"{job.name}@best" if state is JobState.SUCCEEDED else None,
        organization_id=job.tenant_id,
        status=job.state,
        error=s.FineTuningError(code="job_failed", message=job.message) if state is JobState.FAILED else None,
        training_file=asked["training_file"],
        validation_file=asked.get("validation_file"),
        hyperparameters=common,
        method={"type": kind, kind: {**own, "hyperparameters": {**common, **given}}},
        trained_tokens=tokens,
        seed=JobConfig.model_validate(job.spec).effective_seed,
        suffix=asked.get("suffix"),
        metadata=asked.get("metadata"),
    )


@router.post("/jobs")
async def create(
    request: Request,
    who: Asker,
    service: ServiceDep,
    asked: s.FineTuningRequest,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> s.FineTuningJob:
    """Create a job. Unsupported fields are refused by name."""
    body: dict[str, Any] = await request.json()
    again = request.headers.get("x-stainless-retry-count", "0") != "0"  # the package has had no answer

    def make() -> s.FineTuningJob:
        if again and (made := service.fine_tunings.just_made(who, body)) is not None:
            return _shown(service, made)
        tree = service.fine_tunings.job_of(who, asked)
        job = service.submissions.submit(who, [GivenJob(tree)], idempotency_key)[0]
        service.fine_tunings.keep(job.id, body)
        service.store.audit(who, "submit", job.id)
        return _shown(service, (job, FineTuning(job_id=job.id, request=body)))

    return await service.read_threads.run(who.tenant_id, make)


@router.get("/jobs")
def list_jobs(
    request: Request,
    who: Asker,
    service: ServiceDep,
    after: Annotated[str | None, Query(max_length=100, description="The last id of the page before.")] = None,
    limit: Limit = 20,
) -> s.FineTuningJobs:
    """List fine-tuning jobs, newest first. `metadata[k]=v` filters by this value."""
    wanted = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[")
    }
    page, more = service.fine_tunings.page(who, after, limit, wanted)
    return s.FineTuningJobs(data=[_shown(service, one) for one in page], has_more=more)


@router.get("/jobs/{job}")
def retrieve(service: ServiceDep, made: NamedMade) -> s.FineTuningJob:
    """Get a job."""
    return _shown(service, made)


@router.post("/jobs/{job}/{word}")
def steer(who: Asker, service: ServiceDep, made: NamedMade, word: Word) -> s.FineTuningJob:
    """Pause (after the current step), resume or cancel a job; its commits stay."""
    job, asked = made
    check_change(who, job, f"job {job.name!r}")
    try:
        service.submissions.steer(job, Wanted.of(word))
    except StoreError as error:
        raise Refusal(400, str(error)) from error
    service.store.audit(who, word, job.id)
    return _shown(service, (service.store.job(who, job.id) or job, asked))


@router.get("/jobs/{job}/events")
def events(
    service: ServiceDep,
    made: NamedMade,
    after: Annotated[str | None, Query(pattern=rf"^{_EVENT}\d{{1,15}}$")] = None,
    limit: Limit = 20,
) -> s.FineTuningEvents:
    """List events of a job, newest first."""
    before = None if after is None else int(after.removeprefix(_EVENT))
    entries = service.fine_tunings.events(made[0].id, before, limit + 1)
    return s.FineTuningEvents(data=[_event(made[0], one) for one in entries[:limit]], has_more=len(entries) > limit)


@router.get("/jobs/{job}/checkpoints")
def checkpoints(
    service: ServiceDep,
    made: NamedMade,
    after: Annotated[str | None, Query(pattern=rf"^{_CHECKPOINT}[0-9a-f]{{1,40}}-\d{{1,9}}$")] = None,
    limit: Limit = 10,
) -> s.Checkpoints:
    """List the stored versions of the adapter, newest first."""
    job = made[0]
    before = None if after is None else int(after.rpartition("-")[2])
    directory = service.storage.job(job.id)
    numbers = [one for one in reversed(directory.versions()) if one > 0 and (before is None or one < before)]
    lines = service.fine_tunings.steps(job.id, {step for number in numbers[:limit] for step in (number - 1, number)})
    data = [_checkpoint(directory.version(number), job, number, lines) for number in numbers[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return s.Checkpoints(data=data, has_more=len(numbers) > limit, first_id=first, last_id=last)


@router.post("/alpha/graders/validate")
def validate(who: Asker, service: ServiceDep, asked: s.GraderAsked) -> s.GraderValid:
    """Check that a grader can be used here; otherwise refuse it with the field's name."""
    service.fine_tunings.checked_grader(who, asked.grader)
    return s.GraderValid(grader=asked.grader)


@router.post("/alpha/graders/run")
async def run(who: Asker, service: ServiceDep, request: Request, asked: s.GraderRun) -> s.GraderResult:
    """Score one sample, as a job would."""

    def checked() -> Grader:
        if len(json.dumps(asked.item)) > UPLOADED.row_bytes:
            raise bad_field("item", f"a row may have {UPLOADED.row_bytes / 2**20:g} MB at most")
        grader = service.fine_tunings.checked_grader(who, asked.grader)
        service.quotas.check_day(who.tenant_id, device=bool(judges(grader)), cpu=True)
        return grader

    grader = await asyncio.to_thread(checked)
    started = time.monotonic()
    grading = service.grading.grade(who, grader, asked.item or {}, [asked.model_sample])
    (graded,) = await while_there(request, grading)
    models = [judge.model for judge in judges(grader)]
    return s.GraderResult(
        reward=graded.reward or 0.0,
        metadata=s.GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(graded, service.storage.without_places),
            execution_time=time.monotonic() - started,
            scores=graded.parts,
            token_usage=sum(graded.tokens.values()) if models else None,
            sampled_model_name=models[0] if len(set(models)) == 1 else None,
        ),
        sub_rewards=graded.parts if isinstance(grader, Multi) else {},
        model_grader_token_usage_per_model=graded.tokens,
    )


def _event(job: StoredJob, entry: Event) -> s.FineTuningEvent:
    data = entry.data
    if entry.kind == "step":
        done, evaluated = int(data["step"]) + ("loss" in data), data.get("eval") or {}
        figures, (name, value) = _figures(data, evaluated), figure_of(evaluated)
        words = [f"training {kind} {data[kind]:.3f}" for kind in ("reward", "loss") if data.get(kind) is not None][:1]
        if math.isfinite(value):
            words.append(f"validation {name} {value:.3f} (v{data['step']})")
        message, level = f"Step {done}/{job.steps}: {', '.join(words) or 'done'}", "info"
        data = {"step": done, "total_steps": job.steps, **figures, "metrics": data}
    else:
        reason = str(data.get("message") or "")
        message = f"The job is {data['state']}{f': {reason}' if reason else ''}"
        level = "error" if data["state"] == JobState.FAILED.value else "info"
    return s.FineTuningEvent.model_validate(
        {
            "id": f"{_EVENT}{entry.id}", "created_at": int(entry.time), "level": level, "message": message,
            "type": "metrics" if entry.kind == "step" else "message", "data": data,
        }
    )  # fmt: skip


def _figures(trained: Mapping[str, Any], evaluated: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        "train_loss": trained.get("loss"),
        "valid_loss": evaluated.get("loss", evaluated.get("nll")),
        "valid_accuracy": evaluated.get(ACCURACY),
        "train_mean_reward": trained.get("reward"),
        "valid_mean_reward": evaluated.get("reward"),
    }


def _checkpoint(path: Path, job: StoredJob, number: int, lines: list[dict[str, Any]]) -> s.Checkpoint:
    trained: dict[str, Any] = next((line for line in lines if line["step"] == number - 1 and "loss" in line), {})
    evaluated: dict[str, Any] = next(
        (line["eval"] for line in lines if line["step"] == number and line.get("eval")), {}
    )
    metrics = {"step": float(number), **_figures(trained, evaluated)}
    try:
        created = int(path.stat().st_mtime)
    except FileNotFoundError:  # it was the oldest, and has just been deleted
        created = int(job.created)
    return s.Checkpoint(
        id=f"{_CHECKPOINT}{job.id.removeprefix('job-')}-{number}",
        created_at=created,
        fine_tuned_model_checkpoint=f"{job.name}@{number}",
        fine_tuning_job_id=job.id,
        step_number=number,
        metrics=metrics,
    )


def _errors(graded: Graded, without_places: Callable[[str], str]) -> s.GraderErrors:
    details = {fault: without_places(text) for fault, text in graded.faults.items()}
    return s.GraderErrors(
        formula_parse_error="formula" in graded.faults,
        sample_parse_error="sample" in graded.faults,
        invalid_variable_error="variable" in graded.faults,
        other_error="other" in graded.faults,
        model_grader_parse_error="parse" in graded.faults,
        model_grader_server_error="server" in graded.faults,
        model_grader_server_error_details=details.get("server"),
        details="; ".join(details.values()) or None,
    )
