"""The HTTP application: the parts of a service, each made of those that it uses, and the routes over them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request

from motet.apart import Apart, WorkLimits
from motet.cluster.host import HostHandlers
from motet.cluster.hosts import Hosts, longest_sequence
from motet.cluster.local_hosts import code_of, lasting
from motet.cluster.messages import StartHost
from motet.cluster.starts import launcher, starts_of
from motet.native.choice import of_tenants
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import computed_by
from motet.service.adapters.adapters import Adapters
from motet.service.database.store import Store
from motet.service.errors import error_body, handle_errors
from motet.service.events import EventBus, EventLog
from motet.service.http.auth import Access, CheckThreads, RateLimit, ReadThreads, asker
from motet.service.http.bodies import MOST_DIGITS, Bodies, OpenBytes
from motet.service.http.depends import Parts
from motet.service.http.opened import EndsWithKey, KeyWatch
from motet.service.http.origins import Origins
from motet.service.http.sign_in import SignIns
from motet.service.jobs.erasure import Erasure
from motet.service.jobs.fine_tuning import FineTunings
from motet.service.jobs.handover import Handover, begun_jobs
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.jobs.queue import JobQueue
from motet.service.jobs.recorder import EventRecorder
from motet.service.jobs.submissions import Submissions
from motet.service.jobs.validation import Allowed
from motet.service.request_log import RequestFiles, RequestLog, RequestMetrics
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
    sign_in,
    tenants,
)
from motet.service.schemas import Error
from motet.service.secrets import Secrets, load_secrets
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
    jobs, events, adapters, files, tenants, sign_in, completions, fine_tuning, dashboard, rewards, episodes, health,
    sessions, training, runs,
)  # fmt: skip
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503, 507)
}


JOBS_AHEAD = 4
"""Jobs of each tenant that a host prepares while its slots are taken; the others wait in the database."""
_CHECKING, _READING = 4, 8
"""Threads that check jobs, and that read files: one tenant has one of each at a time."""


class Lifecycle:
    """Starts and stops the parts that need it, in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._watching: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """Start the engine, and watch over jobs and quotas."""
        parts = self._parts
        parts[Hosts].start(parts[HostHandlers])
        self._watching = asyncio.gather(parts[JobQueue].watch(), parts[QuotaEnforcer].watch(), parts[Leases].watch())
        self._watching.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # a second Ctrl-C skips `close`

    def drain(self, seconds: float) -> None:
        """Let everybody go who waits for events or for work; answers under way have so many seconds."""
        self._parts[EventBus].close()
        reason = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self._parts[Hosts].refuse, reason)

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        parts = self._parts
        if self._watching is not None:
            self._watching.cancel()
        parts[KeyWatch].close()
        parts[EventRecorder].close()
        stopping = asyncio.create_task(parts[Hosts].stop())
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
        parts[Apart].close()
        parts[RequestFiles].close()
        parts[Store].close()


def create_app(settings: Settings) -> FastAPI:
    """A service over one base, or several.

    Raises:
        StoreError: the database cannot be opened.
        ConfigError: the key of its secrets is not there.
    """
    sys.set_int_max_str_digits(MOST_DIGITS)
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Store(settings.database or f"sqlite:///{settings.directory / 'motet.db'}")
    try:
        secrets = load_secrets(settings.directory, settings.config.secret_key_file, store)
        parts = _parts(settings, store, secrets)
    except BaseException:
        store.close()
        raise
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
    app.state.session_cookie = parts[SignIns].cookie
    handle_errors(app, parts[Storage].without_places)

    def payer(request: Request) -> str:
        return parts[Access].tenant(request) or episodes.owner(request, parts[AgentWorkers])

    def positions() -> int:
        return longest_sequence(parts[Hosts], *settings.bases.names)

    uploads = {"/v1/files": settings.config.max_upload_mb, "/v1/adapters": settings.config.max_adapter_mb}
    app.add_middleware(
        Bodies, config=settings.config.http, room=parts[OpenBytes], uploads=uploads, refusal=error_body, payer=payer,
        asker=asker, positions=positions, stopping=lambda: parts[EventBus].closed,
    )  # fmt: skip
    app.add_middleware(EndsWithKey, watch=parts[KeyWatch], refusal=error_body)
    if settings.open_to_all:
        app.add_middleware(Origins, names=settings.config.http.hosts, refusal=error_body)
    app.add_middleware(RequestLog, files=parts[RequestFiles], metrics=parts[RequestMetrics])
    for module in ROUTES:
        app.include_router(module.router)
    return app


