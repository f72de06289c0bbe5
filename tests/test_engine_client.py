"""The client of a host's process, message by message; the process itself is in test_service_engine.py."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet.cluster.host import EngineHandlers, Host
from motet.cluster.messages import Ready, Scored, ScoreRequest, Start
from motet.config.service import ANY_SIZE


async def _never(request: ScoreRequest) -> Scored:
    raise AssertionError(request)


def test_whoever_runs_a_service_reads_what_the_engine_notes_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "sums of this base depend on the batch"

    async def started() -> Host:
        host = Host(
            0, Start("small", "", {}, {}, {}, [], 1.0, ANY_SIZE), tmp_path / "engine.log", ThreadPoolExecutor(1)
        )
        host._handlers = EngineHandlers(
            list, lambda _: None, lambda _: None, _never, lambda *_: None, lambda *_: None, lambda _: None
        )  # fmt: skip
        await host._handle(Ready([note]))
        return host

    with caplog.at_level(logging.WARNING):
        host = asyncio.run(started())
    assert host.ready
    assert [one.getMessage() for one in caplog.records] == [note]
