"""Worker processes: started once, asked many times, and stopped (SIGSTOP) whenever another one is measured.

A worker is a process group of its own, and whatever it starts, in whichever group, is stopped, continued and killed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.speed.process_tree import descendants

LOAD_SECONDS = 600.0
REPEAT_SECONDS = 1800.0
HEARTBEAT_SECONDS = 20.0


class SideFailed(Exception):
    """A side cannot be measured; the text says why and stands in the table."""


@dataclass(frozen=True)
class Program:
    """How a worker is started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Put on top of the bench's own."""
    missing: str = ""
    """Why it cannot be started here; empty where it can."""


class Worker:
    """One process that answers requests."""

    def __init__(self, program: Program, log: Path, directory: Path) -> None:
        self.program = program
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(program.command),
                cwd=directory,
                env={**os.environ, **program.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"answers of {program.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def send(self, request: Mapping[str, Any]) -> None:
        """Hand over a request; `answer` waits for what comes of it.

        Raises:
            SideFailed: the process is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideFailed(self._last_words()) from error

    def answer(self, seconds: float, waiting: Callable[[float], None] = lambda _: None) -> dict[str, Any]:
        """What the last request came to; `waiting` is called now and then with the seconds waited so far.

        Raises:
            SideFailed: an error, no answer in time, or the end of the process.
        """
        waited = 0.0
        while True:
            try:
                line = self._answers.get(timeout=min(HEARTBEAT_SECONDS, seconds - waited))
                break
            except queue.Empty:
                waited += HEARTBEAT_SECONDS
                if waited >= seconds:
                    raise SideFailed(f"no answer within {seconds:.0f} s") from None
                waiting(waited)
        if not line:
            raise SideFailed(self._last_words())
        found: dict[str, Any] = json.loads(line)
        if "ok" not in found:
            raise SideFailed(" ".join(str(found.get("unavailable") or found.get("error")).split())[:300])
        ok: dict[str, Any] = found["ok"]
        return ok

    def stop(self) -> None:
        """Take the process and all that descend from it off the processor."""
        self._signal_group(signal.SIGSTOP)  # first, so that nobody is born while the others are looked for
        _signal_each(descendants(self.pid), signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        _signal_each(descendants(self.pid), signal.SIGCONT)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        """End them, also when they are stopped."""
        family = descendants(self.pid)
        self._signal_group(signal.SIGKILL)
        _signal_each(family, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal_group(self, number: signal.Signals) -> None:
        """The id belongs to this group until the process has been waited for, which only `kill` does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended: {lines[-1][:200]}" if lines else "the process ended without a word"


def _signal_each(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Workers:
    """All workers of a run; all but the one whose turn it is are stopped."""

    def __init__(self, programs: Sequence[Program], logs: Path, directory: Path, say: Callable[[str], None]) -> None:
        self._programs = {program.name: program for program in programs}
        self._logs, self._directory, self._say = logs, directory, say
        self._running: dict[str, Worker] = {}
        self.failed: dict[str, str] = {}
        """Why a program is not there, by name."""
        self.loaded: dict[str, dict[str, Any]] = {}
        """What programs said when they had loaded: versions and seconds."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self.end(name)

    def start(self, names: Sequence[str]) -> None:
        """Start and load programs, all at the same time; one that fails is noted in `failed`."""
        for name in names:
            program = self._programs[name]
            if program.missing:
                self.failed[name] = program.missing
            elif name not in self._running and name not in self.failed:
                self._say(f"starting {name}")
                self._running[name] = Worker(program, self._logs / f"{name.replace(':', '-')}.log", self._directory)
        for name in [name for name in names if name in self._running and name not in self.loaded]:
            with self._noting(name):
                self._running[name].send({"op": "load"})
        for name in [name for name in names if name in self._running and name not in self.loaded]:
            with self._noting(name):
                self.loaded[name] = self._running[name].answer(LOAD_SECONDS, lambda s, name=name: self._wait(name, s))  # type: ignore[misc]
                self._say(f"{name} is there after {self.loaded[name].get('seconds', 0.0):.1f} s")
        for worker in self._running.values():
            worker.stop()

    def ask(self, name: str, request: Mapping[str, Any], seconds: float = REPEAT_SECONDS) -> dict[str, Any]:
        """Give a worker its turn for one request.

        Raises:
            SideFailed: it has failed, now or before.
        """
        if name in self.failed or name not in self._running:
            raise SideFailed(self.failed.get(name, f"{name} was not started"))
        worker = self._running[name]
        worker.go_on()
        try:
            worker.send(request)
            return worker.answer(seconds, lambda s: self._wait(name, s))
        finally:
            worker.stop()

    def end(self, name: str) -> None:
        """Kill a worker; unknown names are fine."""
        worker = self._running.pop(name, None)
        if worker is not None:
            worker.kill()

    def _wait(self, name: str, seconds: float) -> None:
        self._say(f"… {name}, {seconds:.0f} s so far")

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except SideFailed as error:
            self._say(f"{name} cannot be measured: {error}")
            self.failed[name] = str(error)
            self.end(name)
