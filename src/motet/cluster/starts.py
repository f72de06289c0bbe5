"""How hosts share a machine: what each is started with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from msgspec.structs import replace

from motet import budgets
from motet.cluster.host import Launch
from motet.cluster.messages import Start
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.rollout import RolloutConfig
from motet.errors import ConfigError


def starts(start: Start, engine: EngineConfig, rollout: RolloutConfig) -> list[Start]:
    """The first message of each host of one base; `start` is that of a host which has the machine alone.

    Raises:
        ConfigError: hosts cannot work in this way.
    """
    return starts_of([(start, engine)], rollout)


def starts_of(bases: Sequence[tuple[Start, EngineConfig]], rollout: RolloutConfig) -> list[Start]:
    """The same of several bases, whose hosts share the machine.

    Raises:
        ConfigError: hosts cannot work in this way.
    """
    devices = [device for _, engine in bases for device in _devices(engine)]
    if len(devices) > 1:
        for _, engine in bases:
            _check_shared(engine, rollout, len(bases))
    made: list[Start] = []
    for start, engine in bases:
        for number in range(engine.hosts):
            own = engine_of_host(engine, number, devices).model_dump(mode="json")
            made.append(replace(start, engine=own, host=len(made) if len(devices) > 1 else None))
    return made


def _check_shared(engine: EngineConfig, rollout: RolloutConfig, n_bases: int) -> None:
    if n_bases > 1 and rollout.engine != "embedded":
        raise ConfigError(
            f"there are {n_bases} bases, but rollout.engine {rollout.engine} has servers for one; leave rollout.engine out, or "
            "start a service for each base"
        )
    if engine.shard > 1:
        raise ConfigError(
            f"engine.hosts is {engine.hosts} and engine.shard {engine.shard}: a host has its base whole; set one of them to 1"
        )
    if rollout.engine != "embedded":
        raise ConfigError(
            f"engine.hosts is {engine.hosts}, but rollout.engine {rollout.engine} has servers for one host; set hosts to 1, "
            "or leave rollout.engine out"
        )


def _devices(engine: EngineConfig) -> list[str]:
    """Of each of its hosts."""
    return engine.devices or [engine.device] * engine.hosts


def engine_of_host(engine: EngineConfig, host: int, devices: Sequence[str] = ()) -> EngineConfig:
    """The settings of one host: its device, its part of the cores, and of the memory that hosts share.

    `devices` are those of all hosts of the machine, of its own base alone unless they are given.
    """
    devices, device = devices or _devices(engine), _devices(engine)[host]
    own = {"hosts": 1, "devices": [], "device": device}
    if len(devices) == 1:
        return engine.model_copy(update=own)
    threads = engine.threads or max(1, budgets.cores() // len(devices))
    fraction = engine.kv_memory_fraction / devices.count(device)
    return engine.model_copy(update={**own, "threads": threads, "kv_memory_fraction": fraction})


def launcher(cluster: ClusterConfig, *engines: EngineConfig) -> Launch | None:
    """Who starts the processes; None is this machine.

    Raises:
        ConfigError: nobody can.
    """
    if cluster.launcher == "local":
        return None
    if find_spec("ray") is None:
        raise ConfigError("cluster.launcher is ray, which is not installed: pip install 'motet[ray]'")
    if any(not engine.threads or engine.devices for engine in engines):
        raise ConfigError(
            "cluster.launcher is ray: set engine.threads to the cores that each host asks Ray for, and leave engine.devices "
            "out, because Ray chooses devices"
        )
    from motet.cluster.ray_hosts import RayLauncher

    return RayLauncher(cluster.address)
