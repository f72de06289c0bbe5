"""References that a policy is compared with: the base, another adapter, or a model on a server."""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from motet.config import AdapterConfig
from motet.config.adapters import ADAPTERS, adapter_type
from motet.core.batch import Sample, Segment
from motet.core.errors import AdapterError
from motet.core.model_info import with_experts
from motet.core.safetensors_header import saved_targets
from motet.core.types import ADAPTER_CONFIG, FloatArray
from motet.model.find import find_adapter
from motet.rewards.scoring_server import ScoringServer
from motet.runtime.session import Session, Slot

_AT_ONCE = 8
"""Concurrent requests to a server."""


class Reference(ABC):
    """Computes logprobs of a job's samples with a model other than the policy."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def open(self) -> None:  # noqa: B027 - not every one has something to open
        """Acquire resources."""

    @abstractmethod
    async def logprobs(self, segments: tuple[Segment, ...]) -> Sequence[FloatArray]:
        """Logprobs [T] of each sample."""

    async def close(self) -> None:  # noqa: B027
        """Release resources."""


class BaseReference(Reference):
    """The base without an adapter."""

    async def logprobs(self, segments: tuple[Segment, ...]) -> Sequence[FloatArray]:
        """Logprobs [T] of each sample."""
        return await self._session.work.forward(segments, base=True)


class AdapterReference(Reference):
    """An adapter from a directory; it has its own name in the trainer and takes a slot."""

    def __init__(self, session: Session, directory: Path) -> None:
        super().__init__(session)
        self._directory = directory
        self._name = f"{session.job.name}#reference"
        self._slot = Slot(session, self._name)

    async def open(self) -> None:
        """Load the adapter. Raises AdapterError if the directory holds none of this base."""
        await self._slot.take(shape_of(self._directory), self._session.job.seed)
        await self._session.on_device(
            lambda trainer: trainer.load_adapter(self._name, self._directory, optimizer=False)
        )

    async def logprobs(self, segments: tuple[Segment, ...]) -> Sequence[FloatArray]:
        """Logprobs [T] of each sample."""
        return await self._session.work.forward(tuple(replace(segment, adapter=self._name) for segment in segments))

    async def close(self) -> None:
        """Release the slot."""
        await self._slot.give_back()


class ServerReference(Reference):
    """A model on a server."""

    def __init__(self, session: Session, server: ScoringServer) -> None:
        super().__init__(session)
        self._server = server

    async def open(self) -> None:
        """Connect, and mark the job inexact: a server's answers do not depend on the job alone."""
        job = self._session.job
        field = job.config.algorithm.compared_field.removeprefix("kl.")  # own algorithms say `reference`
        job.note_inexact(f"a server judges what is learned (algorithm.{field})")
        await self._server.open()

    async def logprobs(self, segments: tuple[Segment, ...]) -> Sequence[FloatArray]:
        """Logprobs [T] of each sample."""
        permits = asyncio.Semaphore(_AT_ONCE)

        async def scored(sample: Sample) -> FloatArray:
            async with permits:
                values = await self._server.logprobs(sample.token_ids)
            return np.where(sample.loss_mask, values, np.float32(0)).astype(np.float32)

        return await asyncio.gather(*(scored(sample) for segment in segments for sample in segment.samples))

    async def close(self) -> None:
        """Close connections."""
        await self._server.close()


def reference_of(session: Session) -> Reference:
    """The reference that a job's algorithm configures."""
    job, algorithm = session.job, session.job.config.algorithm
    name = algorithm.compared_with
    if (server := algorithm.reference_server) is not None:
        key = os.environ.get(server.key_env or "", "")
        return ServerReference(session, ScoringServer(server.url, server.model, key))
    if name == "start" and job.config.adapter.init is not None:
        return AdapterReference(session, job.init_directory())
    if name in ("base", "start"):
        return BaseReference(session)
    return AdapterReference(session, Path(os.path.expanduser(name)))


def shape_of(directory: Path) -> AdapterConfig:
    """The shape of the adapter in a PEFT directory.

    Raises:
        AdapterError: the directory holds no readable adapter.
    """
    find_adapter(directory)
    path = directory / ADAPTER_CONFIG
    try:
        saved = json.loads(path.read_text("utf-8"))
        shape = {
            "rank": saved["r"],
            "alpha": saved["lora_alpha"],
            "target_modules": saved_targets(saved, directory),
        }
        if parameters := saved.get("target_parameters"):
            shape["target_modules"] = with_experts(shape["target_modules"], parameters)
        return ADAPTERS[adapter_type(saved)].model_validate(shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"{directory} holds no PEFT adapter: {path.name} cannot be read ({error})") from error
