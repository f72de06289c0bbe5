"""Work apart from the process that answers: tenants take turns, and each piece of work has limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from motet.chat.structure import check_grammar, grammar_of
from motet.core.errors import ChatRefusal, EngineError, LimitError
from motet.process.cpu_time import counted
from motet.process.isolated_calls import IsolatedPool, TooMuchError, call, read_lines
from motet.process.isolated_process import WorkLimits
from motet.process.thread_turns import ThreadTurns
from motet.service.bases import Bases
from motet.service.jobs.validation import jobs_in
from tests.support.openai_requests import hostile
from tests.support.waiting import PATIENCE, wait_until

SLEEP = b"__import__('time').sleep(600)"


@pytest.fixture
def turns() -> Iterator[ThreadTurns]:
    made = ThreadTurns(1, 3)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[IsolatedPool]:
    made = IsolatedPool(WorkLimits(seconds=0.5))
    yield made
    made.close()


def test_keys_take_turns_and_one_key_has_one_piece_of_work_at_a_time(turns):
    done: list[str] = []
    go = threading.Event()

    async def main() -> None:
        first = asyncio.create_task(turns.run("a", go.wait))
        await asyncio.sleep(0)
        rest = [
            asyncio.create_task(turns.run(key, lambda key=key, number=number: done.append(f"{key}{number}")))
            for key, number in (("a", 1), ("a", 2), ("b", 1), ("c", 1), ("b", 2))
        ]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *rest)

    asyncio.run(main())
    assert done in (["a1", "b1", "c1", "a2", "b2"], ["b1", "c1", "a1", "b2", "a2"])


def test_work_that_must_wait_for_its_key_starts_no_thread():
    turns, go = ThreadTurns(8, 8, "of-a-key"), threading.Event()

    async def main() -> int:
        work = [asyncio.create_task(turns.run("a", go.wait)) for _ in range(8)]
        await asyncio.sleep(0)
        other = await turns.run("b", int)
        threads = sum(one.name == "of-a-key" for one in threading.enumerate())
        go.set()
        await asyncio.gather(*work)
        return threads + other

    try:
        assert asyncio.run(main()) == 2
    finally:
        turns.close()


def test_a_key_may_have_so_much_waiting_and_what_is_cancelled_does_not_count(turns):
    go = threading.Event()

    async def main() -> None:
        under_way = asyncio.create_task(turns.run("a", go.wait))
        while not turns._busy:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(turns.run("a", int)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(LimitError, match="3 of your requests wait"):
            await turns.run("a", int)
        waiting[0].cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(turns.run("a", int)))
        go.set()
        await under_way
        await asyncio.gather(*waiting[1:])

    asyncio.run(main())


def test_a_schema_that_takes_too_long_is_refused_and_its_process_ends(pool):
    async def main() -> None:
        with pytest.raises(ChatRefusal, match="too complex: it takes more than"):
            await check_grammar(grammar_of(hostile()), pool, "us")
        with pytest.raises(ChatRefusal, match="too complex"):  # which is remembered
            await check_grammar(grammar_of(hostile()), pool, "them")
        await check_grammar(grammar_of({"type": "json_object"}), pool, "us")

    asyncio.run(main())
    assert len(pool.pids()) == 1


def test_work_that_takes_too_long_ends_by_the_processor_or_by_the_clock():
    """The schema above may also end for want of memory; these take none."""
    for seconds, code, why in (
        (1.0, b"sum(iter(int, 1))", "more than 1 s of the processor"),
        (0.1, SLEEP, "by the clock"),
    ):
        pool = IsolatedPool(WorkLimits(seconds=seconds))
        with pytest.raises(TooMuchError, match=why):
            asyncio.run(pool.call("us", eval, code))
        pool.close()


def test_a_schema_that_takes_too_much_memory_is_refused():
    pool, most = IsolatedPool(WorkLimits(seconds=60)), 0

    async def main() -> None:
        nonlocal most
        asked = asyncio.create_task(check_grammar(grammar_of(hostile(40, "m")), pool, "us"))
        while not asked.done():
            for pid in pool.pids():
                with contextlib.suppress(psutil.Error):  # it has ended
                    most = max(most, psutil.Process(pid).memory_info().rss)
            await asyncio.sleep(0.01)
        await asked

    with pytest.raises(ChatRefusal, match="more than 32 MB of memory"):
        asyncio.run(main())
    assert most < 256 * 2**20  # the process may have 1,024 MB for other work
    pool.close()


def test_work_that_nobody_waits_for_ends():
    pool = IsolatedPool(WorkLimits(seconds=600))

    async def main() -> int:
        asked = asyncio.create_task(pool.call("us", eval, SLEEP))
        while not (pids := pool.pids()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(PATIENCE):
            while pool.pids():
                await asyncio.sleep(0.01)
        return pids[0]

    assert not psutil.pid_exists(asyncio.run(main()))
    pool.close()


def test_work_apart_is_behind_the_wall(pool):
    with pytest.raises(RuntimeError, match="PermissionError"):
        asyncio.run(pool.call("us", os.listdir, b"/etc"))


def test_jobs_of_a_text_are_read_apart(pool):
    bases = Bases({"small": "small"})
    text = "jobs:\n- {name: a, data: 'toy:add', reward: exact}\n"
    jobs = asyncio.run(jobs_in(text, bases, pool, "us"))
    assert [job["name"] for job in jobs] == ["a"]


@pytest.mark.parametrize("writes", [False, True])
def test_a_call_reaches_the_files_that_it_names_and_no_others(tmp_path: Path, writes: bool) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for place in (own, other):
        place.mkdir()
        (place / "file").write_bytes(b"text")
    mode = f"'{'w' if writes else 'r'}b'"
    limits = WorkLimits(**{"writable" if writes else "readable": (str(own),)})  # type: ignore[arg-type]
    code = "bytes([open({!r}, " + mode + ").fileno() > 0])"
    assert call(eval, code.format(f"{own}/file").encode(), limits) == b"\x01"
    with pytest.raises(RuntimeError, match="PermissionError"):
        call(eval, code.format(f"{other}/file").encode(), limits)


def test_a_call_is_counted_and_leaves_no_process() -> None:
    used, before = list[float](), psutil.Process().children()
    with counted(used.append):
        assert call(eval, b"b'1' * 2", WorkLimits()) == b"11"
    assert used[0] > 0.03, "a Python has started"
    assert psutil.Process().children() == before


def test_what_a_call_raises_is_told_and_what_it_prints_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="IndexError: list index out of range"):
        call(eval, b"[][0]", WorkLimits())
    assert call(eval, b"b'%d' % __import__('os').write(1, b'noise')", WorkLimits()) == b"5"


def test_lines_that_cannot_go_on_are_told_with_the_last_that_was_printed() -> None:
    lines = read_lines(eval, b"(b'%d\\n' % (4 // left) for left in (2, 1, 0))", WorkLimits(), 2**10)
    assert [next(lines), next(lines)] == [b"2\n", b"4\n"]
    with pytest.raises(EngineError, match=r"exit status 1; its.*ZeroDivisionError"):
        next(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends between two calls")
def test_a_call_ends_with_its_parent() -> None:
    """Also where nothing of the parent's own runs any more."""
    script = (
        "from motet.process.isolated_calls import call; from motet.process.isolated_process import WorkLimits\n"
        f"call(eval, {SLEEP!r}, WorkLimits())"
    )
    parent = psutil.Popen([sys.executable, "-c", script])
    with parent:
        wait_until(lambda: bool(parent.children()))
        (child,) = parent.children()
        time.sleep(0.2)  # it starts, or sleeps
        parent.kill()
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []
