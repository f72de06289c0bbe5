"""Health and metrics of the service, for load balancers and Prometheus."""

from __future__ import annotations

import hmac
import shutil
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool

from motet.core.types import JobState
from motet.hosts.host_link import NO_ANSWER
from motet.hosts.hosts import Hosts
from motet.service.database.store import Store
from motet.service.database.tables import Event, StoredJob, Tenant, now
from motet.service.depends import ServiceDep, check_admin
from motet.service.http.auth import bearer
from motet.service.routing import TenantRoute
from motet.service.schemas import Error, Health

router = APIRouter(tags=["health"], route_class=TenantRoute)
_STARTING = "the engine is starting"


@router.get("/healthz")
async def healthy() -> Health:
    """Check that this process answers."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, responses={503: {"model": Health}})
async def ready(request: Request, service: ServiceDep) -> JSONResponse:
    """Check that jobs can run: the database answers and the engine has loaded its base.

    Reasons and bases contain local paths, so they are shown only with a valid key.
    """
    away = await run_in_threadpool(service.store.failure)  # it waits for no reads of tenants
    known = not away and service.access.tenant(request) != ""  # the key cannot be checked without the database
    message = away or service.hosts.failure or ("" if service.hosts.ready else _STARTING) or service.recorder.failure
    status = "unavailable" if message else "ok"
    gone = [name for name, there in service.hosts.there.items() if not there.is_set()]
    if not away and not known and message not in ("", _STARTING, NO_ANSWER):
        message = "the engine or the database is not available; send a key to see the reason"
    if not message and gone:  # jobs on other bases can run
        reasons = {name: (service.hosts.failure_of(name) if known else "") or "is not there yet" for name in gone}
        message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    bases = service.bases
    places = {name: bases.places[name] if known else name for name in bases.names} if bases.several else {}
    first = bases.first if known or bases.several else bases.public(bases.first)
    health = Health(status=status, base=first, bases=places, message=message)
    return JSONResponse(health.model_dump(), 503 if status == "unavailable" else 200)


def metrics_access(request: Request, service: ServiceDep) -> None:
    """Require the metrics token or an admin's key."""
    token = service.settings.config.metrics_token
    if not token or not hmac.compare_digest(bearer(request).encode(), token.encode()):
        check_admin(service.access.principal(request))


@router.get("/metrics", response_class=Response, responses={401: {"model": Error}, 403: {"model": Error}})
def metrics(service: ServiceDep, _: Annotated[None, Depends(metrics_access)]) -> Response:
    """Get counters for Prometheus; needs the service's metrics token, or an admin's key."""
    registry = CollectorRegistry()
    states = Gauge("motet_jobs", "Jobs by state.", ["state"], registry=registry)
    counts = service.store.counts()
    for state in JobState:
        states.labels(state.value).set(counts.get(state.value, 0))
    bases = service.adapters.bases
    labels = ["tenant", "job", *(["base"] if bases.several else [])]
    rate = Gauge("motet_tokens_per_second", "Tokens sampled and trained, by job.", labels, registry=registry)
    progress = service.hosts.progress
    for job_id, (tenant, job, base) in _names_of(service.store, list(progress)).items():
        rate.labels(*(tenant, job, bases.called(base))[: len(labels)]).set(progress[job_id].tokens_per_second)
    waiting = Gauge("motet_queue_age_seconds", "Age of a tenant's oldest queued job.", ["tenant"], registry=registry)
    for tenant, since in _queued_since(service.store).items():
        waiting.labels(tenant).set(max(0.0, now() - since))
    disk = shutil.disk_usage(service.settings.directory)
    Gauge("motet_disk_free_bytes", "Free space of the service's directory.", registry=registry).set(disk.free)
    Gauge("motet_disk_bytes", "Size of the disk of the service's directory.", registry=registry).set(disk.total)
    _add_hosts(registry, service.hosts, ["host", "base"] if bases.several else ["host"])
    text = b"".join(map(generate_latest, (registry, service.request_metrics.registry, service.recorder.metrics)))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _add_hosts(registry: CollectorRegistry, hosts: Hosts, labels: list[str]) -> None:
    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"motet_{name}", text, labels, registry=registry)

    ready, starts = gauge("engine_ready", "Whether the host runs."), gauge("engine_starts", "How often it was started.")
    jobs = gauge("engine_jobs", "Jobs that it has.")
    rate = gauge("engine_tokens_per_second", "Tokens that its jobs sample and train.")
    device = {
        name: gauge(f"device_{name}_seconds", f"Seconds its device spent on {name}.") for name in ("decode", "train")
    }
    device["turns"] = gauge("device_turns_seconds", "Seconds its device worked, on whatever it was.")
    for host in hosts.hosts:
        of_host = (str(host.number), host.base)[: len(labels)]
        ready.labels(*of_host).set(host.ready)
        starts.labels(*of_host).set(host.starts)
        jobs.labels(*of_host).set(hosts.jobs.on(host))
        rate.labels(*of_host).set(sum(job.tokens_per_second for job in host.progress.values()))
        for name, seconds in device.items():
            seconds.labels(*of_host).set(host.device.get(name, 0.0))


def _names_of(store: Store, job_ids: list[str]) -> dict[str, tuple[str, str, str | None]]:
    """The tenant's name, the job's name and the stored name of its base, by id: one query for all jobs."""
    query = select(StoredJob.id, Tenant.name, StoredJob.name, StoredJob.base)
    query = query.join(Tenant, Tenant.id == StoredJob.tenant_id).where(StoredJob.id.in_(job_ids))
    with store.transaction() as session:
        return {row[0]: (row[1], row[2], row[3]) for row in session.execute(query)}


def _queued_since(store: Store) -> dict[str, float]:
    """The time in Unix seconds since when each tenant's oldest queued job waits, by the tenant's name."""
    queued = (
        select(func.max(Event.time).label("since"), StoredJob.tenant_id)
        .join(StoredJob, StoredJob.id == Event.job_id)
        .where(StoredJob.state == JobState.QUEUED.value, Event.kind == "state")
        .group_by(StoredJob.id, StoredJob.tenant_id)
        .subquery()
    )
    oldest = select(Tenant.name, func.min(queued.c.since)).join(queued, queued.c.tenant_id == Tenant.id)
    with store.transaction() as session:
        return {str(row[0]): float(row[1]) for row in session.execute(oldest.group_by(Tenant.name))}
