"""Routes for training runs and their checkpoints."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from email.utils import formatdate
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel

from motet.runtime.journal import Nothing
from motet.service.composition import Service
from motet.service.database.tables import StoredJob
from motet.service.database.tenants import Principal
from motet.service.depends import Asker, ServiceDep
from motet.service.errors import Refusal, existing
from motet.service.http.downloads import Download
from motet.service.http.opened import opened_by
from motet.service.http.rights import check_change
from motet.service.tenants.stored import measured
from motet.service.tinker.checkpoints import SAMPLER, WEIGHTS, Checkpoint, Checkpoints, archive_into, files_of, iso
from motet.service.tinker.models import Models
from motet.service.tinker.parts import Tinker, TinkerDep, new_router
from motet.service.tinker.requests import CopyWeights, Id, Lora, Ttl

router = new_router()
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
_LINK, _ARCHIVE, _SECONDS = "link", "archive.tar", 900


class WeightsInfo(BaseModel):
    """A request for a checkpoint."""

    tinker_path: Id


@dataclass(frozen=True)
class Link:
    """What a link opens without a key: one file of a checkpoint, for a quarter of an hour."""

    job: str
    kind: str
    name: str
    file: str
    """A file of the adapter, or `_ARCHIVE` for all."""
    key: str
    """Id of the API key that requested the link, which ends with it."""


class Ttls(BaseModel):
    """Lifetime of a checkpoint."""

    ttl_seconds: Ttl | None = None


def _named(who: Asker, tinker: TinkerDep, run: str, kind: str, name: str) -> Checkpoint:
    return tinker.checkpoints.named(tinker.models.find(who, run), kind, name)


NamedCheckpoint = Annotated[Checkpoint, Depends(_named)]
"""The checkpoint named in the path, of one of the tenant's models."""


async def _own(who: Asker, checkpoint: NamedCheckpoint) -> Checkpoint:
    check_change(who, checkpoint.job, f"model {checkpoint.job.idempotency_key!r}")
    return checkpoint


OwnCheckpoint = Annotated[Checkpoint, Depends(_own)]
"""`NamedCheckpoint` of a request that changes it."""
_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


def _run(models: Models, checkpoints: Checkpoints, owner: str, job: StoredJob) -> dict[str, Any]:
    last = {kind: checkpoints.shown(checkpoints.newest(job, kind)) for kind in (WEIGHTS, SAMPLER)}
    return {
        "training_run_id": job.idempotency_key,
        "base_model": job.base or models.bases.first,
        "model_owner": owner,
        "is_lora": True,
        "corrupted": job.state == "failed",
        "lora_rank": job.spec["adapter"]["rank"],
        "last_request_time": iso(models.journal(job).asked_at() or job.ended or job.created),
        "last_checkpoint": next(iter(last[WEIGHTS]), None),
        "last_sampler_checkpoint": next(iter(last[SAMPLER]), None),
        "user_metadata": models.journal(job).description().get("user_metadata"),
    }


