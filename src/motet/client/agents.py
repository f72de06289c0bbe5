"""An agent worker: takes episodes of jobs from a service, runs the agent on this machine, and hands in what it returns.

All connections are made from here. What a worker holds when it dies is handed to others after a minute, and begins anew
there. The agent runs as in `motet run`: in a process of its own, many episodes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from motet.agents.processes import AgentProcesses
from motet.client.connection import path_of, worker_name
from motet.errors import EnvironmentFault, ServiceError
from motet.service.schemas import Job
from motet.service.schemas.episodes import EpisodeLease, EpisodeWork
from motet.service.schemas.scoring import Counted
from motet.types import JobState, Problem

if TYPE_CHECKING:
    from motet.client import AsyncClient

_WAIT_SECONDS = 20.0
_LEAVE_SECONDS = 3.0
_SECRETS = ("MOTET_API_KEY",)


class AgentWorker:
    """Runs the agent of some jobs until they have ended."""

    def __init__(self, client: AsyncClient, agent: str, concurrency: int) -> None:
        """Nothing is asked yet.

        Args:
            client: of the service.
            agent: `file.py:function` or `module:function`.
            concurrency: episodes of a job that run at once.
        """
        self._client, self._agent, self._concurrency = client, agent, concurrency
        self._processes: dict[str, AgentProcesses] = {}
        self._handing_in: set[str] = set()
        self.name = worker_name()
        self.open = 0
        """Episodes that run now."""
        self.returned = 0
        """Of which the agent returned something."""
        self.failed = 0
        """Of which it did not."""
        self.reason = ""
        """Why the last one of these failed."""

    async def run(self, jobs: Sequence[str]) -> None:
        """Run the agent until all jobs have ended.

        Raises:
            EnvironmentFault: it does not load, or a job asks for none.
            ServiceError: the service refuses, or was away for too long.
        """
        try:
            served = [await self._client._patiently(Job, "GET", path_of("jobs", job)) for job in jobs]
            for job in served:
                environment = job.spec["environment"]
                if environment["name"] != "agent":
                    raise EnvironmentFault(
                        f"job {job.name!r} has the environment {environment['name']!r}, which needs no agent; submit it with "
                        "`environment: agent`, or by `motet agent jobs.yaml --agent file.py:function`"
                    )
                await self._of(environment["args"]).usable()
            async with asyncio.TaskGroup() as group:
                for job in served:
                    group.create_task(self._serve(job.id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            await asyncio.gather(*(one.close() for one in self._processes.values()))

    def _of(self, args: dict[str, Any]) -> AgentProcesses:
        """The agent with these arguments."""
        key = json.dumps(args, sort_keys=True)
        if key not in self._processes:
            self._processes[key] = AgentProcesses(self._agent, args, None, _SECRETS)
        return self._processes[key]

    async def _serve(self, job: str) -> None:
        """Take episodes of one job, as many as may run at once, until it has ended."""
        running: dict[str, asyncio.Task[None]] = {}
        path, wait = f"{path_of('jobs', job)}/episodes", 0.0
        try:
            while True:
                free = self._concurrency - len(running)
                if not free:
                    await asyncio.wait(running.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                wanted = {
                    "worker": self.name,
                    "most": free,
                    "wait_seconds": wait if free else 0.0,
                    "holds": list(running),
                }
                lease = await self._client._patiently(EpisodeLease, "POST", f"{path}/lease", json=wanted)
                wait = min(_WAIT_SECONDS, lease.seconds / 3)  # asking again renews what is held
                for episode in lease.episodes:
                    running[episode.id] = asyncio.create_task(self._run(path, episode))
                for key in [key for key in running if running[key].done()]:
                    running.pop(key).result()
                # others have those now, or the engine that offered them has ended
                for key in running.keys() - set(lease.held) - self._handing_in:
                    running.pop(key).cancel()
                if JobState(lease.state).final:
                    return
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
            with contextlib.suppress(ServiceError, TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._client._send("DELETE", f"{path}/workers/{self.name}")

    async def _run(self, path: str, episode: EpisodeWork) -> None:
        deadline = time.time() + episode.seconds
        self.open += 1
        try:
            agent = self._of(episode.args)
            try:
                process = await agent.usable()
            except EnvironmentFault as error:  # it loaded before
                result: dict[str, Any] = {"error": str(error)}
            else:
                url, problem = f"{self._client.url}{episode.path}", msgspec.convert(episode.problem, Problem)
                returned = await agent.run(process, problem, url, episode.key, deadline, episode.seed)
                result = {"reward": returned.reward, "rewards": returned.rewards or None, "late": returned.late}
                result["error"] = returned.error[:4000]
            self._handing_in.add(episode.id)
            try:
                await self._hand_in(path, episode.id, result)
            except ServiceError as error:
                if error.status not in (413, 422):
                    raise
                result = {"error": f"the service refuses what the agent returned: {error}"[:4000]}
                await self._hand_in(path, episode.id, result)
        finally:
            self._handing_in.discard(episode.id)
            self.open -= 1
        self.returned += not result["error"]
        self.failed += bool(result["error"])
        self.reason = result["error"] or self.reason

    async def _hand_in(self, path: str, episode: str, result: dict[str, Any]) -> None:
        results = {"results": [{**result, "id": episode}]}
        await self._client._patiently(Counted, "POST", f"{path}/results", json=results)
