"""Ctrl-C, SIGTERM, or the stop button of a notebook: the first lets steps finish and saves, the second stops at once.

interrupt = Interrupt(tell=print)
interrupt.run(main)              # main() enters `interrupt.heard(stop, jobs)` around what can be stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

from motet.runtime.progress import JobProgress
from motet.types import JobState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 1.0


class Interrupt:
    """Hears that a person wants a run to end, and answers at once."""

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        """Nothing is heard yet.

        Args:
            notify: called with a line for the person.
        """
        self._notify = notify or (lambda line: None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pressed = False
        self._early = False  # asked for while nothing was heard yet
        self._terminated = 0.0  # when the last SIGTERM that counts came
        self._press: Callable[[], None] = lambda: None  # until something is heard

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine to its end, also from inside a notebook, whose thread has a loop of its own already."""

        async def awaited() -> None:
            await main()

        def whole() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(awaited())

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            whole()
        else:
            self._run_beside(whole)

    def _run_beside(self, whole: Callable[[], None]) -> None:
        failure: list[BaseException] = []
        ended = threading.Event()

        def inside() -> None:
            try:
                whole()
            except BaseException as error:  # handed to the caller's thread
                failure.append(error)
            finally:
                ended.set()

        with self._handed_on():  # before anything runs that could be stopped
            threading.Thread(target=inside, name="motet-run").start()
            ended.wait()
        if failure:
            raise failure[0]

    @contextlib.contextmanager
    def _handed_on(self) -> Iterator[None]:
        """Ctrl-C in this thread is the run's to hear, and raises nothing here."""

        def hand_on(*_: object) -> None:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._press)
            else:
                self._early = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, hand_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def heard(self, stop: Callable[[], None], jobs: Sequence[JobProgress]) -> Iterator[None]:
        """While the block runs, end it when somebody asks.

        Args:
            stop: lets the steps under way finish, saves, and ends.
            jobs: what goes on, for the answer.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def terminate() -> None:
            """`timeout` and others send the signal twice, to the process and to its group: that is one word."""
            if not self._terminated or loop.time() - self._terminated > _ECHO_SECONDS:
                self._terminated = loop.time()
                press()

        def press() -> None:
            if self._pressed and task is not None:
                words = "stopping now; what was saved stays"
                task.cancel()
            else:
                words = f"{_finishing(jobs)}; press Ctrl-C again to stop now"
                stop()
            self._pressed = True
            # whoever reads what is printed may have ended with the same Ctrl-C
            with contextlib.suppress(Exception, SystemExit):
                self._notify(words)

        self._loop, self._press = loop, press
        signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        for number in signals:
            loop.add_signal_handler(number, terminate if number == signal.SIGTERM else press)
        if self._early:
            press()
        try:
            yield
        finally:
            self._loop = None
            for number in signals:
                loop.remove_signal_handler(number)


def _finishing(jobs: Sequence[JobProgress]) -> str:
    running = [job for job in jobs if job.state is JobState.RUNNING]
    if len(running) > 3:
        return f"finishing the steps under way of {len(running)} jobs, then saving"
    steps = ", ".join(f"step {min(job.step + 1, job.steps)} of {job.name}" for job in running)
    return f"finishing {steps}, then saving" if steps else "stopping"