@router.get("/training_runs")
def training_runs(who: Asker, tinker: TinkerDep, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """List the requester's models, newest first."""
    jobs, total = tinker.models.page(who, limit, offset)
    shown = [_run(tinker.models, tinker.checkpoints, who.tenant, job) for job in jobs]
    return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": total}}


@router.get("/training_runs/{run}")
def training_run(who: Asker, tinker: TinkerDep, run: str) -> dict[str, Any]:
    """Get a model."""
    return _run(tinker.models, tinker.checkpoints, who.tenant, tinker.models.find(who, run))


@router.get("/training_runs/{run}/checkpoints")
def checkpoints_of(who: Asker, tinker: TinkerDep, run: str) -> dict[str, Any]:
    """List a model's checkpoints."""
    return {"checkpoints": tinker.checkpoints.shown(tinker.checkpoints.of(tinker.models.find(who, run)))}


@router.get("/checkpoints")
def all_checkpoints(who: Asker, tinker: TinkerDep, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """List the checkpoints of all the requester's models."""
    kept, total = tinker.checkpoints.page(who, limit, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return {"checkpoints": tinker.checkpoints.shown(kept), "cursor": cursor}


@router.post("/weights_info")
def weights_info(who: Asker, tinker: TinkerDep, wanted: WeightsInfo) -> dict[str, Any]:
    """Get the shape of a checkpoint."""
    source = tinker.checkpoints.find(who, wanted.tinker_path)
    lora = tinker.models.journal(source.job).description()["lora"]
    shape = {"train_unembed": False, "train_mlp": lora["train_mlp"], "train_attn": lora["train_attn"]}
    return {"base_model": tinker.models.bases.of(source.job.base), "is_lora": True, "lora_rank": lora["rank"], **shape}


@router.delete(_CHECKPOINT, status_code=204)
def delete_checkpoint(tinker: TinkerDep, checkpoint: OwnCheckpoint) -> Response:
    """Delete a checkpoint."""
    tinker.checkpoints.remove(checkpoint)
    return Response(status_code=204)


@router.put(f"{_CHECKPOINT}/ttl")
def set_ttl(tinker: TinkerDep, checkpoint: OwnCheckpoint, wanted: Ttls) -> dict[str, Any]:
    """Set the lifetime of a checkpoint."""
    tinker.checkpoints.expire(checkpoint, wanted.ttl_seconds)
    return checkpoint.shown()


@router.post(f"{_CHECKPOINT}/publish", status_code=204)
def publish(who: Asker, service: ServiceDep, tinker: TinkerDep, checkpoint: OwnCheckpoint) -> Response:
    """Let every tenant sample and start from a checkpoint."""
    tinker.checkpoints.publish(checkpoint, True)
    service.store.audit(who, "publish checkpoint", checkpoint.path)
    return Response(status_code=204)


@router.delete(f"{_CHECKPOINT}/publish", status_code=204)
def unpublish(who: Asker, service: ServiceDep, tinker: TinkerDep, checkpoint: OwnCheckpoint) -> Response:
    """Make a checkpoint private again."""
    tinker.checkpoints.publish(checkpoint, False)
    service.store.audit(who, "unpublish checkpoint", checkpoint.path)
    return Response(status_code=204)


def _url(request: Request, who: Principal, service: Service, checkpoint: Checkpoint, file: str) -> str:
    link = Link(checkpoint.job.id, checkpoint.kind, checkpoint.name, file, who.key_id)
    return str(request.url_for("download_checkpoint", token=service.secrets.pack(_LINK, asdict(link))))


@router.get(f"{_CHECKPOINT}/external_weights_urls")
def external_urls(request: Request, who: Asker, service: ServiceDep, checkpoint: NamedCheckpoint) -> dict[str, Any]:
    """Get a link to each file of a checkpoint."""
    urls = {file: _url(request, who, service, checkpoint, file) for file in files_of(checkpoint.directory)}
    return {"urls": urls, "expires": iso(time.time() + _SECONDS)}


@router.get(f"{_CHECKPOINT}/archive")
def archive(request: Request, who: Asker, service: ServiceDep, checkpoint: NamedCheckpoint) -> Response:
    """Get a link to all files in one archive, for package versions before 0.36."""
    url, expires = _url(request, who, service, checkpoint, _ARCHIVE), formatdate(time.time() + _SECONDS, usegmt=True)
    return Response(status_code=302, headers={"Location": url, "Expires": expires})


@router.get("/downloads/{token}")
async def download_checkpoint(request: Request, service: ServiceDep, tinker: TinkerDep, token: str) -> Response:
    """Download the file of a link. It needs no key, and ends with the key that created it."""
    fields = service.secrets.unpack(_LINK, token, _SECONDS)
    if fields is None:
        raise Refusal(403, "this link has expired or is invalid; request another")
    link = Link(**fields)
    if await asyncio.to_thread(service.store.tenants.ended_keys, [link.key]):
        raise Refusal(403, "the key under which this link was made was revoked or has expired; ask for another link")
    opened_by(request, link.key)
    job = existing(await asyncio.to_thread(service.store.job_by_id, link.job), "the model is gone")
    directory = (await asyncio.to_thread(tinker.checkpoints.named, job, link.kind, link.name)).directory
    if link.file == _ARCHIVE:
        pack = functools.partial(archive_into, directory=directory)
        return await service.packing.answer(request, job.tenant_id, directory, pack, "application/x-tar", _ARCHIVE)
    return Download(directory / link.file, filename=link.file)


@router.post("/copy_weights")
async def copy_weights(who: Asker, tinker: TinkerDep, service: ServiceDep, wanted: CopyWeights) -> dict[str, Any]:
    """Copy a checkpoint into a new training run that has ended. A tenant's copies are made one after the other."""
    return await service.read_threads.run(who.tenant_id, lambda: _copied(who, tinker, service, wanted))


def _copied(who: Principal, tinker: Tinker, service: Service, wanted: CopyWeights) -> dict[str, Any]:
    source = tinker.checkpoints.find(who, wanted.source_path)
    session_id, number = wanted.session_id or tinker.models.new_session(who), wanted.model_seq_id or 0
    model_id = tinker.models.model_id(who, session_id, number)
    lora = Lora(**tinker.models.journal(source.job).description()["lora"])
    service.quotas.check_storage(who.tenant_id, measured(source.directory).bytes)  # before a model is created
    tinker.models.create(
        who, model_id, tinker.models.bases.of(source.job.base), lora, Nothing(), {"from": wanted.source_path}
    )
    made = tinker.models.find(who, model_id)
    try:
        with service.quotas.reserving(who.tenant_id, measured(source.directory).bytes, made.id):
            return {"tinker_path": tinker.checkpoints.copy(source, made, wanted.ttl_seconds).path}
    finally:
        tinker.models.finish(made)


@router.get("/auth/apikey/me")
def whoami(who: Asker) -> dict[str, Any]:
    """Get the key's owner."""
    return {"user_urn": f"urn:motet:key:{who.key_id}", "org_urn": f"urn:motet:tenant:{who.tenant}"}


ELSEWHERE = {
    ("POST", "/create_custom_loss"): "losses run in the client: call forward_backward_custom with the function itself",
    ("PUT", "/sessions/{session_id}/project"): "there are no projects here; a tenant's key says whose a model is",
    ("GET", "/sessions/{session_id}/trace_export"): "no traces are kept; `motet show` and the dashboard show a model",
    ("POST", "/sessions/search"): "list sessions instead, or look at `motet ls`",
    ("GET", "/audit"): "`GET /v1/audit` has the entries",
    ("GET", "/billing/usage/events"): "nothing is billed; `motet usage` shows what was used",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed; `motet usage` shows what was used",
}
"""Requests of the package that this service does not support, with alternatives."""


def _instead(words: str) -> Callable[[Asker], None]:
    def refuse(who: Asker) -> None:
        raise Refusal(400, words)

    return refuse


for (_method, _path), _words in ELSEWHERE.items():
    router.add_api_route(_path, _instead(_words), methods=[_method])


@router.get("/sessions")
def sessions(who: Asker, tinker: TinkerDep, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """List sessions with models, newest first."""
    return {"sessions": tinker.models.sessions(who, limit, offset)}


@router.get("/sessions/{session_id}")
def session(who: Asker, tinker: TinkerDep, session_id: str) -> dict[str, Any]:
    """List the models of a session."""
    return {
        "training_run_ids": tinker.models.ids(who, session_id),
        "sampler_ids": [],
    }
