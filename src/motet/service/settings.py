"""How a service is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from motet.config import HostConfig
from motet.config.service import ServiceConfig
from motet.service.bases import Bases
from motet.tasks.reward_installed import Installed


@dataclass(frozen=True)
class Settings:
    """What whoever starts a service says of it."""

    base: str
    """The one base, where `config` has none."""
    directory: Path
    """Jobs, uploaded files, logs, and the database unless it has a URL."""
    database: str = ""
    """A SQLAlchemy URL; SQLite in the directory without one."""
    config: ServiceConfig = field(default_factory=ServiceConfig)
    open_to_all: bool = False
    """No key is needed: only for a service that this machine alone can reach."""
    public_url: str = ""
    """Where browsers reach the service, a scheme and a host; needed with `config.oidc`."""
    hub: bool = False
    """Whether jobs may read data from the hub."""
    rewards: Mapping[str, Installed] = field(default_factory=dict)
    """The functions of `config.rewards`, looked at: those that jobs may use by name, besides the built-in rewards."""

    @cached_property
    def bases(self) -> Bases:
        """The bases that the service serves, by name."""
        return Bases({name: one.base for name, one in self.config.bases.items()} or {self.base: self.base})

    @cached_property
    def hosts(self) -> dict[str, HostConfig]:
        """The settings of each base's hosts, by its name."""
        config = self.config
        one = HostConfig(base=self.base, engine=config.engine, rollout=config.rollout)
        return {name: base.host for name, base in config.bases.items()} or {self.base: one}
