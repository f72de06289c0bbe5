"""Preparations share a host: a short one does not wait for the end of a long one, and each has limits."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from motet.config import DataConfig
from motet.core.errors import DataError
from motet.core.types import Message, Problem
from motet.data import parquet_rows
from motet.data.dataset import read_source
from motet.data.problems import Problems
from motet.data.row_files import OF_A_JOB, rows_of
from motet.process import pace
from motet.process.pace import Pace
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.tier1

MB = 2**20


def endless(until: threading.Event) -> Iterator[Problem]:
    """Rows that come until something else has happened."""
    number = 0
    while not until.is_set():
        yield Problem(number, (Message("user", "what?"),), "that")
        number += 1


def test_preparations_have_their_slices_in_the_order_in_which_they_came() -> None:
    slices, over = list[int](), threading.Event()

    def prepare(name: int) -> None:
        with Pace().kept():
            slices.append(name)
            while not over.is_set():
                pace.step()
                if slices[-1] != name:
                    slices.append(name)
                    over.set() if len(slices) == 10 else None

    before = pace._WORKING.came
    with pace._WORKING:
        threads = [threading.Thread(target=prepare, args=(name,)) for name in range(3)]
        for number, thread in enumerate(threads, 2):
            thread.start()
            wait_until(lambda: pace._WORKING.came == before + number)  # noqa: B023
    for thread in threads:
        thread.join(PATIENCE)
    assert slices[:10] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_a_short_preparation_ends_in_the_middle_of_a_long_one() -> None:
    short_is_done, long_begins = threading.Event(), threading.Event()

    def rows_of_a_long_one() -> Iterator[Problem]:
        long_begins.set()
        yield from endless(short_is_done)

    def prepared(rows: Iterator[Problem] | list[Problem]) -> int:
        with Pace().kept():
            return len(Problems.of(rows))

    with ThreadPoolExecutor(4) as threads:
        try:
            long = [threads.submit(prepared, rows_of_a_long_one()) for _ in range(3)]
            assert long_begins.wait(PATIENCE)
            short = threads.submit(prepared, [Problem(0, (Message("user", "what?"),), "that")])
            assert short.result(PATIENCE) == 1, "without a turn, the others never end"
            assert not any(one.done() for one in long)
        finally:
            short_is_done.set()


def test_one_preparation_works_at_a_time() -> None:
    working, most = [0], [0]

    def prepare() -> None:
        with Pace().kept():
            working[0] += 1
            most[0] = max(most[0], working[0])
            time.sleep(0.001)
            working[0] -= 1

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(prepare) for _ in range(16)]:
            done.result(PATIENCE)
    assert most == [1]


def test_a_file_that_takes_more_time_of_the_processor_is_refused(tmp_path: Path) -> None:
    """A few kilobytes that stand for very much, and a process that may compute for a second."""
    table = pyarrow.table(
        {"prompt": pyarrow.array(["what?" * 20_000] * 30_000).dictionary_encode(), "answer": ["b"] * 30_000}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"cannot be read: it.*processor, the limit"):
        for _ in parquet_rows.read_limited(tmp_path / "rows.parquet", 1.0, 4096, MB):
            pass


def test_a_file_that_gives_nothing_is_given_up(tmp_path: Path) -> None:
    """It takes no time of the processor: a pipe that nobody writes to, as a disk that is away."""
    os.mkfifo(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"cannot be read: it.*the clock, the limit"):
        list(parquet_rows.read_limited(tmp_path / "rows.parquet", 0.05, 4096, MB))


def test_rows_that_grow_beyond_a_tenants_room_are_refused_while_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    rows = pyarrow.table({"prompt": ["what? " * 1000] * 20_000, "answer": ["that"] * 20_000})
    pyarrow.parquet.write_table(rows, file)
    assert file.stat().st_size < MB
    config = DataConfig(source=str(file))
    with (
        Pace(room=5 * MB).kept(),
        pytest.raises(DataError, match=r"storage_mb: the rows.*more than the 5\.0"),
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
    seconds, begun = list[float](), time.thread_time()
    with Pace().kept(seconds.append):
        assert len(list(rows_of(tmp_path / "rows.parquet", OF_A_JOB))) == 1
    assert sum(seconds) > time.thread_time() - begun + 0.03, "a Python has started"
