"""What is there: training runs and their checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel

from motet.service.database.tables import StoredJob
from motet.service.http.depends import Asker
from motet.service.tinker.checkpoints import SAMPLER, WEIGHTS, Checkpoints, iso
from motet.service.tinker.models import Models
from motet.service.tinker.parts import CheckpointsDep, ModelsDep, new_router
from motet.service.tinker.requests import Ttl

router = new_router()
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]


class WeightsInfo(BaseModel):
    """Which checkpoint is asked for."""

    tinker_path: str


class Ttls(BaseModel):
    """How long a checkpoint stays."""

    ttl_seconds: Ttl | None = None


def _run(models: Models, checkpoints: Checkpoints, owner: str, job: StoredJob) -> dict[str, Any]:
    saved = list(checkpoints.of(job))
    last = {kind: [one.shown() for one in saved if one.kind == kind][-1:] for kind in (WEIGHTS, SAMPLER)}
    return {
        "training_run_id": job.idempotency_key,
        "base_model": models.base,
        "model_owner": owner,
        "is_lora": True,
        "corrupted": job.state == "failed",
        "lora_rank": job.spec["adapter"]["rank"],
        "last_request_time": iso(job.ended or job.created),
        "last_checkpoint": next(iter(last[WEIGHTS]), None),
        "last_sampler_checkpoint": next(iter(last[SAMPLER]), None),
        "user_metadata": models.journal(job).description().get("user_metadata"),
    }


@router.get("/training_runs")
def training_runs(
    who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, limit: Limit = 20, offset: Offset = 0
) -> dict[str, Any]:
    """The asker's models, newest first."""
    jobs = models.of_session(who)
    shown = [_run(models, checkpoints, who.tenant, job) for job in jobs[offset : offset + limit]]
    return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(jobs)}}


@router.get("/training_runs/{run}")
def training_run(who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, run: str) -> dict[str, Any]:
    """One of them."""
    return _run(models, checkpoints, who.tenant, models.find(who, run))


@router.get("/training_runs/{run}/checkpoints")
def checkpoints_of(who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, run: str) -> dict[str, Any]:
    """What a model saved."""
    return {"checkpoints": [one.shown() for one in checkpoints.of(models.find(who, run))]}


@router.get("/checkpoints")
def all_checkpoints(
    who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    """What all of the asker's models saved."""
    found = [one for job in models.of_session(who) for one in checkpoints.of(job)]
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {"checkpoints": [one.shown() for one in found[offset : offset + limit]], "cursor": cursor}


@router.post("/weights_info")
def weights_info(who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, wanted: WeightsInfo) -> dict[str, Any]:
    """The shape of a checkpoint."""
    source = checkpoints.find(who, wanted.tinker_path)
    lora = models.journal(source.job).description()["lora"]
    shape = {"train_unembed": False, "train_mlp": lora["train_mlp"], "train_attn": lora["train_attn"]}
    return {"base_model": models.base, "is_lora": True, "lora_rank": lora["rank"], **shape}


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
def delete_checkpoint(
    who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, run: str, kind: str, name: str
) -> Response:
    """Delete a checkpoint."""
    checkpoints.remove(checkpoints.named(models.find(who, run), kind, name))
    return Response(status_code=204)


@router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl")
def set_ttl(
    who: Asker, models: ModelsDep, checkpoints: CheckpointsDep, run: str, kind: str, name: str, wanted: Ttls
) -> dict[str, Any]:
    """Say how long a checkpoint stays."""
    found = checkpoints.named(models.find(who, run), kind, name)
    checkpoints.expire(found, wanted.ttl_seconds)
    return found.shown()


@router.get("/sessions")
def sessions(who: Asker, models: ModelsDep, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Sessions that have made a model, newest first."""
    ids = list(dict.fromkeys(str(job.idempotency_key).partition(":")[0] for job in models.of_session(who)))
    return {"sessions": ids[offset : offset + limit]}


@router.get("/sessions/{session_id}")
def session(who: Asker, models: ModelsDep, session_id: str) -> dict[str, Any]:
    """The models of a session."""
    return {"training_run_ids": [job.idempotency_key for job in models.of_session(who, session_id)], "sampler_ids": []}
