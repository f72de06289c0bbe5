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
from motet.cluster.starts import launcher, starts
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.errors import error_body, handle_errors
from motet.service.events import EventBus, EventLog
from motet.service.http.auth import Access
from motet.service.http.bodies import Bodies
from motet.service.http.depends import Parts
from motet.service.http.throttle import CheckThreads, KeyedThreads, RateLimit, ReadThreads
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.jobs.handover import Handover
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.submissions import Submissions
from motet.service.jobs.validation import Allowed
from motet.service.rewards.agent_workers import AgentWorkers
from motet.service.rewards.attached import AttachedWorkers
from motet.service.rewards.grading import Grading
from motet.service.rewards.scoring import Scoring
from motet.service.rewards.workers import RewardWorkers
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
    keys,
    rewards,
    shares,
    tenants,
)
from motet.service.schemas import Error
from motet.service.settings import Settings
from motet.service.storage import Storage
from motet.service.tenants.enforcement import QuotaEnforcer
from motet.service.tenants.ledger import Ledger
from motet.service.tenants.quotas import Quotas
from motet.service.tinker import runs, sampling, startup, training
from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.downloads import Downloads
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models
from motet.service.tinker.samplers import Samplers
from motet.tasks.reward_http import HttpRewards

ROUTES = (
    jobs, events, adapters, shares, files, keys, tenants, completions, fine_tuning, dashboard, rewards, episodes, health,
    startup, training, sampling, runs,
)  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


class Lifecycle:
    """Starts and stops the parts that need it, in order."""

    def __init__(
        self,
        engine: EngineClient,
        handlers: EngineHandlers,
        bus: EventBus,
        queue: JobQueue,
        enforcer: QuotaEnforcer,
        recorder: EventRecorder,
        workers: tuple[AttachedWorkers, ...],
        grading: Grading,
        ledger: Ledger,
        leases: Leases,
        threads: tuple[KeyedThreads, ...],
    ) -> None:
        self._engine, self._handlers, self._bus, self._queue = engine, handlers, bus, queue
        self._enforcer, self._recorder, self._workers = enforcer, recorder, workers
        self._grading, self._ledger, self._leases, self._threads = grading, ledger, leases, threads
        self._watching: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """Start the engine, and watch over jobs and quotas."""
        self._engine.start(self._handlers)
        self._watching = asyncio.gather(self._queue.watch(), self._enforcer.watch(), self._leases.watch())

    def drain(self, seconds: float) -> None:
        """Let everybody go who waits for events or for work; answers under way have so many seconds."""
        self._bus.close()
        reason = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self._engine.refuse, reason)

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        if self._watching is not None:
            self._watching.cancel()
        self._recorder.close()
        stopping = asyncio.create_task(self._engine.stop())
        await asyncio.sleep(0)  # jobs are asked to stop before those that wait for a worker are sent to rest
        for workers in self._workers:
            workers.close()
        self._bus.close()
        await stopping
        await self._grading.close()
        await asyncio.to_thread(self._ledger.flush)
        for threads in self._threads:
            threads.close()


def create_app(settings: Settings) -> FastAPI:
    """A service over one base.

    Raises:
        StoreError: the database cannot be opened.
    """
    settings.directory.mkdir(parents=True, exist_ok=True)
    parts = _parts(settings, Store(settings.database or f"sqlite:///{settings.directory / 'motet.db'}"))
    lifecycle, store, access, bus = parts[Lifecycle], parts[Store], parts[Access], parts[EventBus]

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await lifecycle.open()
        try:
            yield
        finally:
            await lifecycle.close()
            store.close()

    app = FastAPI(
        title="Motet", version=importlib.metadata.version("motet"), lifespan=life, responses=ERRORS,
        summary="Submit a job, watch it learn, take its adapter home.",
    )  # fmt: skip
    app.state.parts = parts
    handle_errors(app)

    def allowed(request: Request) -> bool:
        return access.allows(request) or episodes.allows(request, parts[AgentWorkers])

    uploads = {"/v1/files": settings.config.max_upload_mb, "/v1/adapters": settings.config.max_adapter_mb}
    app.add_middleware(
        Bodies, uploads=uploads, refusal=error_body, allowed=allowed, stopping=lambda: bus.closed
    )  # fmt: skip
    for module in ROUTES:
        app.include_router(module.router)
    return app


def _parts(settings: Settings, store: Store) -> Parts:
    """The parts of a service, in the order in which they need each other."""
    config, allowed = settings.config, Allowed.by(settings)
    storage, bus = Storage(settings.directory), EventBus()
    log = EventLog(store, bus)
    adapters = Adapters(store, storage, settings.base)
    engine = EngineClient(
        starts(_start(settings, storage), config.engine, config.rollout),
        settings.directory,
        launcher(config.cluster, config.engine),
    )
    ledger = Ledger(store)
    quotas = Quotas(store, storage, ledger, config.limits, config.engine.slots)
    enforcer = QuotaEnforcer(quotas, ledger, engine)
    workers = RewardWorkers(store, bus, config.lease_seconds)
    agents = AgentWorkers(store, bus, config.lease_seconds)
    grading = Grading(engine, adapters)
    scoring = Scoring(store, HttpRewards(allowed.addresses), workers, grading)
    recorder = EventRecorder(store, storage, ledger, bus, (workers, agents))
    initial = InitialAdapters(storage, adapters)
    handover = Handover(store, storage, log, recorder, initial, enforcer, engine)
    queue = JobQueue(store, bus, adapters, initial, recorder.record_state, handover.hand_over)
    submissions = Submissions(allowed, store, storage, bus, adapters, quotas, enforcer, queue, handover, engine)
    checks, reads = CheckThreads(), ReadThreads()

    def rest(job_id: str, wanted: bool) -> None:
        workers.rest(job_id, wanted)
        agents.rest(job_id, wanted)

    handlers = EngineHandlers(
        handover.open_jobs, recorder.record_event, recorder.record_usage, scoring.answer, rest, ledger.count_completion,
        bus.publish, agents.run,
    )  # fmt: skip
    models = Models(settings, store, storage, submissions, quotas, engine)
    checkpoints = Checkpoints(models)
    samplers = Samplers(models, checkpoints, storage, engine)
    futures = Futures(models, samplers, quotas, store, bus, settings.directory / "samples")
    leases = Leases(models, futures, store)
    lifecycle = Lifecycle(
        engine, handlers, bus, queue, enforcer, recorder, (workers, agents), grading, ledger, leases, (checks, reads)
    )  # fmt: skip
    return Parts(
        models, leases, checkpoints, Downloads(), samplers, futures,
        settings, store, storage, bus, log, adapters, engine, ledger, quotas, enforcer, workers, agents, grading, recorder,
        handover, queue, submissions, checks, reads, lifecycle, FineTunings(store, storage, adapters),
        Access(store.tenants, RateLimit(config.rate), settings.open_to_all),
    )  # fmt: skip


def _start(settings: Settings, storage: Storage) -> Start:
    config = settings.config
    return Start(
        base=settings.base,
        run=str(storage.run),
        engine={},
        rollout=config.rollout.model_dump(mode="json"),
        rewards={name: asdict(one) for name, one in settings.rewards.items()},
        unwalled=list(config.unwalled),
        patience_seconds=config.patience_seconds,
        largest=config.largest,
    )
