"""The processes that run a user's agent: one for many episodes, replaced when an agent hangs or ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from motet.core.errors import EngineError, EnvironmentFault
from motet.core.types import Problem
from motet.environments import environment_messages as m
from motet.workers.worker_link import LOAD_SECONDS, ClockLimitError, ProcessDiedError, WorkerLink, import_path

GRACE_SECONDS = 5.0
"""Time for an agent to return after its time limit; then its process is killed."""


class AgentProcesses:
    """Runs one agent. Lives in one event loop."""

    def __init__(self, name: str, args: Mapping[str, Any], log: Path | None, hidden: Collection[str] = ()) -> None:
        """Create it without starting a process.

        Agents, which may execute a model's text, do not see the `hidden` environment variables; without a `log`, their output
        goes to standard error.
        """
        self._name, self._args, self._log, self._hidden = name, dict(args), log, hidden
        self._process: WorkerLink | None = None
        self._given_up: list[WorkerLink] = []
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        """End the processes, including running agents."""
        processes = [*self._given_up, *([self._process] if self._process is not None else [])]
        self._process, self._given_up = None, []
        await asyncio.gather(*(process.kill() for process in processes))

    async def usable(self) -> WorkerLink:
        """The process that new episodes run in. Raises EnvironmentFault if the agent does not load.

        One that is killed while it loads, by a signal that Motet did not send, is started again at most twice.
        """
        async with self._starting:
            if self._process is not None and not self._process.ended:
                return self._process
            if self._process is not None:
                await self._process.kill()
            load = m.LoadObject(self._name, self._args, agent=True, import_path=import_path())
            try:
                self._process = await WorkerLink.start(m.AGENT_CALLS, load, self._log, hidden=self._hidden)
            except ProcessDiedError as error:
                raise EnvironmentFault(f"its process {error}") from error
            except ClockLimitError as error:
                raise EnvironmentFault(f"agent {self._name!r} took more than {LOAD_SECONDS:g} s to load") from error
            return self._process

    async def run(
        self, process: WorkerLink, problem: Problem, base_url: str, key: str, deadline: float, seed: int
    ) -> m.AgentReturned:
        """Run an episode; errors are in the result. `deadline` is in Unix seconds."""
        returned: m.AgentReturned
        try:
            request = m.RunAgent(problem, base_url, key, deadline, seed)
            returned = await process.call(request, deadline - time.time() + GRACE_SECONDS)
        except EngineError as error:
            return m.AgentReturned(error=f"was given a problem of {error}")
        except ClockLimitError:
            returned = m.AgentReturned(error=m.LATE, late=True, hangs=True)
        except ProcessDiedError as error:
            returned = m.AgentReturned(error=f"its process {error}", killed=error.killed)
        finally:
            await self._close_if_idle(process)
        if returned.hangs and process is self._process:  # other episodes may finish here; new ones start in another
            self._given_up.append(process)
            self._process = None
            await self._close_if_idle(process)
        return returned

    async def _close_if_idle(self, process: WorkerLink) -> None:
        """End a process that was given up, once no agent in it is waited for."""
        if process in self._given_up and not process.waits:
            self._given_up.remove(process)
            await process.kill()
