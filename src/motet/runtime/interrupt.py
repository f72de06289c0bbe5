"""Ctrl-C, SIGTERM or a notebook's stop button: the first lets steps finish and saves, the second stops at once.

`Interrupt(notify).run(main)`, where `main` enters `heard(stop, jobs)` around the part that can be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from motet.core.types import JobState
from motet.runtime.progress import JobProgress

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 1.0


class Interrupt:
    """Handles requests to end a run, and reports at once that they were received."""

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        """`notify` is called with a line for the person."""
        self._notify = notify or (lambda line: None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pressed = False
        self._early = False  # requested before `heard`
        self._terminated = 0.0  # time of the last accepted SIGTERM
        self._press: Callable[[], None] = lambda: None  # replaced in `heard`

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine to its end; also from a notebook, whose thread already has an event loop."""

        def whole() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(main())

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            whole()
        else:
            with self._handed_on(), ThreadPoolExecutor(1, "motet-run") as beside:
                beside.submit(whole).result()

    @contextlib.contextmanager
    def _handed_on(self) -> Iterator[None]:
        """Forward Ctrl-C in this thread to the run; nothing is raised here."""

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
    def heard(self, stop: Callable[[], None], jobs: Callable[[], Sequence[JobProgress]]) -> Iterator[None]:
        """Handle requests to end while the block runs: `stop` lets it finish its steps and save, `jobs` are for the message."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def terminate() -> None:
            """Ignore a repeated SIGTERM: `timeout` and others signal both the process and its group."""
            if not self._terminated or loop.time() - self._terminated > _ECHO_SECONDS:
                self._terminated = loop.time()
                press()

        def press() -> None:
            if self._pressed and task is not None:
                words = "stopping now; what was saved stays"
                task.cancel()
            else:
                words = f"{_finishing(jobs())}; press Ctrl-C again to stop now"
                stop()
            self._pressed = True
            # the reader of the output may have ended with the same Ctrl-C
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
