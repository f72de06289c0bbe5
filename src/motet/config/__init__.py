"""What a user may write: one definition for job files, the command line, Python and the service.

Every field has a docstring; `docs/configuration.md` is generated from them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from motet.config.engine import EngineConfig
from motet.config.job import (
    GENERATED_ROWS,
    GIVEN_ROWS,
    AdapterConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    JobConfig,
    KLConfig,
    OptimizerConfig,
    RewardConfig,
    SamplingConfig,
)
from motet.config.model import Config, named
from motet.config.rollout import LaunchConfig, RolloutConfig


class RunConfig(Config):
    """A job file after defaults, sweeps and overrides."""

    base: str
    """`small` (ships with Motet), a hub id, a directory or a .gguf file."""
    engine: EngineConfig = EngineConfig()
    """The device and its budgets."""
    rollout: Annotated[RolloutConfig, named("engine")] = RolloutConfig()
    """Where rollouts are sampled."""
    jobs: list[JobConfig] = Field(min_length=1)
    """What to train, all at once."""
    run: str = "runs/default"
    """Directory of the run; `motet run` uses runs/<name of the job file>, `motet.run` runs/<name of the script>."""

    @field_validator("jobs")
    @classmethod
    def _names_are_unique(cls, jobs: list[JobConfig]) -> list[JobConfig]:
        names = [job.name for job in jobs]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two jobs have the name {doubled[0]!r}; every job needs a name of its own")
        return jobs


__all__ = [
    "GENERATED_ROWS",
    "GIVEN_ROWS",
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "JobConfig",
    "KLConfig",
    "LaunchConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
]
