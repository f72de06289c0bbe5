"""The agent of one job, next to the engine: its process, and the rollouts of its episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from motet.agents.episode import AgentEpisode, rewarded
from motet.agents.gateway import Gateway
from motet.agents.processes import AgentProcesses
from motet.config import EnvironmentConfig
from motet.core.errors import EnvironmentFault
from motet.core.types import Rollout
from motet.tasks.episode import GroupContext, OwnEnvironment, judged


class AgentRunner(OwnEnvironment):
    """Runs the agent of one job."""

    def __init__(self, job: str, config: EnvironmentConfig, log: Path) -> None:
        self._job, self._config = job, config
        self._gateway, self._processes = Gateway(), AgentProcesses(config.name, config.args, log)

    async def open(self) -> None:
        """Load the agent, and listen for its requests.

        Raises:
            EnvironmentFault: it does not load.
        """
        self._gateway.open()
        await self._processes.usable()

    async def close(self) -> None:
        """End the process with its running agents, and stop listening."""
        await self._processes.close()
        await self._gateway.close()

    async def run_group(self, context: GroupContext) -> tuple[Rollout, ...]:
        """The rollouts of one group, one episode each."""
        running = (self._run(context, index) for index in range(context.group_size))
        return await judged(list(await asyncio.gather(*running)), context)

    async def _run(self, context: GroupContext, index: int) -> Rollout:
        try:
            process = await self._processes.usable()
        except EnvironmentFault as error:  # it loaded before
            return Rollout(context.problem, index, (), (), error=str(error))
        episode = AgentEpisode(context, index, self._job, self._config.max_turns, self._config.wall_seconds)
        try:
            with self._gateway.serving(episode) as (base_url, key):
                returned = await self._processes.run(
                    process, context.problem, base_url, key, episode.deadline, episode.seed
                )
        finally:
            await context.release(index)
        self.clock_limited = self.clock_limited or returned.late
        return rewarded(episode, returned.reward, returned.rewards, returned.error and f"the agent {returned.error}")
