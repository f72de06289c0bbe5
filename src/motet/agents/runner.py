"""The agent of one job: the process it runs in, and the rollouts that come of its episodes."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from pathlib import Path

from motet.agents import messages as m
from motet.agents.episode import AgentEpisode
from motet.agents.gateway import Gateway
from motet.channel import Child
from motet.config import EnvironmentConfig
from motet.errors import EngineError, EnvironmentFault
from motet.tasks.episode import GroupContext, judged
from motet.tasks.worker_link import LOAD_SECONDS, import_path
from motet.types import Rollout

_GRACE_SECONDS = 5.0
"""What an agent whose time is up has to return; then its process is given up."""


class _Process:
    """One process, until it dies or an agent hangs in it."""

    def __init__(self, child: Child[m.FromProcess]) -> None:
        self.child = child
        self.loaded: asyncio.Future[m.AgentLoaded | m.Refused] = asyncio.get_running_loop().create_future()
        self.returned: dict[int, asyncio.Future[m.AgentReturned]] = {}
        self.usable = True
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.child.messages():
                if not isinstance(message, m.AgentReturned):
                    self.loaded.set_result(message)
                elif (waiting := self.returned.pop(message.episode, None)) is not None and not waiting.done():
                    waiting.set_result(message)
        except ValueError:  # what it wrote is no message
            pass
        self.usable = False
        gone = "its process ended (an agent must leave the process and its pipes alone)"
        if not self.loaded.done():
            self.loaded.set_result(m.Refused(gone))
        for episode, waiting in self.returned.items():
            if not waiting.done():
                waiting.set_result(m.AgentReturned(episode, error=gone))
        self.returned.clear()

    async def close(self) -> None:
        await self.child.kill()
        await self._reading


class AgentRunner:
    """Runs the agent of one job."""

    def __init__(self, job: str, config: EnvironmentConfig, log: Path) -> None:
        self._job, self._config, self._log = job, config, log
        self._gateway = Gateway()
        self._numbers = itertools.count()
        self._process: _Process | None = None
        self._given_up: list[_Process] = []
        self._starting = asyncio.Lock()
        self.clock_limited = False
        """Whether the clock has decided anything."""

    async def open(self) -> None:
        """Load the agent, and listen for its calls.

        Raises:
            EnvironmentFault: it does not load.
        """
        self._gateway.open()
        await self._running()

    async def close(self) -> None:
        """End the process, and agents under way with it; listen no more."""
        processes = [*self._given_up, *([self._process] if self._process is not None else [])]
        self._process, self._given_up = None, []
        await asyncio.gather(*(one.close() for one in processes))
        await self._gateway.close()

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is not None and self._process.usable:
                return self._process
            if self._process is not None:
                self._given_up.append(self._process)
            child: Child[m.FromProcess] = await Child.start("motet.agents.process", m.FromProcess, self._log)
            process = _Process(child)
            try:
                child.send(m.LoadAgent(import_path(), self._config.name, self._config.args))
                loaded = await asyncio.wait_for(asyncio.shield(process.loaded), LOAD_SECONDS)
                if isinstance(loaded, m.Refused):
                    raise EnvironmentFault(loaded.error)
            except BaseException as error:
                await process.close()
                if isinstance(error, TimeoutError):
                    raise EnvironmentFault(
                        f"agent {self._config.name!r} took more than {LOAD_SECONDS:g} s to load"
                    ) from error
                raise
            self._process = process
            return process

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """The rollouts of one group, each of an episode of its own."""
        running = (self._run(context, index) for index in range(context.group_size))
        return await judged(list(await asyncio.gather(*running)), context)

    async def _run(self, context: GroupContext, index: int) -> Rollout:
        try:
            process = await self._running()
        except EnvironmentFault as error:  # it loaded before
            return Rollout(context.problem, index, (), (), error=str(error))
        episode = AgentEpisode(context, index, self._job, self._config.max_turns, self._config.wall_seconds)
        with self._gateway.serving(episode) as (base_url, key):
            returned = await self._returned(process, episode, base_url, key)
        return _rewarded(episode, returned)

    async def _returned(self, process: _Process, episode: AgentEpisode, base_url: str, key: str) -> m.AgentReturned:
        number = next(self._numbers)
        waiting = process.returned[number] = asyncio.get_running_loop().create_future()
        try:
            process.child.send(
                m.RunAgent(number, episode.context.problem, base_url, key, episode.deadline, episode.seed)
            )
        except EngineError as error:
            return m.AgentReturned(number, error=f"was given a problem of {error}")
        try:
            async with asyncio.timeout(self._config.wall_seconds + _GRACE_SECONDS):
                returned: m.AgentReturned = await waiting
        except TimeoutError:  # it hangs: those beside it may end, and new ones begin in another process
            process.usable = False
            returned = m.AgentReturned(number, error=m.LATE, late=True)
        finally:
            process.returned.pop(number, None)
            if process in self._given_up and not process.returned:
                self._given_up.remove(process)
                await process.close()
        self.clock_limited = self.clock_limited or returned.late
        return returned


def _rewarded(episode: AgentEpisode, returned: m.AgentReturned) -> Rollout:
    """The rollout, worth what its agent returned."""
    error = f"the agent {returned.error}" if returned.error else ""
    parts = {}
    if returned.reward is not None:
        parts["agent"] = returned.reward
    if returned.rewards:
        parts["turns"] = math.fsum(returned.rewards.values())
    try:
        rollout = episode.rollout(returned.rewards, error)
    except KeyError as unknown:
        rollout = episode.rollout({}, f"the agent rewards the call {unknown}, which it never made")
    return replace(rollout, reward_parts=parts)
