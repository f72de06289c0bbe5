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
        engines, rollouts = [engine_of_host(engine, 0)], [rollout]
    else:
        samples = rollout.engine == "embedded"
        engines = [engine_of_host(engine, host, samples=samples) for host in range(engine.hosts)]
        rollouts = [rollout_of_host(rollout, host, engine.hosts) for host in range(engine.hosts)]
    return [
        replace(
            start,
            engine=engine.model_dump(mode="json"),
            rollout=rollout.model_dump(mode="json"),
            host=number if len(engines) > 1 else None,
        )
        for number, (engine, rollout) in enumerate(zip(engines, rollouts, strict=True))
    ]


def engine_of_host(engine: EngineConfig, host: int, *, samples: bool = True) -> EngineConfig:
    """The settings of one host: its device, its part of the cores, and, where it samples, of the memory that hosts share."""
    device = engine.devices[host] if engine.devices else engine.device
    own = {"hosts": 1, "devices": [], "device": device}
    if engine.hosts == 1:
        return engine.model_copy(update=own)
    threads = engine.threads or max(1, budgets.cores() // (engine.hosts * engine.shard))
    shared = engine.devices.count(device) if engine.devices else engine.hosts
    fraction = engine.kv_memory_fraction / (shared if samples else 1)
    return engine.model_copy(update={**own, "threads": threads, "kv_memory_fraction": fraction})


def rollout_of_host(rollout: RolloutConfig, host: int, hosts: int) -> RolloutConfig:
    """The servers of one host, which no other host has: so nobody publishes to them, or unloads from them, but this one.

    Of `urls`, with their agents, each host has every so manieth; what `launch` starts is of each, on devices of its own.

    Raises:
        ConfigError: there are fewer servers than hosts.
    """
    own: dict[str, object] = {}
    if rollout.urls:
        if len(rollout.urls) < hosts:
            raise ConfigError(
                f"engine.hosts is {hosts}, and rollout.urls names {len(rollout.urls)}: each host needs a server of its own; "
                f"name more, or set hosts to {len(rollout.urls)}"
            )
        own = {"urls": rollout.urls[host::hosts], "agents": rollout.agents[host::hosts]}
    if rollout.launch is not None and (devices := rollout.launch.devices):
        first = host * rollout.launch.replicas % len(devices)
        own["launch"] = rollout.launch.model_copy(update={"devices": [*devices[first:], *devices[:first]]})
    return rollout.model_copy(update=own)


def launcher(cluster: ClusterConfig, engine: EngineConfig) -> Launch | None:
    """Who starts the processes; None is this machine.

    Raises:
        ConfigError: nobody can.
    """
    if cluster.launcher == "local":
        return None
    if cluster.launcher == "torchrun":
        raise ConfigError("cluster.launcher torchrun is for `motet run`; for a service leave it out, or use ray")
    if find_spec("ray") is None:
        raise ConfigError("cluster.launcher is ray, which is not installed: pip install 'motet[ray]'")
    if not engine.threads or engine.devices:
        raise ConfigError(
            "cluster.launcher is ray: set engine.threads to the cores that each host, and each rank of one in shards, asks Ray "
            "for, and leave engine.devices out, because Ray chooses devices"
        )
    from motet.cluster.ray_hosts import RayLauncher

    cores, gpus = engine.threads * engine.shard, int(engine.device.startswith("cuda"))
    return RayLauncher(cluster.address, cores=cores, gpus=gpus)
