"""Figures of processes that start anew for each repeat: memory, and the time until something happens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.speed.process_tree import command_line, descendants, peak_resident, private_bytes
from bench.speed.workers.serve import Repeat, Work

LOOK_SECONDS = 0.1


class PeakMemory:
    """The peak of this process's resident memory and, on top, what its helpers have for themselves alone.

    Processes that run rewards are the user's code and are left out.
    """

    def __init__(self) -> None:
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def total(self) -> int:
        """Bytes."""
        return peak_resident() + self._most

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            helpers = [pid for pid in descendants(os.getpid()) if "motet.workers.worker" not in command_line(pid)]
            self._most = max(self._most, sum(private_bytes(pid) for pid in helpers))


def wall_time(command: Sequence[str], until: str = "") -> Work:
    """A work: the seconds from the start of a process until it prints a line, or until it ends."""

    @contextmanager
    def work(args: dict[str, Any]) -> Iterator[Repeat]:
        def repeat() -> dict[str, Any]:
            started = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                seen = any(until and line.strip() == until for line in process.stdout)
                if not seen:
                    process.wait()
                seconds = time.perf_counter() - started
                process.stdout.read()
            if process.returncode != 0 or (until and not seen):
                raise RuntimeError(f"{command[-1]} failed with code {process.returncode}")
            return {"seconds": seconds, "units": 1}

        yield repeat

    return work


def last_number(command: Callable[[dict[str, Any]], Sequence[str]]) -> Work:
    """A work: the last word that a process prints, a number."""

    @contextmanager
    def work(args: dict[str, Any]) -> Iterator[Repeat]:
        def repeat() -> dict[str, Any]:
            done = subprocess.run(command(args), stdout=subprocess.PIPE, text=True, check=True)
            return {"value": float(done.stdout.split()[-1])}

        yield repeat

    return work


def motet_help() -> list[str]:
    """`motet --help`, of the environment that this worker runs in."""
    return [str(Path(sys.executable).parent / "motet"), "--help"]
