"""The HTTP application: routes, who may ask, and how errors are told."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from motet.service.asking import AtDesk, answer_errors
from motet.service.desk import Desk, Settings
from motet.service.routes import adapters, chat, files, jobs, keys
from motet.service.schemas import Error, Health
from motet.service.store import Store
from motet.types import JobState

ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": Error} for status in (400, 401, 403, 404, 409, 422, 503)}


def create_app(settings: Settings) -> FastAPI:
    """A service over one base.

    Raises:
        StoreError: the database cannot be opened.
    """
    settings.directory.mkdir(parents=True, exist_ok=True)
    store = Store(settings.database or f"sqlite:///{settings.directory / 'motet.db'}")

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await desk.open()
        try:
            yield
        finally:
            await desk.close()
            store.close()

    app = FastAPI(
        title="Motet", version=importlib.metadata.version("motet"), lifespan=life, responses=ERRORS,
        summary="Submit a job, watch it learn, take its adapter home.",
    )  # fmt: skip
    desk = app.state.desk = Desk(settings, store)
    answer_errors(app)
    for part in (jobs, adapters, files, keys, chat):
        app.include_router(part.router)
    _add_health(app)
    return app


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["health"])
    def healthy() -> Health:
        """Whether this process answers."""
        return Health(status="ok")

    @app.get("/readyz", tags=["health"], response_model=Health)
    def ready(desk: AtDesk) -> JSONResponse:
        """Whether jobs can run: the database answers and the engine has loaded its base."""
        message = desk.link.failure or ("" if desk.link.ready.is_set() else "the engine is starting")
        message = message if desk.store.alive() else "the database does not answer"
        found = Health(status="unavailable" if message else "ok", base=desk.settings.base, message=message)
        return JSONResponse(found.model_dump(), 503 if message else 200)

    @app.get("/metrics", tags=["health"], response_class=Response)
    def metrics(desk: AtDesk) -> Response:
        """Counters for Prometheus."""
        registry = CollectorRegistry()
        states = Gauge("motet_jobs", "Jobs by state.", ["state"], registry=registry)
        counts = desk.store.counts()
        for state in JobState:
            states.labels(state.value).set(counts.get(state.value, 0))
        rate = Gauge("motet_tokens_per_second", "Tokens sampled and trained, by job.", ["job"], registry=registry)
        for job, progress in desk.link.progress.items():
            rate.labels(job).set(progress["tokens_per_second"])
        Gauge("motet_engine_ready", "Whether the engine runs.", registry=registry).set(desk.link.ready.is_set())
        Gauge("motet_engine_starts", "How often the engine was started.", registry=registry).set(desk.link.starts)
        for name in ("decode", "train"):
            told = Gauge(f"motet_device_{name}_seconds", f"Seconds the device spent on {name}.", registry=registry)
            told.set(desk.link.device.get(name, 0.0))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
