"""What the routes of the Tinker protocol depend on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from motet.service.errors import Refusal
from motet.service.http.depends import Asker, part
from motet.service.tinker.checkpoints import Checkpoints, Downloads
from motet.service.tinker.futures import Futures
from motet.service.tinker.leases import Leases
from motet.service.tinker.models import Models
from motet.service.tinker.samplers import Samplers

Body = TypeVar("Body", bound=BaseModel)
PREFIX = "/tinker/api/v1"
"""A client's `base_url` ends with `/tinker`."""


def new_router() -> APIRouter:
    """A router below the prefix."""
    return APIRouter(prefix=PREFIX, include_in_schema=False)  # whoever speaks another's protocol has its description


def numbered(kind: type[Body]) -> Callable[..., Awaitable[Body]]:
    """Reads a command of a model. Where it is refused, its number is used up all the same: those after it go on."""

    async def read(request: Request, who: Asker) -> Body:
        models: Models = request.app.state.parts[Models]
        try:
            given = await request.json()
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON that can be read: {error}") from error
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            model, number = (given.get(name) if isinstance(given, dict) else None for name in ("model_id", "seq_id"))
            if isinstance(model, str) and model.isascii() and type(number) is int and 0 < number < 2**31:
                job = await asyncio.to_thread(models.find, who, model)
                await asyncio.to_thread(models.refuse, job, number)
            raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error

    return read


DownloadsDep = Annotated[Downloads, part(Downloads)]
LeasesDep = Annotated[Leases, part(Leases)]
ModelsDep = Annotated[Models, part(Models)]
CheckpointsDep = Annotated[Checkpoints, part(Checkpoints)]
FuturesDep = Annotated[Futures, part(Futures)]
SamplersDep = Annotated[Samplers, part(Samplers)]
