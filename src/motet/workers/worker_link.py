"""The parent's end of a worker process: starts it, calls it, reports how it ended, and leaves no zombie."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from msgspec import structs

from motet.process import wall
from motet.process.channel import LONGEST_LINE, Child, ProcessFault
from motet.process.child import ChildPipes, ChildProcess, guard
from motet.process.cpu_time import cpu_seconds_of
from motet.workers import worker_messages as m
from motet.workers.sandbox import PLACE
from motet.workers.worker_limits import LOAD_CPU_SECONDS

LOAD_SECONDS = 120.0
"""Wall-clock time for loading a user's code."""
AGAIN = 2
"""How often what a killed process did is tried again, each time in a fresh process."""
LONGEST_SENT = 2**22
"""Longest reply of code that others sent, in bytes: it is read in the event loop of everybody's jobs."""
LONGEST_FAULT = 2000
"""Characters of what such code says of a fault."""
_LOOK_SECONDS, _SPARE_SECONDS = 0.5, 3.0
"""Between two looks at the CPU time of such code, and what it may use beyond the limit of a call."""
_NO_REPLY = "wrote something that is not a reply (your code must not use the process's pipes)"
Charge = Callable[[float], None]


class ProcessDiedError(Exception):
    """The process ended in the middle of a call; the text says how."""

    def __init__(self, how: str, *, killed: bool = False) -> None:
        """`killed`: by a signal that Motet did not send, so that the same call may succeed."""
        super().__init__(how)
        self.killed = killed


class ClockLimitError(Exception):
    """The wall clock ran out; the text says after how long."""


class WorkerLink:
    """One worker process. Rewards and environments take one call at a time, an agent many."""

    def __init__(
        self, calls: m.Calls, pipes: ChildPipes, remains: ChildProcess, charge: Charge, *, watched: bool = False
    ) -> None:
        """`remains` ends and removes what the process leaves (`process.guard`).

        A `watched` process is ended if it uses more CPU time than its calls may, also between them: what it runs may lift
        the limits that it has put upon itself.
        """
        self._calls, self._pipes, self._remains, self.charge = calls, pipes, remains, charge
        self.child, self.loaded = Child[Any].of(pipes, calls.replies), m.WorkerReply()
        self.answered = -1
        """Number of answered calls, besides the first, which loads."""
        self.ended = ""
        """How the process ended; empty while it runs."""
        self._numbers, self._used, self._killed = itertools.count(), 0.0, False
        self._waiting: dict[int, tuple[m.WorkerMessage, asyncio.Future[Any], float]] = {}
        """Calls without a reply, each with its limit of CPU seconds; also those that nobody awaits any more."""
        self._removing: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._most, self._fault = float(LOAD_CPU_SECONDS), ""
        self._reading = asyncio.create_task(self._read())
        self._watching = asyncio.create_task(self._watch()) if watched else None

    @classmethod
    async def start(
        cls, calls: m.Calls, load: m.LoadCode, log: Path | None, *, charge: Charge = lambda _: None,
        hidden: Collection[str] = (),
    ) -> WorkerLink:  # fmt: skip
        """Start a process and load what `load` names; `charge` is called with the CPU seconds that it has used more.

        A process for behind a wall gets none of this process's environment variables, others all but the `hidden` ones. One
        that is killed while it loads, by a signal that Motet did not send, is started again at most twice.

        Raises:
            MotetError: it does not load, as `calls.refused`; the text is for a person.
            ProcessDiedError, ClockLimitError: loading ended the process or took too long.
        """
        kills = 0
        while True:
            link = await cls._spawn(calls, load, log, charge, hidden)
            try:
                link.loaded = await link.call(load, LOAD_SECONDS)
                if isinstance(link.loaded, m.LoadRefused):
                    raise calls.refused(link.loaded.error[:LONGEST_FAULT])
                return link
            except BaseException as error:
                await link.kill()
                kills += 1
                if not isinstance(error, ProcessDiedError) or not error.killed or kills > AGAIN:
                    raise

    @classmethod
    async def _spawn(
        cls, calls: m.Calls, load: m.LoadCode, log: Path | None, charge: Charge, hidden: Collection[str]
    ) -> WorkerLink:
        sandboxes = tempfile.mkdtemp(prefix="motet-worker-")
        remains = ChildProcess(guard("remove", sandboxes), Path(os.devnull), quiet=True, cwd="/")
        all_variables = _environment(load, limited=not calls.at_once)
        environment = {name: value for name, value in all_variables.items() if name not in hidden}
        try:
            command = wall.command("motet.workers.worker", calls.module, str(os.getpid()))
            longest = LONGEST_SENT if load.of_others else LONGEST_LINE
            pipes = await ChildPipes.start(command, log, {**environment, PLACE: sandboxes}, longest)
            remains.stdin.write(b"%d" % pipes.process.pid)
            remains.stdin.flush()
        except BaseException:
            remains.communicate()
            raise
        return cls(calls, pipes, remains, charge, watched=load.of_others)

    async def kill(self) -> None:
        """Kill the process and all that it started, wait for the end, and remove its sandboxes.

        A caller that is cancelled no longer waits; the rest is done all the same.
        """
        await self._end()
        await asyncio.shield(self._reading)

    async def _end(self) -> None:
        if self._watching is not None and not self.ended and self._removing is None:
            self._count(self._used)  # what it used after its last call
        if self._removing is None:
            self._removing = asyncio.get_running_loop().run_in_executor(None, self._remains.communicate)
        await self.child.kill()
        await asyncio.shield(self._removing)

    async def call(self, request: m.WorkerMessage, wall_seconds: float, cpu_seconds: float = 0) -> Any:
        """The reply to a request; `cpu_seconds` is the limit that may end the process.

        After any exception, a process that takes one call at a time must be killed or is dead already.

        Raises:
            ProcessDiedError: the process ended instead of answering, or wrote something else.
            ClockLimitError: no answer within `wall_seconds`.
            EngineError: the request is too long.
        """
        number, began, before = next(self._numbers), time.monotonic(), self._used
        self._most = before + (cpu_seconds or LOAD_CPU_SECONDS)
        if self.ended:
            raise self._died(cpu_seconds)
        self.child.send(structs.replace(request, call=number))
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = request, waiting, cpu_seconds
        try:
            async with asyncio.timeout(wall_seconds):
                return await waiting
        except TimeoutError as error:
            limit = f"{wall_seconds:g} s by the clock ({self._calls.kind} field wall_seconds)"
            raise ClockLimitError(f"gave no answer in {limit}") from error
        except asyncio.CancelledError:
            if self._calls.at_once:
                self.child.send(m.StopCall(call=number))
            raise
        finally:
            self._count(before + min(cpu_seconds, time.monotonic() - began))
            self._most = self._used

    @property
    def waits(self) -> bool:
        """Whether a reply is awaited."""
        return any(not waiting.done() for _, waiting, _ in self._waiting.values())

    async def _read(self) -> None:
        fault = ""
        try:
            async for reply in self.child.messages():
                if isinstance(reply, ProcessFault):
                    where = f"; see {self._pipes.log}" if self._pipes.log is not None else ""
                    fault = f"failed outside a call: {reply.error[:LONGEST_FAULT]}{where}"
                    break
                # A user's code may write anything to the pipe: each call has one reply, of its kind.
                if reply.call not in self._waiting or not reply.fits(self._waiting[reply.call][0]):
                    raise ValueError(_NO_REPLY)
                _, waiting, _ = self._waiting.pop(reply.call)
                self.answered += 1
                if not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, RecursionError):
            fault = _NO_REPLY
        article = "an" if self._calls.kind[0] in "aeiou" else "a"
        hint = f" ({article} {self._calls.kind} must return, not exit)"
        self.ended = self._fault or fault or await self._pipes.how_it_ended(hint)
        self._killed = not fault and self._pipes.killed
        await self._end()
        for _, waiting, cpu_seconds in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._died(cpu_seconds))

    def _died(self, cpu_seconds: float) -> ProcessDiedError:
        if self._pipes.process.returncode == -signal.SIGXCPU:
            limit = f"{cpu_seconds:g} s of CPU time ({self._calls.kind} field cpu_seconds)"
            return ProcessDiedError(f"took more than {limit} and could not be interrupted")
        return ProcessDiedError(self.ended, killed=self._killed)

    def _count(self, most: float) -> None:
        """Charge what the process has used since it was last counted; up to `most` if it is gone and cannot be asked."""
        used = cpu_seconds_of(self._pipes.process.pid)
        total = max(self._used, most if used is None else used)
        self.charge(total - self._used)
        self._used = total

    async def _watch(self) -> None:
        while not self.ended:
            await asyncio.sleep(_LOOK_SECONDS)
            self._count(self._used)
            if self._used > self._most + _SPARE_SECONDS:
                self._fault = f"took more CPU time than it may ({self._calls.kind} field cpu_seconds)"
                await self._end()
                return