def _parts(settings: Settings, store: Store, secrets: Secrets) -> Parts:
    """The parts of a service, in the order in which they need each other."""
    config, allowed, bases = settings.config, Allowed.by(settings), settings.bases
    storage, bus = Storage(settings.directory), EventBus()
    bases.known = store.known_bases({name: bases.place(name) for name in bases.names} if bases.several else {})
    log = EventLog(store, bus)
    adapters = Adapters(store, storage, bases)
    starts = starts_of(*((_start(settings, storage, store, name), host) for name, host in settings.hosts.items()))
    launch = launcher(config.cluster, *settings.hosts.values()) or lasting(config, settings.directory)
    engine = Hosts(starts, settings.directory, launch)
    engine.jobs.ahead = JOBS_AHEAD
    ledger = Ledger(store)
    stored, slots = StoredBytes(store, storage), sum(host.engine.slots for host in settings.hosts.values())
    quotas = Quotas(store, stored, ledger, config.limits, slots)
    enforcer = QuotaEnforcer(quotas, ledger, engine)
    workers = RewardWorkers(store, bus, config.lease_seconds)
    agents = AgentWorkers(store, bus, config.lease_seconds)
    grading = Grading(engine, adapters)
    scoring = Scoring(store, secrets.asking(HttpRewards(allowed.addresses)), workers, grading)
    recorder = EventRecorder(store, storage, ledger, stored, bus, (workers, agents))
    initial = InitialAdapters(storage, adapters)
    handover = Handover(store, storage, log, recorder, initial, enforcer, engine, bases, secrets)
    queue = JobQueue(store, bus, adapters, initial, recorder.record_state, handover.hand_over)
    submissions = Submissions(
        allowed, bases, store, storage, bus, adapters, quotas, enforcer, queue, handover, engine, secrets
    )
    http = config.http
    checks = CheckThreads(_CHECKING, http.waiting_per_tenant)
    reads = ReadThreads(_READING, http.waiting_per_tenant)
    apart = Apart(WorkLimits(http.processes, http.waiting_per_tenant, http.work_seconds, http.work_memory_mb))

    def rest(job_id: str, wanted: bool) -> None:
        workers.rest(job_id, wanted)
        agents.rest(job_id, wanted)

    def obeyed(job_id: str) -> None:
        stored.changed(job_id)
        bus.publish(job_id)

    handlers = HostHandlers(
        handover.open_jobs, recorder.record_event, recorder.record_usage, scoring.answer, rest, ledger.count_completion,
        obeyed, agents.run, handover.reconcile,
    )  # fmt: skip
    models = Models(bases, store, storage, submissions, quotas, engine, secrets)
    checkpoints = Checkpoints(models)
    samplers = Samplers(models, checkpoints, storage, engine)
    room = OpenBytes(config.http)
    futures = Futures(models, samplers, quotas, store, bus, storage, room)
    leases = Leases(models, futures, store)
    watch = KeyWatch(store.tenants, (workers, agents, futures))
    return Parts(
        models, leases, checkpoints, Downloads(), samplers, futures, watch, RequestMetrics(), RequestFiles(settings.directory),
        Erasure(store, storage, adapters, submissions),
        settings, bases, store, storage, stored, bus, log, adapters, engine, ledger, quotas, enforcer, workers, agents, grading,
        scoring, recorder, handover, queue, submissions, checks, reads, apart, room, handlers,
        FineTunings(store, storage, adapters), SignIns(settings, store, secrets),
        Access(store.tenants, RateLimit(config.rate), settings.open_to_all),
    )  # fmt: skip


def _start(settings: Settings, storage: Storage, store: Store, base: str) -> StartHost:
    config, own = settings.config, None
    if settings.hosts[base].engine.kernels == "auto":
        begun = defaultdict[str, list[JobDirectory]](list)
        for job, tenant, stored in begun_jobs(store):
            if settings.bases.called(stored) == base:
                begun[tenant].append(storage.job(job))
        own = of_tenants(map(computed_by, begun.values()))
    lasts = lasting(config, settings.directory) is not None
    rewards = [one.target.rpartition(":")[0] for one in settings.rewards.values()]
    return StartHost(
        base=settings.bases.place(base),
        serves=base,
        run=str(storage.run),
        engine={},
        rollout={},
        rewards={name: asdict(one) for name, one in settings.rewards.items()},
        unwalled=list(config.unwalled),
        patience_seconds=config.patience_seconds,
        largest=config.largest(settings.hosts[base]),
        own=own,
        takeover_seconds=config.takeover_seconds if lasts else 0.0,
        code=code_of(settings.bases.place(base), *rewards) if lasts else "",
    )
