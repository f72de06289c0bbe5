"""The HTTP application: the parts of a service, each made of those that it uses, and the routes over them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request

from motet.cluster.client import EngineClient
from motet.cluster.host import EngineHandlers
from motet.cluster.messages import Start
from motet.cluster.starts import launcher, starts_of
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.errors import error_body, handle_errors
from motet.service.events import EventBus, EventLog
from motet.service.http.auth import Access, CheckThreads, RateLimit, ReadThreads
from motet.service.http.bodies import Bodies
from motet.service.http.depends import Parts
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.jobs.handover import Handover
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.submissions import Submissions
from motet.service.jobs.validation import Allowed
from motet.service.rewards.grading import Grading
from motet.service.rewards.scoring import Scoring
from motet.service.routes import (
    adapters,
    completions,
    dashboard,
    episodes,
    events,
    files,
    fine_tuning,
    health,
    jobs,
    rewards,
    tenants,
)
from motet.service.schemas import Error
from motet.service.settings import Settings
from motet.service.storage import Storage
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import QuotaEnforcer, Quotas
from motet.service.tenants.stored import StoredBytes
from motet.service.tinker import runs, sessions, training
from motet.service.tinker.checkpoints import Checkpoints, Downloads
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models
from motet.service.tinker.samplers import Samplers
from motet.service.workers.agents import AgentWorkers
from motet.service.workers.rewards import RewardWorkers
from motet.tasks.reward_http import HttpRewards

ROUTES = (
    jobs, events, adapters, files, tenants, completions, fine_tuning, dashboard, rewards, episodes, health,
    sessions, training, runs,
)  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503, 507)
}


JOBS_AHEAD = 4
"""Jobs of each tenant that a host prepares while its slots are taken; the others wait in the database."""


class Lifecycle:
    """Starts and stops the parts that need it, in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._watching: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """Start the engine, and watch over jobs and quotas."""
        parts = self._parts
        parts[EngineClient].start(parts[EngineHandlers])
        self._watching = asyncio.gather(parts[JobQueue].watch(), parts[QuotaEnforcer].watch(), parts[Leases].watch())
        self._watching.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # a second Ctrl-C skips `close`

    def drain(self, seconds: float) -> None:
        """Let everybody go who waits for events or for work; answers under way have so many seconds."""
        self._parts[EventBus].close()
        reason = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self._parts[EngineClient].refuse, reason)

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        parts = self._parts
        if self._watching is not None:
            self._watching.cancel()
        parts[EventRecorder].close()
        stopping = asyncio.create_task(parts[EngineClient].stop())
        await asyncio.sleep(0)  # jobs are asked to stop before those that wait for a worker are sent to rest
        parts[RewardWorkers].close()
        parts[AgentWorkers].close()
        parts[Scoring].close()
        parts[EventBus].close()
        await stopping
        await parts[Grading].close()
        await asyncio.to_thread(parts[Ledger].flush)
        parts[CheckThreads].close()
        parts[ReadThreads].close()
        parts[Store].close()


def create_app(settings: Settings) -> FastAPI:
    """A service over one base, or several.

    Raises:
        StoreError: the database cannot be opened.
    """
    settings.directory.mkdir(parents=True, exist_ok=True)
    parts = _parts(settings, Store(settings.database or f"sqlite:///{settings.directory / 'motet.db'}"))
    lifecycle = Lifecycle(parts)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await lifecycle.open()
        try:
            yield
        finally:
            await lifecycle.close()

    app = FastAPI(
        title="Motet", version=importlib.metadata.version("motet"), lifespan=life, responses=ERRORS,
        summary="Submit a job, watch it learn, take its adapter home.",
    )  # fmt: skip
    app.state.parts, app.state.lifecycle = parts, lifecycle
    handle_errors(app)

    def allowed(request: Request) -> bool:
        return parts[Access].allows(request) or episodes.allows(request, parts[AgentWorkers])

    uploads = {"/v1/files": settings.config.max_upload_mb, "/v1/adapters": settings.config.max_adapter_mb}
    app.add_middleware(
        Bodies, uploads=uploads, refusal=error_body, allowed=allowed, stopping=lambda: parts[EventBus].closed
    )  # fmt: skip
    for module in ROUTES:
        app.include_router(module.router)
    return app


def _parts(settings: Settings, store: Store) -> Parts:
    """The parts of a service, in the order in which they need each other."""
    config, allowed, bases = settings.config, Allowed.by(settings), settings.bases
    storage, bus = Storage(settings.directory), EventBus()
    bases.known = store.known_bases({name: bases.place(name) for name in bases.names} if bases.several else {})
    log = EventLog(store, bus)
    adapters = Adapters(store, storage, bases)
    starts = starts_of([(_start(settings, storage, name), *hosts) for name, hosts in settings.hosts.items()])
    engine = EngineClient(starts, settings.directory, launcher(config.cluster, *settings.hosts.values()))
    engine.jobs.ahead = JOBS_AHEAD
    ledger = Ledger(store)
    stored, slots = StoredBytes(store, storage), sum(hosts.slots for hosts, _ in settings.hosts.values())
    quotas = Quotas(store, stored, ledger, config.limits, slots)
    enforcer = QuotaEnforcer(quotas, ledger, engine)
    workers = RewardWorkers(store, bus, config.lease_seconds)
    agents = AgentWorkers(store, bus, config.lease_seconds)
    grading = Grading(engine, adapters)
    scoring = Scoring(store, HttpRewards(allowed.addresses), workers, grading)
    recorder = EventRecorder(store, storage, ledger, stored, bus, (workers, agents))
    initial = InitialAdapters(storage, adapters)
    handover = Handover(store, storage, log, recorder, initial, enforcer, engine, bases)
    queue = JobQueue(store, bus, adapters, initial, recorder.record_state, handover.hand_over)
    submissions = Submissions(allowed, bases, store, storage, bus, adapters, quotas, enforcer, queue, handover, engine)
    checks, reads = CheckThreads(), ReadThreads()

    def rest(job_id: str, wanted: bool) -> None:
        workers.rest(job_id, wanted)
        agents.rest(job_id, wanted)

    def obeyed(job_id: str) -> None:
        stored.changed(job_id)
        bus.publish(job_id)

    handlers = EngineHandlers(
        handover.open_jobs, recorder.record_event, recorder.record_usage, scoring.answer, rest, ledger.count_completion,
        obeyed, agents.run,
    )  # fmt: skip
    models = Models(bases, store, storage, submissions, quotas, engine)
    checkpoints = Checkpoints(models)
    samplers = Samplers(models, checkpoints, storage, engine)
    futures = Futures(models, samplers, quotas, store, bus, storage)
    leases = Leases(models, futures, store)
    return Parts(
        models, leases, checkpoints, Downloads(), samplers, futures,
        settings, bases, store, storage, stored, bus, log, adapters, engine, ledger, quotas, enforcer, workers, agents, grading,
        scoring, recorder, handover, queue, submissions, checks, reads, handlers, FineTunings(store, storage, adapters),
        Access(store.tenants, RateLimit(config.rate), settings.open_to_all),
    )  # fmt: skip


def _start(settings: Settings, storage: Storage, base: str) -> Start:
    config = settings.config
    return Start(
        base=settings.bases.place(base),
        serves=base,
        run=str(storage.run),
        engine={},
        rollout={},
        rewards={name: asdict(one) for name, one in settings.rewards.items()},
        unwalled=list(config.unwalled),
        patience_seconds=config.patience_seconds,
        largest=config.largest(*settings.hosts[base]),
    )
