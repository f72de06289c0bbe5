"""An agent worker: leases episodes from a service, runs the agent on this machine, and sends its results.

If a worker dies, its episodes start over with another. The agent runs as in `motet run`: in a separate process, many
episodes at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from motet.client.connection import Connection
from motet.client.leases import LeaseWorker, Running
from motet.core.errors import EnvironmentFault
from motet.core.types import Problem
from motet.environments.agent_processes import AgentProcesses
from motet.rewards.reward_elsewhere import MOST_LETTERS
from motet.service.schemas import Job
from motet.service.schemas.workers import EpisodeWork
from motet.workers.worker_link import AGAIN

_SECRETS = ("MOTET_API_KEY",)


class AgentWorker(LeaseWorker[EpisodeWork]):
    """Runs the agent of some jobs until they have ended."""

    kind = "episodes"

    def __init__(self, client: Connection, agent: str, concurrency: int) -> None:
        """Connects to nothing yet; runs `concurrency` episodes per job at once."""
        super().__init__(client, concurrency)
        self._agent = agent
        self._processes: dict[str, AgentProcesses] = {}
        self._handing_in: set[str] = set()
        self.open = 0
        """Episodes that run now."""
        self.returned = 0
        """Episodes whose agent returned a result."""
        self.failed = 0
        """Episodes whose agent failed."""
        self.reason = ""
        """Why the last of these failed."""

    async def _prepare(self, job: Job) -> None:
        environment = job.spec["environment"]
        if environment["name"] != "agent":
            raise EnvironmentFault(
                f"job {job.name!r} has the environment {environment['name']!r}, which needs no agent; submit it with "
                "`environment: agent`, or by `motet agent jobs.yaml --agent file.py:function`"
            )
        await self._of(environment["args"]).usable()

    async def _close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._processes.values()))

    def _of(self, args: dict[str, Any]) -> AgentProcesses:
        key = json.dumps(args, sort_keys=True)
        if key not in self._processes:
            self._processes[key] = AgentProcesses(self._agent, args, None, _SECRETS)
        return self._processes[key]

    def _stop_lost(self, held: Sequence[str], running: Running) -> None:
        """Stop episodes that others have now, or whose host has ended."""
        for key in running.keys() - set(held) - self._handing_in:
            if not running[key].done():
                running.pop(key).cancel()

    async def _do(self, path: str, work: EpisodeWork) -> None:
        deadline = time.time() + work.seconds
        self.open += 1
        try:
            agent = self._of(work.args)
            try:
                process = await agent.usable()
            except EnvironmentFault as error:  # it loaded before
                result: dict[str, Any] = {"error": str(error)}
            else:
                url, problem = f"{self._client.url}{work.path}", msgspec.convert(work.problem, Problem)
                returned = await agent.run(process, problem, url, work.key, deadline, work.seed)
                if returned.killed and work.handed_out <= AGAIN:
                    return  # not held any more, it is leased again, and starts over
                result = {
                    "reward": returned.reward,
                    "rewards": returned.rewards or None,
                    "late": returned.late or returned.killed,
                }
                result["error"] = returned.error[:MOST_LETTERS]
            self._handing_in.add(work.id)
            if refused := await self._hand_in(path, {**result, "id": work.id}):
                result = {"error": f"the service refuses what the agent returned: {refused}"[:MOST_LETTERS]}
                await self._hand_in(path, {**result, "id": work.id})
        finally:
            self._handing_in.discard(work.id)
            self.open -= 1
        self.returned += not result["error"]
        self.failed += bool(result["error"])
        self.reason = result["error"] or self.reason
