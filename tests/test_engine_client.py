"""The service's client of the engine's process, message by message; the process itself is in test_service_engine.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from motet.service.engine.client import EngineClient, EngineHandlers


async def _never(message: Mapping[str, Any]) -> dict[str, Any]:
    raise AssertionError(message)


def test_whoever_runs_a_service_reads_what_the_engine_notes_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "sums of this base depend on the batch"

    async def started() -> EngineClient:
        client = EngineClient({}, tmp_path / "engine.log")
        client._handlers = EngineHandlers(list, lambda *_: None, _never, lambda *_: None, lambda *_: None)
        await client._handle({"ready": {"notes": [note]}})
        return client

    with caplog.at_level(logging.WARNING):
        client = asyncio.run(started())
    assert client.ready.is_set()
    assert [one.getMessage() for one in caplog.records] == [note]
