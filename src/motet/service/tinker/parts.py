"""Dependencies of the Tinker protocol's routes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from motet.core.errors import MotetError
from motet.service.composition import Service
from motet.service.database.tenants import Principal
from motet.service.depends import Asker
from motet.service.errors import Refusal
from motet.service.routing import TenantRoute
from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models, own_model
from motet.service.tinker.samplers import Samplers

Body = TypeVar("Body", bound=BaseModel)
PREFIX = "/tinker/api/v1"
"""A client's `base_url` ends with `/tinker`."""


class Tinker:
    """The parts for this protocol only."""

    def __init__(self, service: Service) -> None:
        store, storage, hosts, quotas = service.store, service.storage, service.hosts, service.quotas
        self.models = Models(service.bases, store, storage, service.submissions, quotas, hosts, service.secrets)
        self.checkpoints = Checkpoints(self.models, storage)
        self.samplers = Samplers(self.models, self.checkpoints, storage, hosts, service.asks)
        self.write_threads = service.write_threads
        self.futures = Futures(
            self.models, self.samplers, quotas, store, service.bus, storage, service.open_bytes, self.write_threads
        )
        self.leases = Leases(self.models, self.checkpoints, self.futures, store)


async def _tinker(request: Request) -> Tinker:
    tinker: Tinker = request.app.state.tinker
    return tinker


TinkerDep = Annotated[Tinker, Depends(_tinker)]


def new_router() -> APIRouter:
    """A router with the prefix."""
    return APIRouter(
        prefix=PREFIX, include_in_schema=False, route_class=TenantRoute
    )  # the protocol is described elsewhere


async def use_up(who: Principal, tinker: Tinker, model: str, number: int) -> None:
    """Record that a command was refused, so that later ones proceed; does nothing if there is no such model."""

    def refuse() -> None:
        with contextlib.suppress(MotetError, Refusal):
            tinker.models.refuse(own_model(tinker.models, who, model), number)

    if 0 < number < 2**31:
        await tinker.write_threads.run(who.tenant_id, refuse)


def numbered(kind: type[Body]) -> Callable[..., Awaitable[Body]]:
    """Returns a reader for a command of a model. A refused command still uses its number, so that later ones proceed."""

    async def read(request: Request, who: Asker, tinker: TinkerDep) -> Body:
        given = None
        try:
            given = await request.json()
            return kind.model_validate(given)
        except (ValueError, HTTPException) as error:
            if given is None:
                with contextlib.suppress(ValueError, RecursionError):  # which also reads half a character
                    given = json.loads(getattr(request, "_body", b""))
            model, number = (given.get(name) if isinstance(given, dict) else None for name in ("model_id", "seq_id"))
            if isinstance(model, str) and model.isascii() and type(number) is int:
                await use_up(who, tinker, model, number)
            if isinstance(error, ValidationError):
                raise RequestValidationError(
                    [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                ) from error
            if isinstance(error, ValueError):
                raise Refusal(400, f"the body is not valid JSON: {error}") from error
            raise

    return read
