"""The HTTP application: routes over a service."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Response
from starlette.routing import BaseRoute

from motet.hosts.hosts import longest_sequence
from motet.process.thread_turns import ThreadTurns
from motet.service.composition import Service
from motet.service.database.store import AWAY, Store
from motet.service.errors import error_body, handle_errors
from motet.service.faults import FaultLog, Faults
from motet.service.http.bodies import MOST_DIGITS, Bodies
from motet.service.http.opened import EndsWithKey, KeyWatch
from motet.service.http.origins import Origins
from motet.service.request_log import RequestLog
from motet.service.routes import (
    adapters,
    completions,
    dashboard,
    events,
    files,
    fine_tuning,
    health,
    jobs,
    sign_in,
    tenants,
    work,
)
from motet.service.routing import TenantRoute
from motet.service.schemas import Error
from motet.service.secrets import load_secrets
from motet.service.settings import Settings
from motet.service.tinker import runs, sessions, training
from motet.service.tinker.parts import Tinker

ROUTES = (
    completions, training, sessions, runs,
    files, jobs, events, adapters, tenants, sign_in, fine_tuning, dashboard, work, health,
)  # fmt: skip
"""Searched in this order for each request: those that are sent most come first."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 409, 413, 422, 429, 431, 503, 507)
}

_OBSERVERS_SECONDS = 5.0
"""Seconds for observers to receive pending steps at shutdown; the next start sends the rest."""


class Lifecycle:
    """Starts and stops the parts of a service in order."""

    def __init__(self, service: Service, tinker: Tinker, watch: KeyWatch) -> None:
        self._service, self._tinker, self._keys = service, tinker, watch
        self._watching: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        """Start the engine and the background tasks."""
        service = self._service
        service.followers.start()
        with contextlib.suppress(*AWAY):  # the next start sends it
            service.recorder.observe_ended()
        service.hosts.start(service.handlers())
        self._watching = asyncio.gather(service.queue.watch(), service.enforcer.watch(), self._tinker.leases.watch())
        # a second Ctrl-C skips `close`
        self._watching.add_done_callback(lambda done: done.cancelled() or done.exception())

    def drain(self, seconds: float) -> None:
        """Release everybody who waits for events or work; running answers have `seconds` to finish."""
        self._service.bus.close()
        reason = "the service is stopping; ask again when it is there"
        asyncio.get_running_loop().call_later(seconds, self._service.hosts.refuse, reason)

    async def close(self) -> None:
        """Let jobs finish their step, and end the engine."""
        service = self._service
        if self._watching is not None:
            self._watching.cancel()
        self._keys.close()
        service.recorder.close()
        stopping = asyncio.create_task(service.hosts.stop())
        await asyncio.sleep(0)  # jobs are asked to stop before those that wait for a worker are released
        service.reward_workers.close()
        service.agent_workers.close()
        service.scoring.close()
        service.bus.close()
        await stopping
        await service.grading.close()
        await asyncio.to_thread(service.ledger.flush)
        await asyncio.to_thread(service.followers.close, _OBSERVERS_SECONDS)
        service.queue.close()
        for part in vars(service).values():
            if isinstance(part, ThreadTurns):
                part.close()
        service.request_files.close()
        service.store.close()


def create_app(settings: Settings) -> FastAPI:
    """Create the service over one or several bases.

    Raises:
        StoreError: the database cannot be opened.
        ConfigError: the key for stored secrets is missing.
    """
    sys.set_int_max_str_digits(MOST_DIGITS)
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Store(settings.database or f"sqlite:///{settings.directory / 'motet.db'}")
    try:
        secrets = load_secrets(settings.directory, settings.config.secret_key_file, store)
        service = Service(settings, store, secrets)
        service.storage.remove_arriving(store.has_upload)
    except BaseException:
        store.close()
        raise
    tinker = Tinker(service)
    watch = KeyWatch(store.tenants, (service.reward_workers, service.agent_workers, tinker.futures))
    lifecycle = Lifecycle(service, tinker, watch)

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
    app.state.service, app.state.tinker, app.state.lifecycle = service, tinker, lifecycle
    app.state.session_cookie = service.sign_ins.cookie
    handle_errors(app, service.storage.without_places)

    def positions() -> int:
        return longest_sequence(service.hosts, *settings.bases.names)

    uploads = {"/v1/files": settings.config.max_upload_mb, "/v1/adapters": settings.config.max_adapter_mb}
    app.add_middleware(
        Bodies, config=settings.config.http, room=service.open_bytes, answers=service.open_answers, uploads=uploads,
        refusal=error_body, access=service.access, positions=positions, stopping=lambda: service.bus.closed,
    )  # fmt: skip
    app.add_middleware(EndsWithKey, watch=watch, refusal=error_body)
    if settings.open_to_all:
        app.add_middleware(Origins, names=settings.config.http.hosts, refusal=error_body)
    app.add_middleware(Faults, log=FaultLog())
    app.add_middleware(RequestLog, files=service.request_files, metrics=service.request_metrics)
    app.router.routes.extend(_routes())
    _describe(app)
    return app


@functools.cache
def _routes() -> tuple[BaseRoute, ...]:
    """Of every application of this process: FastAPI computes half a second for them."""
    whole = FastAPI(openapi_url=None, responses=ERRORS)
    for module in ROUTES:
        whole.include_router(module.router)
    for route in whole.routes:  # else FastAPI makes them at the first request, in the event loop
        getattr(route, "effective_candidates", list)()
    return tuple(whole.routes)


def _describe(app: FastAPI) -> None:
    """Serve the OpenAPI document, which is made once: FastAPI would encode it in the event loop for each request."""
    made, lock = list[bytes](), threading.Lock()

    def document() -> Response:
        with lock:
            if not made:
                made.append(json.dumps(app.openapi(), separators=(",", ":")).encode())
        return Response(made[0], media_type="application/json")

    app.router.route_class = TenantRoute
    app.router.routes[:] = [one for one in app.router.routes if getattr(one, "path", "") != app.openapi_url]
    app.add_api_route(app.openapi_url or "/openapi.json", document, include_in_schema=False)
