"""The service's client of the engine's process, message by message; the process itself is in test_service_engine.py."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from motet.config.service import ANY_SIZE
from motet.service.engine.client import EngineClient, EngineHandlers
from motet.service.engine.messages import Ready, Scored, ScoreRequest, Start


async def _never(request: ScoreRequest) -> Scored:
    raise AssertionError(request)


def test_whoever_runs_a_service_reads_what_the_engine_notes_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "sums of this base depend on the batch"

    async def started() -> EngineClient:
        client = EngineClient(Start("small", "", {}, {}, {}, [], 1.0, ANY_SIZE), tmp_path / "engine.log")
        client._handlers = EngineHandlers(
            list, lambda _: None, lambda _: None, _never, lambda *_: None, lambda *_: None, lambda _: None
        )  # fmt: skip
        await client._handle(Ready([note]))
        return client

    with caplog.at_level(logging.WARNING):
        client = asyncio.run(started())
    assert client.ready.is_set()
    assert [one.getMessage() for one in caplog.records] == [note]
