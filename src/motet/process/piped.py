"""A child process with pipes, for one event loop. Its end is its own, whatever else holds the pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.process import ending

_READ_SECONDS = 1.0
"""Time to read what a process wrote before its end."""


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    def __init__(self, longest: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(longest, loop)
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


@dataclass(eq=False)
class Piped:
    """A process in its own session."""

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
    ) -> Piped:
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
