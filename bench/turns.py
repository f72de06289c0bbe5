"""An event loop that measures its turns, in this process or, for the engine of a service, in another one.

    uvicorn.Config(app, loop="bench.turns:MeasuredLoop")    # of this process
    with measuring_engines(directory) as told: …            # of the engines of services that are started meanwhile

A turn is measured in CPU time of its thread, without collections of garbage; what the loop waits for does not count. How
late a timer of the loop is shows what else keeps it: a thread that holds the interpreter's lock. What the thread waited for
a processor is taken off, where the kernel tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import mmap
import os
import selectors
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "BENCH_TURNS"
"""The variable that names the file of an engine's turns."""
STACKS = "BENCH_STACKS"
"""The variable that names a file for what runs in long turns; empty writes none, as a measurement should."""
_TICK = 0.002
_FIGURES = struct.Struct("<5d")
_ASKED = struct.Struct("<q")
_LONG = 0.025


@dataclass
class Turns:
    """Turns of the loop in this process."""

    longest: float = 0.0
    latest: float = 0.0
    """Seconds that a timer of the loop was late, by the clock."""
    selecting: float = 0.0
    total: float = 0.0
    collecting: float = 0.0
    longest_collection: float = 0.0


TURNS = Turns()


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        """Wait; it does not count, because some machines count a part of it as work."""
        began = time.thread_time()
        found = super().select(timeout)
        TURNS.selecting += time.thread_time() - began
        return found


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that measures its turns."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self._waits = -1
        self.call_soon(self._tick, self.time(), 0.0)

    def _tick(self, due: float, before: float) -> None:
        now, apart = self.time(), self._apart()
        TURNS.latest = max(TURNS.latest, now - due - (apart - before))
        self.call_at(now + _TICK, self._tick, now + _TICK, apart)

    def _apart(self) -> float:
        """Seconds that the loop's thread has waited for a processor, and those of collections."""
        if self._waits < 0:
            self._waits = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        return int(os.pread(self._waits, 80, 0).split()[1]) / 1e9 + TURNS.collecting

    def _run_once(self) -> None:
        apart, began = TURNS.collecting + TURNS.selecting, time.thread_time()
        super()._run_once()  # type: ignore[misc]
        took = time.thread_time() - began - (TURNS.collecting + TURNS.selecting - apart)
        TURNS.total += took
        TURNS.longest = max(TURNS.longest, took)


def collected(phase: str, _: dict[str, int], began: list[float] = [0.0]) -> None:  # noqa: B006 - kept between the phases
    """Count a collection of garbage: a callback for `gc.callbacks`."""
    if phase == "start":
        began[0] = time.thread_time()
    else:
        took = time.thread_time() - began[0]
        TURNS.collecting += took
        TURNS.longest_collection = max(TURNS.longest_collection, took)


# --- the engine of a service ------------------------------------------------------------------------------------------------


class _EnginesLoop(MeasuredLoop):
    """Tells its turns in a file that another process reads; that one asks for a new begin by a number."""

    def __init__(self, told: mmap.mmap) -> None:
        super().__init__()
        self._told, self._asked = told, 0

    def _run_once(self) -> None:
        super()._run_once()
        (asked,) = _ASKED.unpack_from(self._told, _FIGURES.size)
        if asked != self._asked:
            self._asked, TURNS.longest, TURNS.latest, TURNS.total, TURNS.longest_collection = asked, 0.0, 0.0, 0.0, 0.0
        figures = TURNS.longest, TURNS.latest, TURNS.total, TURNS.longest_collection, float(self._asked)
        _FIGURES.pack_into(self._told, 0, *figures)


class _Policy(asyncio.DefaultEventLoopPolicy):
    def __init__(self, told: mmap.mmap) -> None:
        super().__init__()
        self._told = told

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _EnginesLoop(self._told)


def measure_this_process() -> None:
    """Measure the loop that this process will have; `measured/sitecustomize.py` calls it in engines."""
    asyncio.set_event_loop_policy(_Policy(_shared(Path(os.environ[FILE]))))
    gc.callbacks.append(collected)
    if path := os.environ.get(STACKS):
        threading.Thread(target=_watch, args=(path,), daemon=True).start()


def _shared(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _watch(path: str) -> None:
    """Write what all threads do where this one, or the loop's, was kept for long."""
    main, last, clock = threading.main_thread().ident, 0.0, 0.0
    assert main is not None
    cpu = time.pthread_getcpuclockid(main)
    with Path(path).open("a") as file:
        while True:
            asked, total, clock = time.monotonic(), TURNS.total, time.clock_gettime(cpu)
            time.sleep(_LONG)
            late = time.monotonic() - asked - _LONG
            busy = time.clock_gettime(cpu) - clock
            if late > _LONG or (total == TURNS.total and busy > _LONG * 0.8):
                if time.monotonic() - last > 0.1:
                    file.write(f"--- {time.time():.2f} late {late * 1e3:.0f} ms, the loop's {busy * 1e3:.0f} ms\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=late > _LONG)
                last = time.monotonic()


class Told:
    """The turns of the engine that a service has now."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FIGURES.size + _ASKED.size))
        self._shared, self._asked = _shared(path), 0

    def begin(self) -> None:
        """Forget the turns until now."""
        self._asked += 1
        _ASKED.pack_into(self._shared, _FIGURES.size, self._asked)
        while self._read()[-1] != self._asked:
            time.sleep(0.01)

    def read(self) -> Turns:
        """The turns since `begin`."""
        longest, latest, total, collection, _ = self._read()
        return Turns(longest=longest, latest=latest, total=total, longest_collection=collection)

    def _read(self) -> tuple[float, ...]:
        return _FIGURES.unpack_from(self._shared, 0)


@contextlib.contextmanager
def measuring_engines(directory: Path) -> Iterator[Told]:
    """Services that are started in the block have a measured loop in their engine."""
    told = Told(directory / "turns")
    root = Path(__file__).resolve().parent
    changed = {FILE: str(directory / "turns"), "PYTHONPATH": f"{root / 'measured'}:{root.parent}:{root.parent / 'src'}"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield told
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
