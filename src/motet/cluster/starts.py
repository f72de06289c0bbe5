"""How hosts share a machine: what each is started with."""

from __future__ import annotations

from importlib.util import find_spec

from msgspec.structs import replace

from motet import budgets
from motet.cluster.host import Launch
from motet.cluster.messages import Start
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.rollout import RolloutConfig
from motet.errors import ConfigError


def starts(start: Start, engine: EngineConfig, rollout: RolloutConfig) -> list[Start]:
    """The first message of each host; `start` is that of a host which has the machine alone.

    Raises:
        ConfigError: hosts cannot work in this way.
    """
    if engine.hosts == 1:
        return [replace(start, engine=engine_of_host(engine, 0).model_dump(mode="json"))]
    if rollout.engine != "embedded":
        raise ConfigError(
            f"engine.hosts is {engine.hosts}, but rollout.engine {rollout.engine} has servers for one host; set hosts to 1, "
            "or leave rollout.engine out"
        )
    hosts = range(engine.hosts)
    return [replace(start, engine=engine_of_host(engine, host).model_dump(mode="json"), host=host) for host in hosts]


def engine_of_host(engine: EngineConfig, host: int) -> EngineConfig:
    """The settings of one host: its device, its part of the cores, and of the memory that hosts share."""
    device = engine.devices[host] if engine.devices else engine.device
    own = {"hosts": 1, "devices": [], "device": device}
    if engine.hosts == 1:
        return engine.model_copy(update=own)
    threads = engine.threads or max(1, budgets.cores() // (engine.hosts * engine.shard))
    shared = engine.devices.count(device) if engine.devices else engine.hosts
    fraction = engine.kv_memory_fraction / shared
    return engine.model_copy(update={**own, "threads": threads, "kv_memory_fraction": fraction})


def launcher(cluster: ClusterConfig, engine: EngineConfig) -> Launch | None:
    """Who starts the processes; None is this machine.

    Raises:
        ConfigError: nobody can.
    """
    if cluster.launcher == "local":
        return None
    if find_spec("ray") is None:
        raise ConfigError("cluster.launcher is ray, which is not installed: pip install 'motet[ray]'")
    if not engine.threads or engine.devices:
        raise ConfigError(
            "cluster.launcher is ray: set engine.threads to the cores that each host asks Ray for, and leave engine.devices "
            "out, because Ray chooses devices"
        )
    from motet.cluster.ray_hosts import RayLauncher

    return RayLauncher(cluster.address, cores=engine.threads, gpus=int(engine.device.startswith("cuda")))
