"""The environment that a job brings: a class, an agent in a local process, or an agent on its owner's machine."""

from __future__ import annotations

import importlib
from pathlib import Path

from motet.config import JobConfig
from motet.core.errors import EnvironmentFault
from motet.environments.environments import EnvironmentWorkers
from motet.environments.episode import OwnEnvironment
from motet.runtime.job import Job, Services


def _check_team(workers: EnvironmentWorkers, config: JobConfig) -> None:
    info = workers.info
    if config.team and (info.agent or info.tools or not info.steps):
        kind = "is an agent" if info.agent else "has tools" if info.tools else "has no step(text)"
        raise EnvironmentFault(
            f"team: environment {config.environment.name!r} {kind}; a team needs a class with step(text) and without tools, "
            "which says in self.role whose turn it is"
        )


def _check_not_put_aside(config: JobConfig) -> None:
    if config.rl.over_provision > 1:
        raise EnvironmentFault("algorithm.over_provision puts rollouts aside, which an agent cannot be: leave it out")


async def own_environment(job: Job, services: Services) -> OwnEnvironment:
    """Start the environment that a job brings.

    Raises:
        EnvironmentFault: it cannot be used.
    """
    config, log = job.config.environment, job.directory.path / "environment.log"
    if config.elsewhere and services.agents is not None:
        _check_not_put_aside(job.config)
        return services.agents(job.name, config)
    workers = await _loaded(job.config, log)
    if not workers.info.agent:
        return workers
    await workers.close()
    from motet.environments.agent_runner import AgentRunner

    runner = AgentRunner(job.name, config, log)
    await runner.open()
    return runner


async def check_environment(config: JobConfig, log: Path) -> None:
    """Load the environment of a job without a service, and close it.

    Raises:
        EnvironmentFault: it cannot be used.
    """
    await (await _loaded(config, log)).close()


async def _loaded(config: JobConfig, log: Path) -> EnvironmentWorkers:
    """Start an environment process; agents are checked for missing packages."""
    if config.environment.elsewhere:
        raise EnvironmentFault(
            "environment 'agent' runs beside a service (`motet agent`); here, name the function as `file.py:function`"
        )
    workers = EnvironmentWorkers(config.environment, log)
    await workers.open()
    if workers.info.agent or config.team:
        try:
            _check_team(workers, config)
            if not workers.info.agent:
                return workers
            _check_not_put_aside(config)
            importlib.import_module("motet.environments.agent_runner")
        except BaseException as error:
            await workers.close()
            if isinstance(error, ImportError):
                raise EnvironmentFault(
                    f"an agent needs {error.name}, which is not installed: pip install 'motet[serve]'"
                ) from error
            raise
    return workers
