"""Jobs whose agent runs on this machine: submits the jobs of a file, and runs their agent until they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from motet.client import AsyncClient, Client
from motet.client.agents import AgentWorker
from motet.commands import served_jobs
from motet.commands.answers import say
from motet.config import EnvironmentConfig, JobConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, ServiceError
from motet.service.schemas import Job

_LOOK_SECONDS = 0.5


def of_file(client: Client, file: Path, overrides: Sequence[str], agent: str | None) -> tuple[list[Job], str]:
    """The jobs of a file for an agent, and its function; submits those that the service lacks by name. Raises as `meant`."""
    config = load_jobs(file, overrides)
    try:
        chosen, function = meant(config.jobs, agent)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    base = served_jobs.base_meant(config, client.health(), file)
    known = {job.name: served for job in chosen if (served := _found(client, job.name)) is not None}
    return served_jobs.submit(client, [_elsewhere(job) for job in chosen], base=base, known=known), function


def _found(client: Client, name: str) -> Job | None:
    """A job of a service; None if it has no such job."""
    try:
        return client.job(name)
    except ServiceError as error:
        if error.status != 404:
            raise
        return None


def meant(jobs: Sequence[JobConfig], agent: str | None) -> tuple[list[JobConfig], str]:
    """The jobs for an agent and its function: jobs that name it or name none; all jobs if no job has an agent.

    Raises:
        ConfigError: they name none, several, or another one.
    """
    named = sorted({job.environment.name for job in jobs if ":" in job.environment.name})
    if agent is None and len(named) != 1:
        raise ConfigError(
            f"its jobs name several agents ({', '.join(named)}); run one command for each, such as with --agent {named[0]}"
            if named
            else "its jobs name no agent; give the function with yours, such as --agent agent.py:run"
        )
    function = agent or named[0]
    own = {function, EnvironmentConfig.AGENT, *(named if len(named) == 1 else ())}
    chosen = [job for job in jobs if job.environment.name in own]
    if named and not chosen:
        raise ConfigError(
            f"none of its jobs has the environment {function}; give --agent one that they have: {', '.join(named)}"
        )
    return chosen or list(jobs), function


def _elsewhere(job: JobConfig) -> JobConfig:
    """The job with an agent that does not run on the service."""
    environment = job.environment.model_copy(update={"name": job.environment.AGENT})
    return job.model_copy(update={"environment": environment})


def running(agent: str, concurrency: int) -> served_jobs.LocalWork:
    """Runs the agent of jobs until all have ended; a terminal shows its progress below the jobs."""

    async def work(client: AsyncClient, jobs: Sequence[str], console: Console) -> None:
        worker = AgentWorker(client, agent, concurrency)
        with console.status("waiting for episodes") as status:
            task = asyncio.create_task(worker.run(jobs))
            try:
                while not task.done():
                    await asyncio.wait([task], timeout=_LOOK_SECONDS)
                    status.update(_now(worker))
                task.result()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        say(_now(worker))

    return work


def _now(worker: AgentWorker) -> str:
    failed = f", {worker.failed} failed (the last: {worker.reason[:200]})" if worker.failed else ""
    running = f"{worker.open} run, " if worker.open else ""
    return f"episodes: {running}{worker.returned} returned{failed}"
