"""The HTTP application: routes, who may ask, and how errors are told."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from motet.service.database.store import Store
from motet.service.desk import Desk, Settings
from motet.service.events.feed import Feed
from motet.service.http.asking import answer_errors, error_body, known
from motet.service.http.bodies import Bodies
from motet.service.routes import (
    adapters,
    audit,
    chat,
    completions,
    dashboard,
    files,
    fine_tuning,
    graders,
    health,
    jobs,
    keys,
    rewards,
    scoring,
    shares,
    tenants,
    usage,
    watching,
)
from motet.service.schemas import Error

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


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
    app.state.feed = Feed(store, desk.news)
    answer_errors(app)
    uploads = {"/v1/files": settings.config.max_upload_mb, "/v1/adapters": settings.config.max_adapter_mb}
    app.add_middleware(
        Bodies,
        uploads=uploads,
        told=error_body,
        known=lambda request: known(request, desk),
        leaving=lambda: desk.leaving,
    )
    for part in (
        jobs,
        adapters,
        shares,
        files,
        keys,
        tenants,
        usage,
        audit,
        chat,
        completions,
        fine_tuning,
        graders,
        watching,
        dashboard,
        rewards,
        scoring,
        health,
    ):
        app.include_router(part.router)
    return app
