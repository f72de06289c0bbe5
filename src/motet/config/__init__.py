"""The configuration: one definition for job files, the command line, Python and the service.

Every field has a docstring; `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from motet.algorithms.client import ClientDriven
from motet.config.adapters import AdapterConfig
from motet.config.chain import check_chains
from motet.config.data import GENERATED_ROWS, GIVEN_ROWS, OF_CLIENT, DataConfig
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.job import (
    CheckpointConfig,
    EnvironmentConfig,
    EvalConfig,
    JobConfig,
    RewardConfig,
    SamplingConfig,
)
from motet.config.observer import ObserverConfig, Observers
from motet.config.optimizers import OptimizerConfig
from motet.config.rollout import LaunchConfig, RolloutConfig, check_effect
from motet.config.stopping import StopConfig
from motet.config.team import NOT_ON_HOSTS, RoleConfig
from motet.core.settings import Config, named
from motet.core.suggestions import doubled_in


class HostConfig(Config):
    """The settings of a host, independent of its jobs."""

    base: str
    """`small` (ships with Motet), a hub id, a directory or a .gguf file."""
    engine: EngineConfig = EngineConfig()
    """The device and its budgets."""
    rollout: Annotated[RolloutConfig, named("engine")] = RolloutConfig()
    """Where rollouts are sampled."""

    @model_validator(mode="after")
    def _settings_are_of_the_engine(self) -> Self:
        """Refuse settings that the engine would ignore."""
        check_effect(self.engine, self.rollout)
        return self


class PricesConfig(Config):
    """What a run costs, in a currency of your choice; `motet check` forecasts with it."""

    hour: float = Field(0.0, ge=0, le=1e9)
    """One hour of this machine, for whoever pays by the hour."""


class RunConfig(HostConfig):
    """A job file after defaults, sweeps and overrides."""

    cluster: Annotated[ClusterConfig, named("launcher")] = ClusterConfig()
    """Where the processes of `engine.hosts` are."""
    jobs: list[JobConfig] = Field(min_length=1)
    """What to train, all at once."""
    observers: Observers = []
    """What receives every step: trackers, or [your own code](runs.md#trackers)."""
    prices: PricesConfig = PricesConfig()
    """What an hour costs, for the forecast of `motet check`."""
    run: str = "runs/default"
    """Directory of the run; `motet run` uses runs/<name of the job file>, `motet.run` runs/<name of the script>."""

    @model_validator(mode="after")
    def _jobs_and_hosts_fit(self) -> RunConfig:
        if self.cluster.launcher == "torchrun" and (self.engine.n_ranks == 1 or self.engine.hosts > 1):
            raise ValueError(
                "cluster.launcher torchrun starts the ranks of one host: set engine.ranks (or engine.shard) to as many "
                "processes as it starts, and leave engine.hosts out"
            )
        if wrong := [f"job {job.name}: {why}" for job in self.jobs if (why := self._unfit(job))]:
            raise ValueError("\n  ".join(wrong))
        check_chains(self.jobs)
        return self

    @property
    def on_hosts(self) -> bool:
        """Whether hosts in other processes run the jobs."""
        return self.engine.hosts > 1 or self.cluster.launcher == "ray"

    def _unfit(self, job: JobConfig) -> str:
        """Why no run can train a job, or none on its hosts; empty if one can."""
        if isinstance(job.algorithm, ClientDriven):
            return "algorithm.type client: clients reach a service alone (`motet serve`), and make such jobs there"
        if job.team and (self.on_hosts or self.engine.n_ranks > 1 or self.rollout.engine != "embedded"):
            return NOT_ON_HOSTS
        own = "reward is a function" if any(reward.function is not None for reward in job.rewards) else ""
        if self.on_hosts and (own := own or ("rows are" if job.data.rows is not None else "")):
            return (
                f"its {own} of this process, which hosts do not have; name a file instead (file.py:function, data.source), or "
                "set engine.hosts to 1"
            )
        return ""

    @field_validator("jobs")
    @classmethod
    def _names_are_unique(cls, jobs: list[JobConfig]) -> list[JobConfig]:
        if doubled := doubled_in(job.name for job in jobs):
            raise ValueError(f"two jobs have the name {doubled[0]!r}; give each job its own name")
        return jobs


__all__ = [
    "GENERATED_ROWS",
    "GIVEN_ROWS",
    "OF_CLIENT",
    "AdapterConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "HostConfig",
    "JobConfig",
    "LaunchConfig",
    "ObserverConfig",
    "OptimizerConfig",
    "PricesConfig",
    "RewardConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "StopConfig",
]
