"""Preparations share a host: a short one does not wait for the end of a long one, and each has limits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from motet.config import DataConfig
from motet.core.errors import DataError
from motet.core.types import Message, Problem
from motet.runtime.start_turns import StartTurns
from motet.tasks.dataset import read_source
from motet.tasks.pace import Pace
from motet.tasks.problems import Problems
from motet.tasks.row_files import OF_A_JOB, rows_of
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

MB = 2**20


def endless(until: threading.Event) -> Iterator[Problem]:
    """Rows that come until something else has happened."""
    number = 0
    while not until.is_set():
        yield Problem(number, (Message("user", "what?"),), "that")
        number += 1


@pytest.mark.parametrize("free", [False, True])
def test_a_short_preparation_ends_in_the_middle_of_a_long_one(free: bool) -> None:
    short_is_done = threading.Event()

    def prepared(pace: Pace, rows: Iterator[Problem] | list[Problem]) -> int:
        with pace.kept():
            return len(Problems.of(rows))

    async def prepare(turns: StartTurns, tenant: str, rows: Iterator[Problem] | list[Problem]) -> int:
        async with turns.preparing(tenant, free=free) as turn:
            loop = asyncio.get_running_loop()
            pace = Pace(lambda: asyncio.run_coroutine_threadsafe(turn.give_way(), loop).result())
            return await asyncio.to_thread(prepared, pace, rows)

    async def scenario() -> None:
        turns = StartTurns(lambda _: 0.0)
        long = [asyncio.create_task(prepare(turns, f"long-{n}", endless(short_is_done))) for n in range(3)]
        while not turns._preparing.locked():
            await asyncio.sleep(0)
        rows = [Problem(0, (Message("user", "what?"),), "that")]
        async with asyncio.timeout(PATIENCE):  # without a turn, the others never end
            assert await prepare(turns, "short", rows) == 1
            assert not any(one.done() for one in long)
            short_is_done.set()
            await asyncio.gather(*long)

    try:
        asyncio.run(scenario())
    finally:
        short_is_done.set()


def test_the_time_of_others_is_not_charged() -> None:
    clock = [0.0]

    async def scenario() -> None:
        turns = StartTurns(lambda _: 1.0, lambda: clock[0])

        async def other() -> None:
            async with turns.preparing("other"):
                clock[0] += 7.0

        async with turns.preparing("us") as turn:
            clock[0] += 1.0
            waiting = asyncio.create_task(other())
            await asyncio.sleep(0)
            await turn.give_way()
            clock[0] += 1.0
        await waiting
        assert turns._rests["us"] - clock[0] == 2.0

    asyncio.run(scenario())


def test_a_pause_that_is_under_way_counts_as_the_time_of_others() -> None:
    """A file's timer asks in the middle of a pause."""
    seen: list[float] = []

    def others() -> None:
        time.sleep(0.02)
        seen.append(pace.away)

    pace = Pace(others)
    while not seen:
        pace.step(0)
    assert 0.02 <= seen[0] <= pace.away


def test_rows_that_grow_beyond_a_tenants_room_are_refused_while_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = pyarrow.table({"prompt": ["what? " * 1000] * 20_000, "answer": ["that"] * 20_000})
    pyarrow.parquet.write_table(rows, file)
    assert file.stat().st_size < MB
    config = DataConfig(source=str(file))
    with (
        Pace(room=5 * MB).kept(),
        pytest.raises(DataError, match=r"storage_mb: the rows of this job take more than the 5\.0"),
    ):
        read_source(config, OF_A_JOB)
    with Pace().kept():
        assert read_source(config, OF_A_JOB).problems.size > 100 * MB


def test_a_preparation_has_so_much_time_of_the_processor() -> None:
    never = threading.Event()
    with Pace(seconds=0.05).kept(), pytest.raises(DataError, match=r"more than 0\.05 s of the processor"):
        Problems.of(endless(never))
    problems = Problems.of([Problem(0, (Message("user", "what?"),), "that")])
    with Pace(seconds=0.05).kept(), pytest.raises(DataError, match="s of the processor"):
        _read_for_ever(problems)
    with Pace(seconds=math.inf).kept():
        assert len(list(problems)) == 1


def _read_for_ever(problems: Problems) -> None:
    while True:
        list(problems)


def test_the_processes_that_read_for_a_preparation_count(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a?"], "answer": ["b"]}), tmp_path / "rows.parquet")
    pace, begun = Pace(), time.thread_time()
    with pace.kept():
        assert len(list(rows_of(tmp_path / "rows.parquet", OF_A_JOB))) == 1
    assert pace.used > time.thread_time() - begun + 0.03, "a Python has started"
