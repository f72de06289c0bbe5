"""Settings of hosts that share a machine."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec

from msgspec.structs import replace

from motet.config import HostConfig, budgets
from motet.config.engine import ClusterConfig, EngineConfig
from motet.config.rollout import LaunchConfig, RolloutConfig
from motet.core.errors import ConfigError
from motet.hosts.host_link import Launch
from motet.hosts.messages import StartHost

_log = logging.getLogger(__name__)


def starts_of(*bases: tuple[StartHost, HostConfig]) -> list[StartHost]:
    """The first message of each host of these bases; the given messages describe a host with the whole machine.

    Raises:
        ConfigError: the configuration does not work with several hosts.
    """
    configs = [config for _, config in bases]
    devices = [device for config in configs for device in _devices(config.engine)]
    sampling = [device for config in configs if not _served(config) for device in _devices(config.engine)]
    among = devices_of_servers([config.rollout.launch for config in configs for _ in range(config.engine.hosts)])
    made: list[StartHost] = []
    for start, config in bases:
        for number in range(config.engine.hosts):
            own = engine_of_host(config.engine, number, devices, [] if _served(config) else sampling)
            servers = rollout_of_host(config.rollout, number, config.engine.hosts, among[len(made)])
            made.append(
                replace(
                    start,
                    base=config.base,
                    engine=own.model_dump(mode="json"),
                    rollout=servers.model_dump(mode="json"),
                    host=len(made) if len(devices) > 1 else None,
                    own=start.own
                    if start.own is None or len(devices) == 1
                    else dataclasses.replace(start.own, kept=True),
                )
            )
    return made


def _devices(engine: EngineConfig) -> list[str]:
    return engine.devices or [engine.device] * engine.hosts


def _served(config: HostConfig) -> bool:
    return config.rollout.engine != "embedded"


def engine_of_host(
    engine: EngineConfig, host: int, devices: Sequence[str] = (), sampling: Sequence[str] | None = None
) -> EngineConfig:
    """The settings of one host: its device, and its part of the cores and, if it samples, of the memory.

    `devices` lists those of all hosts of the machine, by default of its own base; `sampling` those of hosts that sample
    themselves, by default all; empty for a host with servers.
    """
    devices, device = devices or _devices(engine), _devices(engine)[host]
    sampling = devices if sampling is None else sampling
    own = {"hosts": 1, "devices": [], "device": device}
    if len(devices) == 1:
        return engine.model_copy(update=own)
    threads = engine.threads or max(1, budgets.cores() // (len(devices) * engine.n_ranks))
    fractions = {
        "kv_memory_fraction": engine.kv_memory_fraction / max(1, sampling.count(device)),
        "host_kv_memory_fraction": engine.host_kv_memory_fraction / max(1, len(sampling)),
    }
    return engine.model_copy(update={**own, "threads": threads, **fractions})


def devices_of_servers(launches: Sequence[LaunchConfig | None]) -> list[list[str]]:
    """Assigns the entries of `devices` to each host's servers: those with the fewest servers so far come first.

    Servers are counted per GPU of an entry (`"2,3"` has two); an entry listed twice takes twice as many. Hosts with the
    shortest list choose first.
    """
    servers: Counter[str] = Counter()
    made: list[list[str]] = [[] for _ in launches]
    launched = [(host, launch) for host, launch in enumerate(launches) if launch is not None and launch.devices]
    for host, launch in sorted(launched, key=lambda one: len(one[1].devices)):
        entries = [[gpu.strip() for gpu in entry.split(",")] for entry in launch.devices]
        for _ in range(launch.replicas):
            place = min(range(len(entries)), key=lambda place: _passes(entries, place, servers))
            servers.update(entries[place])
            made[host].append(launch.devices[place])
    return made


def _passes(entries: Sequence[Sequence[str]], place: int, servers: Counter[str]) -> tuple[int, float]:
    """Rounds through a list before this entry is used, by the servers on its GPUs: the largest number, and the mean."""
    passes = []
    for gpu in entries[place]:
        named = [gpu in entry for entry in entries]
        passes.append(math.ceil((servers[gpu] - sum(named[:place])) / sum(named)))
    return max(passes), sum(passes) / len(passes)


def rollout_of_host(rollout: RolloutConfig, host: int, hosts: int, devices: Sequence[str]) -> RolloutConfig:
    """The servers of one host; no other host publishes to them or unloads from them.

    Each host takes every N-th of `urls`; servers from `launch` start on each host, on these `devices`.

    Raises:
        ConfigError: there are fewer servers than hosts.
    """
    own: dict[str, object] = {}
    if rollout.urls:
        if len(rollout.urls) < hosts:
            raise ConfigError(
                f"engine.hosts is {hosts}, and rollout.urls names {len(rollout.urls)}: each host needs its own server; "
                f"name more, or set hosts to {len(rollout.urls)}"
            )
        own = {"urls": rollout.urls[host::hosts]}
    if rollout.launch is not None:
        own["launch"] = rollout.launch.model_copy(update={"devices": list(devices)})
    return rollout.model_copy(update=own)


def unlike_one_process(cluster: ClusterConfig, engines: Sequence[EngineConfig], cores: int, gpus: int) -> list[str]:
    """Automatic settings of hosts that differ from those of a single process; one line each."""
    lines = []
    for engine in engines:
        n_hosts = sum(other.hosts for other in engines)
        threads = max(1, cores // (n_hosts * engine.n_ranks))
        on_gpu = gpus > 0 and any(device != "cpu" for device in _devices(engine))
        if cluster.launcher == "local" and n_hosts > 1 and not engine.threads and threads < cores and not on_gpu:
            lines.append(
                f"each of {n_hosts} hosts computes with {threads} of {cores} threads: a job's bytes may differ from those that "
                "one process makes with all of them; set engine.threads to one number for both to compare"
            )
    return lines


def launcher(cluster: ClusterConfig, *bases: HostConfig) -> Launch | None:
    """What starts these bases' hosts; None for this machine. Raises ConfigError if no launcher can start them."""
    for line in unlike_one_process(cluster, [base.engine for base in bases], budgets.cores(), budgets.gpus()):
        _log.warning("%s", line)
    if cluster.launcher == "local":
        return None
    if cluster.launcher == "torchrun":
        raise ConfigError("cluster.launcher torchrun is for `motet run`; for a service leave it out, or use ray")
    if find_spec("ray") is None:
        raise ConfigError("cluster.launcher is ray, which is not installed: pip install 'motet[ray]'")
    if any(not base.engine.threads or base.engine.devices for base in bases):
        raise ConfigError(
            "cluster.launcher is ray: set engine.threads to the cores that each host, and each of its ranks, asks Ray "
            "for, and leave engine.devices out, because Ray chooses devices"
        )
    if any(base.rollout.launch is not None and base.rollout.launch.devices for base in bases):
        raise ConfigError(
            "cluster.launcher is ray: leave rollout.launch.devices out, because Ray chooses devices; servers see the GPUs of "
            "their host, as many as rollout.launch.tensor_parallel"
        )
    from motet.hosts.project import named_by_place
    from motet.hosts.ray_hosts import RayLauncher

    paths = {path for base in bases for path in named_by_place(base)}
    return RayLauncher(cluster.address, sorted(paths))
