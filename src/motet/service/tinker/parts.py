"""What the routes of the Tinker protocol depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from motet.service.tinker.checkpoints import Checkpoints
from motet.service.tinker.futures import Futures
from motet.service.tinker.models import Models
from motet.service.tinker.samplers import Samplers

PREFIX = "/tinker/api/v1"
"""A client's `base_url` ends with `/tinker`."""


def new_router() -> APIRouter:
    """A router below the prefix."""
    return APIRouter(prefix=PREFIX, include_in_schema=False)  # whoever speaks another's protocol has its description


def _models(request: Request) -> Models:
    found: Models = request.app.state.parts[Models]
    return found


def _checkpoints(request: Request) -> Checkpoints:
    found: Checkpoints = request.app.state.parts[Checkpoints]
    return found


def _futures(request: Request) -> Futures:
    found: Futures = request.app.state.parts[Futures]
    return found


def _samplers(request: Request) -> Samplers:
    found: Samplers = request.app.state.parts[Samplers]
    return found


ModelsDep = Annotated[Models, Depends(_models)]
CheckpointsDep = Annotated[Checkpoints, Depends(_checkpoints)]
FuturesDep = Annotated[Futures, Depends(_futures)]
SamplersDep = Annotated[Samplers, Depends(_samplers)]