class WorkerSlot:
    """A place for one process, which the first call that needs it starts."""

    link: WorkerLink | None = None

    async def ask(
        self, start: Callable[[], Awaitable[WorkerLink]], call: Callable[[WorkerLink], Awaitable[Any]],
        fresh: Callable[[WorkerLink], bool],
    ) -> Any:  # fmt: skip
        """The reply to a call, equal to that of a fresh process.

        The process is replaced after any exception, and after a call that hit a limit. A call that runs out of memory or ends
        its process is tried again in another one, unless the process was `fresh`; so is one whose process is killed by a signal
        that Motet did not send, at most twice. Raises as `start` and `call`.
        """
        kills = 0
        while True:
            if self.link is None:
                self.link = await start()
            alone = fresh(self.link)
            try:
                reply = await call(self.link)
            except BaseException as error:  # the clock, or a cancelled caller: a late reply must not meet the next call
                await self.clear()
                killed = isinstance(error, ProcessDiedError) and error.killed
                kills += killed
                if not isinstance(error, ProcessDiedError) or (kills > AGAIN if killed else alone):
                    raise
                continue
            if reply.exceeded:
                await self.clear()
            if reply.exceeded != "memory" or alone:
                return reply

    async def clear(self) -> None:
        """End the process."""
        if (link := self.link) is not None:
            self.link = None
            await link.kill()


def _environment(load: m.LoadCode, *, limited: bool) -> dict[str, str]:
    """What a user's code makes of a call depends on the call: random numbers, hashes, encodings and the zone are fixed."""
    if not limited:
        return {**os.environ, **wall.FIXED}
    # The limit is on address space; one arena and one thread keep it close to the memory in use.
    environment = wall.environment(MALLOC_ARENA_MAX="2")
    if load.walled:
        return environment
    return {**os.environ, **{name: value for name, value in environment.items() if name not in (*wall.HOMES, "PATH")}}


def import_path() -> list[str]:
    """This process's import path, for the worker process."""
    return [str(Path(entry or ".").resolve()) for entry in sys.path]
