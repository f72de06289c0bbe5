"""The environment that a job brings: a class, an agent that runs beside it, or one that runs on a machine of its owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet.errors import EnvironmentFault
from motet.runtime.job import Job, Services
from motet.tasks.environments import EnvironmentWorkers

if TYPE_CHECKING:
    from motet.agents.elsewhere import AgentsElsewhere
    from motet.agents.runner import AgentRunner


def _check_not_put_aside(job: Job) -> None:
    if job.config.rl.over_provision > 1:
        raise EnvironmentFault("algorithm.over_provision puts rollouts aside, which an agent cannot be: leave it out")


async def own_environment(job: Job, services: Services) -> EnvironmentWorkers | AgentRunner | AgentsElsewhere:
    """The environment that a job brings, ready.

    Raises:
        EnvironmentFault: it cannot be used.
    """
    config, log = job.config.environment, job.directory.path / "environment.log"
    if config.elsewhere:
        if services.agents is None:
            raise EnvironmentFault(
                "environment 'agent' runs beside a service (`motet agent`); here, name the function as `file.py:function`"
            )
        _check_not_put_aside(job)
        return services.agents(job.name, config)
    workers = EnvironmentWorkers(config, log)
    await workers.open()
    if not workers.info.agent:
        return workers
    await workers.close()
    _check_not_put_aside(job)
    try:
        from motet.agents.runner import AgentRunner
    except ImportError as error:
        raise EnvironmentFault(
            f"an agent needs {error.name}, which is not installed: pip install 'motet[serve]'"
        ) from error
    runner = AgentRunner(job.name, config, log)
    await runner.open()
    return runner
