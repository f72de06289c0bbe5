"""Work apart from the process that answers: tenants take turns, and each piece of work has limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from motet.chat.structure import check_grammar, grammar_of
from motet.core.errors import ChatRefusal, LimitError
from motet.process.apart import Apart, ThreadTurns, TooMuchError, WorkLimits
from motet.service.bases import Bases
from motet.service.jobs.validation import jobs_in
from tests.support.openai_requests import hostile
from tests.support.waiting import PATIENCE

SLEEP = b"__import__('time').sleep(600)"


@pytest.fixture
def turns() -> Iterator[ThreadTurns]:
    made = ThreadTurns(1, 3)
    yield made
    made.close()


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart(WorkLimits(seconds=0.5))
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


def test_a_schema_that_takes_too_long_is_refused_and_its_process_ends(apart):
    async def main() -> None:
        with pytest.raises(ChatRefusal, match="too complex: it takes more than"):
            await check_grammar(grammar_of(hostile()), apart, "us")
        with pytest.raises(ChatRefusal, match="too complex"):  # which is remembered
            await check_grammar(grammar_of(hostile()), apart, "them")
        await check_grammar(grammar_of({"type": "json_object"}), apart, "us")

    asyncio.run(main())
    assert len(apart.pids()) == 1


def test_work_that_takes_too_long_ends_by_the_processor_or_by_the_clock():
    """The schema above may also end for want of memory; these take none."""
    for seconds, code, why in (
        (1.0, b"sum(iter(int, 1))", "more than 1 s of the processor"),
        (0.1, SLEEP, "by the clock"),
    ):
        apart = Apart(WorkLimits(seconds=seconds))
        with pytest.raises(TooMuchError, match=why):
            asyncio.run(apart.call("us", eval, code))
        apart.close()


def test_a_schema_that_takes_too_much_memory_is_refused():
    apart, most = Apart(WorkLimits(seconds=60)), 0

    async def main() -> None:
        nonlocal most
        asked = asyncio.create_task(check_grammar(grammar_of(hostile(40, "m")), apart, "us"))
        while not asked.done():
            for pid in apart.pids():
                with contextlib.suppress(psutil.Error):  # it has ended
                    most = max(most, psutil.Process(pid).memory_info().rss)
            await asyncio.sleep(0.01)
        await asked

    with pytest.raises(ChatRefusal, match="more than 32 MB of memory"):
        asyncio.run(main())
    assert most < 256 * 2**20  # the process may have 1,024 MB for other work
    apart.close()


def test_work_that_nobody_waits_for_ends():
    apart = Apart(WorkLimits(seconds=600))

    async def main() -> int:
        asked = asyncio.create_task(apart.call("us", eval, SLEEP))
        while not (pids := apart.pids()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(PATIENCE):
            while apart.pids():
                await asyncio.sleep(0.01)
        return pids[0]

    assert not psutil.pid_exists(asyncio.run(main()))
    apart.close()


def test_work_apart_is_behind_the_wall(apart):
    with pytest.raises(RuntimeError, match="PermissionError"):
        asyncio.run(apart.call("us", os.listdir, b"/etc"))


def test_jobs_of_a_text_are_read_apart(apart):
    bases = Bases({"small": "small"})
    text = "jobs:\n- {name: a, data: 'toy:add', reward: exact}\n"
    jobs = asyncio.run(jobs_in(text, bases, apart, "us"))
    assert [job["name"] for job in jobs] == ["a"]
