"""The client of hosts' processes, message by message; the processes themselves are in test_service_engine.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet.cluster.client import EngineClient
from motet.cluster.host import Engine, EngineHandlers, Host
from motet.cluster.messages import AddJob, Ready, Scored, ScoreRequest, Start
from motet.config.service import ANY_SIZE
from motet.runtime.slots import Rule
from tests.waiting import until

START = Start("small", "", {}, {}, {}, [], 1.0, ANY_SIZE)


async def _never(request: ScoreRequest) -> Scored:
    raise AssertionError(request)


async def _no_machine(start: Start, log: Path) -> Engine:
    await asyncio.Event().wait()
    raise AssertionError


def handlers(open_jobs: Callable[[], list[AddJob]]) -> EngineHandlers:
    """They do nothing else."""
    return EngineHandlers(
        open_jobs, lambda _: None, lambda _: None, _never, lambda *_: None, lambda *_: None, lambda _: None
    )


def test_whoever_runs_a_service_reads_what_the_engine_notes_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "sums of this base depend on the batch"

    async def started() -> Host:
        host = Host(0, START, tmp_path / "engine.log", ThreadPoolExecutor(1))
        host._handlers = handlers(list)
        await host._handle(Ready([note]))
        return host

    with caplog.at_level(logging.WARNING):
        host = asyncio.run(started())
    assert host.ready
    assert [one.getMessage() for one in caplog.records] == [note]


def test_a_job_that_was_kept_and_not_handed_over_is_found_though_nothing_changes(tmp_path: Path) -> None:
    """The database went away between the two."""
    kept: list[AddJob] = []

    async def go() -> None:
        client = EngineClient([START], tmp_path, _no_machine, look=0.05)
        client.start(handlers(lambda: list(kept)))
        (host,) = client.hosts
        host.ready = True
        client._hear(host, Ready([]))
        await until(lambda: not client._unplaced)  # all that there was has been read
        kept.append(AddJob({"name": "late"}, "run", 0, "us", Rule(), 1, ""))
        await until(lambda: client.jobs_on(host) == 1, 5.0)
        await client.kill()

    asyncio.run(go())
