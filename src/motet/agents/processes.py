"""The processes that run a user's agent: one for many episodes, replaced when an agent hangs or ends it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from motet.agents import messages as m
from motet.core.errors import EngineError, EnvironmentFault
from motet.core.types import Problem
from motet.process import wall
from motet.process.channel import Child, ProcessFault
from motet.tasks.worker_link import LOAD_SECONDS, ProcessDiedError, import_path, start_again

GRACE_SECONDS = 5.0
"""Time for an agent to return after its time limit; then its process is killed."""


class AgentProcess:
    """One process, until it dies or an agent hangs in it."""

    def __init__(self, child: Child[m.FromProcess], log: Path | None) -> None:
        self.child, self._log = child, log
        self.loaded: asyncio.Future[m.AgentLoaded | m.AgentRefused] = asyncio.get_running_loop().create_future()
        self.returned: dict[int, asyncio.Future[m.AgentReturned]] = {}
        self.usable, self.killed = True, False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        fault = ""
        try:
            async for message in self.child.messages():
                if isinstance(message, ProcessFault):
                    where = f"; see {self._log}" if self._log is not None else ""
                    fault = f"its process failed outside an episode: {message.error}{where}"
                    break
                if not isinstance(message, m.AgentReturned):
                    self.loaded.set_result(message)
                elif (waiting := self.returned.pop(message.episode, None)) is not None and not waiting.done():
                    waiting.set_result(message)
        except ValueError:
            fault = "its process wrote something that is not a message (an agent must leave its pipes alone)"
        self.usable = False
        gone = fault or f"its process {await self.child.how_it_ended(' (an agent must return, not exit)')}"
        self.killed = not fault and self.child.killed()
        if not self.loaded.done():
            self.loaded.set_result(m.AgentRefused(gone))
        for episode, waiting in self.returned.items():
            if not waiting.done():
                waiting.set_result(m.AgentReturned(episode, error=gone, killed=self.killed))
        self.returned.clear()

    async def close(self) -> None:
        """End it."""
        await self.child.kill()
        await self._reading


class AgentProcesses:
    """Runs one agent. Lives in one event loop."""

    def __init__(self, name: str, args: Mapping[str, Any], log: Path | None, hidden: Collection[str] = ()) -> None:
        """Create it without starting a process.

        Agents, which may execute a model's text, do not see the `hidden` environment variables; without a `log`, their output
        goes to standard error.
        """
        self._name, self._args, self._log, self._hidden = name, dict(args), log, hidden
        self._variables = dict(wall.FIXED)
        self._numbers = itertools.count()
        self._process: AgentProcess | None = None
        self._given_up: list[AgentProcess] = []
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        """End the processes, including running agents."""
        processes = [*self._given_up, *([self._process] if self._process is not None else [])]
        self._process, self._given_up = None, []
        await asyncio.gather(*(one.close() for one in processes))

    async def usable(self) -> AgentProcess:
        """The process that new episodes run in. Raises EnvironmentFault if the agent does not load.

        One that is killed while it loads, by a signal that Motet did not send, is started again at most twice.
        """
        async with self._starting:
            if self._process is not None and self._process.usable:
                return self._process
            if (old := self._process) is not None:
                self._given_up.append(old)
                self._process = None
                await self._close_if_idle(old)
            try:
                self._process = await start_again(self._start)
            except ProcessDiedError as error:
                raise EnvironmentFault(str(error)) from error
            return self._process

    async def _start(self) -> AgentProcess:
        child: Child[m.FromProcess] = await Child.start(
            "motet.agents.process", m.FromProcess, self._log, without=self._hidden, variables=self._variables
        )
        process = AgentProcess(child, self._log)
        try:
            child.send(m.LoadAgent(import_path(), self._name, self._args))
            loaded = await asyncio.wait_for(asyncio.shield(process.loaded), LOAD_SECONDS)
            if isinstance(loaded, m.AgentRefused):
                if process.killed:
                    raise ProcessDiedError(loaded.error, killed=True)
                raise EnvironmentFault(loaded.error)
        except BaseException as error:
            await process.close()
            if isinstance(error, TimeoutError):
                raise EnvironmentFault(f"agent {self._name!r} took more than {LOAD_SECONDS:g} s to load") from error
            raise
        return process

    async def run(
        self, process: AgentProcess, problem: Problem, base_url: str, key: str, deadline: float, seed: int
    ) -> m.AgentReturned:
        """Run an episode; errors are in the result. `deadline` is in Unix seconds."""
        number = next(self._numbers)
        try:
            process.child.send(m.RunAgent(number, problem, base_url, key, deadline, seed))
        except EngineError as error:
            return m.AgentReturned(number, error=f"was given a problem of {error}")
        waiting = process.returned[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline - time.time() + GRACE_SECONDS):
                returned: m.AgentReturned = await waiting
        except TimeoutError:
            returned = m.AgentReturned(number, error=m.LATE, late=True, hangs=True)
        except asyncio.CancelledError:
            process.child.send(m.StopAgent(number))
            raise
        finally:
            process.returned.pop(number, None)
            await self._close_if_idle(process)
        if returned.hangs:  # other episodes may finish here, and new ones start in another process
            process.usable = False
        return returned

    async def _close_if_idle(self, process: AgentProcess) -> None:
        """End a process that was given up, once no agent in it is waited for."""
        if process in self._given_up and not process.returned:
            self._given_up.remove(process)
            await process.close()
