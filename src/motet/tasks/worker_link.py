"""The parent's end of a worker process: starts it, exchanges messages, reports how it ended, and leaves no zombie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from motet.process import wall
from motet.process.channel import LONGEST_LINE, ChannelMessage, ProcessFault, decode, encode
from motet.process.cpu_time import cpu_seconds_of
from motet.process.piped import Piped
from motet.tasks.sandbox import PLACE

LOAD_SECONDS = 120.0
"""Wall-clock time for loading a user's code."""
_REMAINS = str(Path(__file__).with_name("worker_remains.py"))
NO_REPLY = "wrote something that is not a reply (your code must not use the process's pipes)"


AGAIN = 2
"""How often what a killed process did is tried again, each time in a fresh process."""
Started = TypeVar("Started")


class ProcessDiedError(Exception):
    """The process ended in the middle of a call; the text says how."""

    def __init__(self, how: str, *, killed: bool = False) -> None:
        """`killed`: by a signal that Motet did not send, so that the same call may succeed."""
        super().__init__(how)
        self.killed = killed


class ClockLimitError(Exception):
    """The wall clock ran out; the text says after how long."""


class WorkerLink:
    """One worker process. It handles one call at a time."""

    module: str
    """The module that runs in the process."""
    kind: str
    """`reward` or `environment`: the section of a job whose fields limit it."""

    def __init__(self, piped: Piped, remains: subprocess.Popen[bytes]) -> None:
        """`remains` ends and removes what the process leaves (`worker_remains`)."""
        self._piped, self._remains = piped, remains
        self._removing: asyncio.Future[tuple[bytes, bytes]] | None = None
        self.charge: Callable[[float], None] = lambda _: None
        """Called with the CPU seconds that the process has used more."""
        self._used = 0.0

    @classmethod
    async def spawn(cls, log: Path | None, *, walled: bool = False) -> Self:
        """Start a process; one for behind a wall gets none of this process's environment variables.

        What its code makes of a call depends on the call: random numbers, hashes, encodings and the zone are fixed.
        """
        # The limit is on address space; one arena and one thread keep it close to the memory in use.
        environment = wall.environment(MALLOC_ARENA_MAX="2")
        if not walled:
            own = {name: value for name, value in environment.items() if name not in (*wall.HOMES, "PATH")}
            environment = {**os.environ, **own}
        sandboxes = tempfile.mkdtemp(prefix="motet-worker-")
        remains = _keep(sandboxes)
        try:
            command = wall.command(cls.module, str(os.getpid()))
            piped = await Piped.start(command, log, {**environment, PLACE: sandboxes}, LONGEST_LINE)
            assert remains.stdin is not None
            remains.stdin.write(b"%d" % piped.process.pid)
            remains.stdin.flush()
        except BaseException:
            remains.communicate()
            raise
        return cls(piped, remains)

    async def kill(self) -> None:
        """Kill the process and all that it started, wait for the end, and remove its sandboxes.

        A caller that is cancelled no longer waits; the rest is done all the same.
        """
        if self._removing is None:
            self._removing = asyncio.get_running_loop().run_in_executor(None, self._remains.communicate)
        await self._piped.kill()
        await asyncio.shield(self._removing)

    async def exchange(self, message: ChannelMessage, kinds: Any, wall_seconds: float, cpu_seconds: float = 0) -> Any:
        """Send one message and wait for the reply, one of `kinds`; `cpu_seconds` is the limit that may end the process.

        After any exception the process must be killed or is dead already.

        Raises:
            ProcessDiedError: the process ended instead of answering, or wrote something else.
            ClockLimitError: no answer within `wall_seconds`.
        """
        line = await self._exchange(encode(message), wall_seconds, cpu_seconds)
        try:
            reply = decode(line, kinds | ProcessFault)
        except (ValueError, RecursionError) as error:  # a user's code may write anything to the pipe
            await self.kill()
            raise ProcessDiedError(NO_REPLY) from error
        if isinstance(reply, ProcessFault):
            await self.kill()
            where = f"; see {self._piped.log}" if self._piped.log is not None else ""
            raise ProcessDiedError(f"failed outside a call: {reply.error}{where}")
        return reply

    async def _exchange(self, line: bytes, wall_seconds: float, cpu_seconds: float) -> bytes:
        begun = time.monotonic()
        answering = asyncio.ensure_future(self._answer(line))
        ending = asyncio.ensure_future(self._piped.hang_up())
        try:
            # Also wait for the end of the process: a forked child may hold its output open.
            done, _ = await asyncio.wait({answering, ending}, timeout=wall_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ClockLimitError(
                    f"gave no answer in {wall_seconds:g} s by the clock ({self.kind} field wall_seconds)"
                )
            if answering in done and (reply := answering.result()).endswith(b"\n"):  # else it ended while it wrote
                return reply
        finally:
            self._count(min(cpu_seconds, time.monotonic() - begun))
            answering.cancel()
            ending.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)
        article = "an" if self.kind[0] in "aeiou" else "a"
        how = await self._piped.how_it_ended(f" ({article} {self.kind} must return, not exit)")
        killed = self._piped.killed
        await self.kill()
        if self._piped.process.returncode == -signal.SIGXCPU:
            limit = f"{cpu_seconds:g} s of CPU time ({self.kind} field cpu_seconds)"
            how = f"took more than {limit} and could not be interrupted"
        raise ProcessDiedError(how, killed=killed)

    def _count(self, most: float) -> None:
        """Charge what the process has used since the last call; `most` for one that is gone and cannot be asked."""
        used = cpu_seconds_of(self._piped.process.pid)
        self.charge(most if used is None else max(0.0, used - self._used))
        self._used = used or self._used

    async def _answer(self, line: bytes) -> bytes:
        try:
            with contextlib.suppress(ConnectionError):  # it has ended, perhaps with a last message
                self._piped.input.write(line)
                await self._piped.input.drain()
            return await self._piped.output.readline()
        except ConnectionError:
            return b""
        except ValueError:  # longer than any reply
            return b"\n"


async def start_again(start: Callable[[], Awaitable[Started]]) -> Started:
    """Start a process, and again, at most `AGAIN` times, if it is killed. Raises as `start`."""
    for _ in range(AGAIN):
        try:
            return await start()
        except ProcessDiedError as error:
            if not error.killed:
                raise
    return await start()


def _keep(sandboxes: str) -> subprocess.Popen[bytes]:
    """Start what removes a worker's sandboxes when its input ends."""
    command = [sys.executable, "-IS", _REMAINS, sandboxes]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", start_new_session=True)


def import_path() -> list[str]:
    """This process's import path, for the worker process."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]
