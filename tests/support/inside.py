"""What tests see only inside of Motet's objects: each private name is read in one place, here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from torch import Tensor

    from motet.hosts.host_link import HostLink
    from motet.hosts.hosts import Hosts
    from motet.process.thread_turns import ThreadTurns
    from motet.rollout.decoder import Decoder
    from motet.rollout.sampler_link import SamplerLink
    from motet.rollout.spread import SpreadEngine
    from motet.runtime.pipeline import Pipeline
    from motet.service.database.store import Store
    from motet.service.http.connections import Connections
    from motet.service.http.open_bytes import OpenBytes
    from motet.service.tinker.futures import Futures
    from motet.training.arena import AdapterArena
    from motet.training.torch_trainer import TorchTrainer
    from tests.support.house import House


def arena(trainer: TorchTrainer, name: str) -> AdapterArena:
    """Find what a trainer keeps of an adapter: masters, gradient, state."""
    return trainer._arena(name)


def slots(trainer: Any) -> Any:
    """List the adapters that hold a slot of a trainer."""
    return trainer._slots


def block_pools(cache: Any) -> list[Tensor]:
    """List the keys and values of all layers of a KV cache."""
    return [pool for pair in cache._layers.values() for pool in pair]


def state_pools(cache: Any) -> list[Tensor]:
    """List the recurrent states of all layers of a KV cache."""
    return list(cache.states._pools.values())


def kept_sequences(decoder: Decoder) -> Any:
    """List the sequences that a decoder keeps for the next turn of their episodes."""
    return decoder.kept._kept


def running(pipeline: Pipeline) -> dict[str, Any]:
    """Find the jobs that have a slot of a pipeline."""
    return pipeline._running


def hear(client: Hosts, host: HostLink, message: Any) -> None:
    """Tell a client what a host says."""
    client._hear(host, message)


async def handle(host: HostLink, message: Any) -> None:
    """Let a host read a message of its process."""
    await host._handle(message)


def taken(room: OpenBytes) -> Mapping[str, float]:
    """Find the bytes that each tenant's requests hold."""
    return room._taken


def queued(threads: ThreadTurns, tenant: str) -> int:
    """Count the calls of a tenant that wait for a thread."""
    return len(threads._queues.get(tenant, ()))


def samples(futures: Futures) -> Any:
    """Find the samples that clients of Tinker wait for."""
    return futures._samples


def open_connections(connections: Connections) -> int:
    """Count the open connections of a service."""
    return connections._open


def held_connections(connections: Connections) -> Any:
    """Count the connections that a service makes wait."""
    return connections._held


def requests(house: House) -> Counter[str]:
    """Count the open requests of each payer."""
    return house.bodies._requests


def floods(house: House) -> Any:
    """Find what makes floods of requests wait."""
    return house.bodies._floods


def attached(workers: Any) -> dict[str, Any]:
    """Find when each worker of each job was seen last."""
    found: dict[str, Any] = workers._seen
    return found


def command(server: Any) -> list[str]:
    """Find the command that starts a server."""
    found: list[str] = server.process._command
    return found


def reordered(weight: Any) -> Any:
    """Find the packed copy of a frozen weight, if it has one."""
    return weight._reordered


def database(store: Store) -> Engine:
    """Find the database's engine, to listen to."""
    return store._engine


def open_rows(engine: SpreadEngine) -> tuple[Counter[str], ...]:
    """Count the open completions of each place by adapter."""
    return engine._open


def files(link: SamplerLink) -> str:
    """Find the directory through which a sampling process gets adapters."""
    return link._files.name
