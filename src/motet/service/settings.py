"""Settings of a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from motet.config import HostConfig
from motet.config.service import ServiceConfig
from motet.hosts.host_link import Launch
from motet.rewards.reward_installed import Installed
from motet.service.bases import Bases


@dataclass(frozen=True)
class Settings:
    """Options given at the start of a service."""

    base: str
    """The only base, if `config` has none."""
    directory: Path
    """Jobs, uploaded files, logs, and the database unless it has a URL."""
    database: str = ""
    """A SQLAlchemy URL; by default SQLite in the directory."""
    config: ServiceConfig = field(default_factory=ServiceConfig)
    open_to_all: bool = False
    """No keys: only for a service that is reachable from this machine only."""
    public_url: str = ""
    """Scheme and host under which browsers reach the service; required with `config.oidc`."""
    hub: bool = False
    """Whether jobs may read data from the hub."""
    restarted: bool = False
    """Whether a process before this one served, and ended: whoever ended it gains no requests by that."""
    rewards: Mapping[str, Installed] = field(default_factory=dict)
    """The functions of `config.rewards`, inspected: jobs may use them by name, besides the built-in rewards."""
    launch: Launch | None = None
    """Starts hosts on this machine; by default they are children of this process."""

    @cached_property
    def bases(self) -> Bases:
        """The bases by name."""
        return Bases({name: one.base for name, one in self.config.bases.items()} or {self.base: self.base})

    @cached_property
    def hosts(self) -> dict[str, HostConfig]:
        """The settings of each base's hosts, by its name."""
        config = self.config
        one = HostConfig(base=self.base, engine=config.engine, rollout=config.rollout)
        return {name: base.host for name, base in config.bases.items()} or {self.base: one}
