"""Ctrl-C is answered at once: the first lets steps finish, the second stops; in a terminal and in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from motet.core.types import JobState
from motet.runtime.interrupt import Interrupt
from motet.runtime.progress import JobProgress

ADD, SORT = (JobProgress(name, 40, JobState.RUNNING, step) for name, step in (("add", 1), ("sort", 40)))
FIRST = "finishing step 2 of add, step 40 of sort, then saving; press Ctrl-C again to stop now"
SECOND = "stopping now; what was saved stays"


class Run:
    """Something that ends when it is asked to, in its own time, and presses Ctrl-C itself."""

    def __init__(self, presses: int, patience: float) -> None:
        self.told: list[str] = []
        self.ended = False
        self._interrupt = Interrupt(self.told.append)
        self._presses, self._patience = presses, patience

    def start(self) -> None:
        self._interrupt.run(self._main)

    async def _main(self) -> None:
        asked = asyncio.Event()
        with self._interrupt.heard(asked.set, lambda: [ADD, SORT]):
            for press in range(self._presses):
                os.kill(os.getpid(), signal.SIGINT)
                while len(self.told) <= press:  # the answer does not wait for the step
                    await asyncio.sleep(0.01)
            await asked.wait()
            await asyncio.sleep(self._patience)
        self.ended = True


def in_a_terminal(run: Run) -> None:
    run.start()


def in_a_notebook(run: Run) -> None:
    """A cell is a coroutine, and Ctrl-C a KeyboardInterrupt in it, as Python has it where nobody else listens."""

    async def cell() -> None:
        run.start()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("somewhere", [in_a_terminal, in_a_notebook])
def test_the_first_finishes_and_the_second_stops(somewhere: Callable[[Run], None]) -> None:
    once = Run(presses=1, patience=0.05)
    somewhere(once)
    assert (once.told, once.ended) == ([FIRST], True)
    twice = Run(presses=2, patience=1000.0)
    somewhere(twice)
    assert (twice.told, twice.ended) == ([FIRST, SECOND], False)


def test_the_first_finishes_where_nobody_reads_the_answer() -> None:
    """As under `| tee`, which the same Ctrl-C ends: rich then ends this program too."""

    def unread(line: str) -> None:
        raise SystemExit(1)

    ended: list[str] = []

    async def main() -> None:
        asked = asyncio.Event()
        with interrupt.heard(asked.set, lambda: [ADD]):
            os.kill(os.getpid(), signal.SIGINT)
            await asked.wait()
            ended.append("the step")
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(20)
                ended.append("not stopped")

    interrupt = Interrupt(unread)
    interrupt.run(main)
    assert ended == ["the step"]


def test_a_sigterm_that_comes_twice_at_once_is_one_word() -> None:
    """As `timeout` sends it: to the process, and to its group."""
    told: list[str] = []
    interrupt = Interrupt(told.append)

    async def main() -> None:
        asked = asyncio.Event()
        with interrupt.heard(asked.set, lambda: [ADD, SORT]):
            os.kill(os.getpid(), signal.SIGTERM)
            await asked.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)

    interrupt.run(main)
    assert told == [FIRST]


def test_a_notebook_that_is_stopped_before_its_run_listens_is_heard() -> None:
    told: list[str] = []
    interrupt = Interrupt(told.append)

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        asked = asyncio.Event()
        with interrupt.heard(asked.set, lambda: [ADD, SORT]):
            await asked.wait()

    async def cell() -> None:
        interrupt.run(main)

    asyncio.run(cell())
    assert told == [FIRST]


def test_a_fault_of_the_run_reaches_the_cell() -> None:
    async def main() -> None:
        raise ValueError("a fault")

    async def cell() -> None:
        Interrupt().run(main)

    with pytest.raises(ValueError, match="a fault"):
        asyncio.run(cell())
