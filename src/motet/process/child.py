"""Starts processes and says how each ended: `run` to its end, `ChildProcess` for threads, `ChildPipes` for an event loop.

All of Motet starts processes here, except programs of the standard library alone and the parent that forks (`supervised`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from motet.process import cpu_time, ending

TimedOut = subprocess.TimeoutExpired
_READ_SECONDS = 1.0
"""Time to read what a process wrote before its end."""
_MOST_READ = 2**16
"""Bytes of what a process printed, from its end, that are read."""


def run(
    command: Sequence[str], given: str = "", *, seconds: float | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with this input to its end; returns its status and what it printed.

    Raises:
        TimeoutError: it took more seconds by the clock.
        OSError: it cannot be started.
    """
    try:
        return subprocess.run(
            command, input=given, env=env, timeout=seconds, capture_output=True, encoding="utf-8", errors="replace",
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error


def guard(*arguments: str) -> list[str]:
    """Return the command of `motet.process.guard`."""
    return [sys.executable, "-IS", str(Path(__file__).with_name("guard.py")), *arguments]


class ChildProcess(subprocess.Popen[bytes]):
    """A process in a session of its own, which Ctrl-C does not reach, with pipes for its input and output."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def __init__(self, command: Sequence[str], log: Path | None = None, *, quiet: bool = False, **options: Any) -> None:
        """Start it. Its standard error is appended to `log`, or kept for `printed` if None; if `quiet`, so is its output.

        `options` are those of `Popen`.
        """
        self.log, self._logged, self._stopped = log, ending.size_of(log), False
        said: IO[bytes] = tempfile.TemporaryFile() if log is None else log.open("ab")  # noqa: SIM115
        self._said = said if log is None else None
        streams = {"stdin": subprocess.PIPE, "stdout": said if quiet else subprocess.PIPE, "stderr": said}
        try:
            super().__init__(command, **{**streams, "start_new_session": True, **options})
        except BaseException:
            self._said = None
            said.close()
            raise
        if log is not None:
            said.close()

    def kill(self) -> None:
        """Kill it at once, from any thread."""
        self._stopped = self._stopped or self.poll() is None
        super().kill()

    def hang_up(self, seconds: float) -> int:
        """End its input, and then `end` it."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        return self.end(seconds)

    def end(self, seconds: float) -> int:
        """Kill it unless it exits within so many seconds; returns its exit status."""
        cpu_time.count(self.pid)  # which the system forgets with it
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()

    def close(self) -> None:
        """Kill it if it still runs, wait until it is gone, and close the pipes, which nobody else may read now."""
        self.hang_up(0.0)
        for stream in filter(None, (self.stdout, self._said)):
            stream.close()

    def printed(self) -> str:
        """Return the end of what it has printed to no log."""
        if self._said is None:
            return ""
        begin = max(0, os.fstat(self._said.fileno()).st_size - _MOST_READ)
        return os.pread(self._said.fileno(), _MOST_READ, begin).decode(errors="replace")  # it shares the position

    def how_it_ended(self, hint: str = "") -> str:
        """Give it time to exit, since its output ends before it does; returns `ending.how_it_ended`."""
        status = self.end(ending.EXIT_SECONDS)
        return ending.how_it_ended(
            status, stopped=self._stopped, log=self.log, since=self._logged, printed=self.printed(), hint=hint
        )


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    def __init__(self, longest: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(longest, loop)
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


@dataclass(eq=False)
class ChildPipes:
    """A process in a session of its own, with pipes, for one event loop. Its end is its own, whatever else holds the pipes."""

    process: asyncio.subprocess.Process
    input: asyncio.StreamWriter
    output: asyncio.StreamReader
    transport: asyncio.SubprocessTransport
    ended: asyncio.Event
    """`Process.wait` also waits for forked children that hold the pipes."""
    log: Path | None = None
    logged: int = 0
    """Size of the log before its start."""
    stopped: bool = field(default=False, init=False)
    """Whether `kill` ended it."""

    @classmethod
    async def start(
        cls, command: Sequence[str], log: Path | None, environment: Mapping[str, str], longest: int
    ) -> ChildPipes:
        """Start it. Its standard error is appended to `log`, or inherited if None; lines may have `longest` bytes."""
        loop, logged = asyncio.get_running_loop(), ending.size_of(log)
        with contextlib.ExitStack() as stack:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            transport, streams = await loop.subprocess_exec(
                lambda: _Streams(longest, loop), *command, stderr=stderr, start_new_session=True, env=environment
            )
        process = asyncio.subprocess.Process(transport, streams, loop)
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout, transport, streams.ended, log, logged)

    async def hang_up(self) -> None:
        """Wait for its end, and then end its output, which a forked child may hold open."""
        await self.ended.wait()
        await asyncio.sleep(_READ_SECONDS)
        self.transport.close()

    async def how_it_ended(self, hint: str = "") -> str:
        """Give it time to exit by itself, since its output ends before it does; then kill it. `hint` as in `ending`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), ending.EXIT_SECONDS)
        await self.kill()
        status = self.process.returncode
        return ending.how_it_ended(status, stopped=self.stopped, log=self.log, since=self.logged, hint=hint)

    @property
    def killed(self) -> bool:
        """Whether a signal that Motet did not send has ended it; the system sends SIGXCPU for a limit of Motet's."""
        status = self.process.returncode
        return not self.stopped and status is not None and status < 0 and status != -signal.SIGXCPU

    async def kill(self) -> None:
        """Kill it with its group, wait for its end, and close the pipes."""
        self.stopped = self.stopped or not self.ended.is_set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session, so its pid names its group
        if self.input.transport.get_write_buffer_size():  # a forked child that holds the pipe may never read it
            self.input.transport.abort()
        self.input.close()
        await self.ended.wait()
        self.transport.close()  # earlier, it might take the exit status, which the loop waits for
