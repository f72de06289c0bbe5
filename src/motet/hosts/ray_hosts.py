"""Hosts on the nodes of a Ray cluster: Ray places, starts and watches their processes; messages use Motet's sockets.

Only this module imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from motet.config.engine import EngineConfig
from motet.config.rollout import RolloutConfig
from motet.core.errors import EngineError
from motet.hosts.host_link import HostChild
from motet.hosts.listener import ADDRESS, TOKEN, host_that_connects
from motet.hosts.messages import StartHost
from motet.hosts.nodes import NodeFacts, address_of
from motet.hosts.project import Seen, leads_away, look_of, moved, place_on, seen_here
from motet.process import wall
from motet.process.child import ChildProcess
from motet.rollout.server_process import free_port

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 60.0
_JOIN_SECONDS = 600.0


def _gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def cores_and_gpus(start: StartHost, gpus_of_nodes: Sequence[int] = ()) -> tuple[int, int]:
    """Cores and GPUs that a host with its ranks needs on one node; with device `auto`, GPUs if a node has enough."""
    engine, launch = EngineConfig.model_validate(start.engine), RolloutConfig.model_validate(start.rollout).launch
    wants = engine.device.startswith("cuda")
    if engine.device == "auto" and (most := max(gpus_of_nodes, default=0)):
        wants = sum(n // engine.n_ranks for n in gpus_of_nodes) > (start.host or 0)
        if not wants:
            _log.warning(
                "CPUs train host %d: engine.device is auto, each host has %d ranks, and no GPUs are left for it (the largest "
                "node has %d); start fewer hosts or ranks, or set engine.device to cpu", start.host or 0, engine.n_ranks, most
            )  # fmt: skip
    gpus = engine.n_ranks if wants else 0
    if launch is not None and (gpus or launch.names_gpus):  # servers see those of their host
        gpus = max(gpus, launch.tensor_parallel)
    return engine.threads * engine.n_ranks, gpus


class RayLauncher:
    """Starts hosts on a cluster: the `Launch` of `Hosts`."""

    def __init__(self, address: str, named: Sequence[str] = ()) -> None:
        """`address` is as for `ray.init`; every node needs the absolute paths `named`."""
        self._address, self._project, self._named = address, Path.cwd(), named
        self._opening = asyncio.Lock()
        self._copies: dict[Path, dict[frozenset[str], Path]] = {}
        """Copies of the project in a run directory, by `Seen.same`: made once, so that all hosts have the same code."""

    async def __call__(self, start: StartHost, log: Path) -> HostChild:
        """Start the process of a host where there is room for its threads and GPU, and wait until it has connected.

        Raises:
            EngineError: the cluster cannot be reached, the process ended at once, or its node lacks a directory.
        """
        try:
            async with self._opening:
                await asyncio.to_thread(self._connect)
            return await self._started(start, log)
        except (RayError, OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"Ray at {self._address!r} could not start a host: {_told(error)}") from error

    async def _started(self, start: StartHost, log: Path) -> HostChild:
        nodes: list[Any] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        cores, gpus = cores_and_gpus(start, [_gpus(node) for node in nodes])
        here = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        process: Any = MotetHost.options(  # type: ignore[attr-defined]
            num_cpus=cores, num_gpus=gpus, scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=2,
            name=f"{log.parent.name} host {start.host or 0} {secrets.token_hex(2)}",
        ).remote()  # fmt: skip

        directory = self._project

        async def begin(address: str, token: str) -> Any:
            nonlocal directory
            directory = await self._directory(process, Path(start.run))
            return process.run.remote({ADDRESS: address, TOKEN: token}, str(directory), str(log))

        async def end() -> None:
            ray.kill(process)

        child = await host_that_connects(here, begin, end)
        if directory != self._project:
            child.translate = partial(moved, project=self._project, copy=directory)
        return child

    async def _directory(self, process: Any, run: Path) -> Path:
        """The working directory of a host on its node."""
        with _marked(run) as mark:
            asked: Awaitable[Seen] = process.look.remote(
                str(mark), str(self._project), look_of(self._project), self._named
            )
            seen = await asked
        if seen.run and not seen.project:
            looks = await asyncio.to_thread(leads_away, self._project, run)
            same: Awaitable[frozenset[str]] = process.same.remote(looks)
            seen = replace(seen, same=await same)
        async with self._opening:
            made = self._copies.setdefault(run, {})
            place = await asyncio.to_thread(place_on, seen, run, self._project, self._named, made)
            if place != self._project:
                made[seen.same] = place
        return place

    def _connect(self) -> None:
        if not ray.is_initialized():
            ray.init(address=self._address, log_to_driver=False, namespace="motet")


@contextmanager
def _marked(directory: Path) -> Iterator[Path]:
    """A temporary file that shows whether a machine sees this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / f".motet-mark-{secrets.token_hex(4)}"
    try:
        mark.write_text(mark.name, "utf-8")
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _sees(mark: Path) -> bool:
    return mark.is_file() and mark.read_text("utf-8") == mark.name


@ray.remote
class MotetHost:
    """One process of a host; it ends with this actor, because the other end of its socket closes."""

    def look(self, mark: str, project: str, look: str, named: Sequence[str]) -> Seen:
        """Facts about this node; `look` is that of the project where Motet was started."""
        missing = tuple(path for path in named if not Path(path).exists())
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return Seen(address, _sees(Path(mark)), look_of(Path(project)) == look, Path(project).is_dir(), missing)

    def same(self, looks: dict[str, str]) -> frozenset[str]:
        """The directories that look the same on this node as on the first one."""
        return seen_here(looks)

    def run(self, settings: dict[str, str], directory: str, log: str) -> int:
        """Run the host to its end; returns its exit status."""
        sys.stdout.write(f"a host of Motet runs in {directory} and writes to {log}\n")
        command, environment = wall.command("motet.hosts"), {**os.environ, **settings}
        return ChildProcess(command, Path(log), quiet=True, cwd=directory, env=environment).wait()


def _told(error: BaseException) -> str:
    """What went wrong, with the last line of what lies behind it: Ray names a missing token only there."""
    behind = str(error.__cause__ or "").strip().splitlines()[-1:]
    cure = "the cluster asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to that of the cluster"
    return ": ".join([str(error), *behind, *([cure] if "AuthenticationError" in "".join(behind) else [])])


def examine_nodes(address: str, directory: Path, count: int = 1) -> list[NodeFacts]:
    """Ask all nodes of a cluster, `count` at least, for their facts, and run a round of gloo over all of them.

    All nodes must see `directory`.

    Raises:
        EngineError: the cluster cannot be reached, too few nodes join it, or a node does not answer.
    """
    try:
        with _marked(directory) as mark:
            ray.init(address=address, log_to_driver=False, namespace="motet-doctor", ignore_reinit_error=True)
            return _examined(_joined(count), mark, leads_away(Path.cwd(), directory))
    except (RayError, ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise EngineError(f"Ray at {address!r} could not be examined: {_told(error)}") from error


def _joined(count: int) -> list[dict[str, Any]]:
    """Wait for `count` live nodes."""
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if len(nodes) >= count:
            return nodes
        if time.monotonic() > deadline:
            raise ConnectionError(f"it has {len(nodes)} of {count} nodes after {_JOIN_SECONDS:.0f} s")
        time.sleep(1.0)


def _examined(nodes: list[dict[str, Any]], mark: Path, away: dict[str, str]) -> list[NodeFacts]:
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    actors: list[Any] = [_Node.options(num_cpus=0, scheduling_strategy=one).remote() for one in on]  # type: ignore[attr-defined]
    try:
        project = Path.cwd()
        looks = [actor.look.remote(str(mark), str(project), look_of(project), away) for actor in actors]
        facts: list[NodeFacts] = ray.get(looks, timeout=_LOOK_SECONDS)
        facts = [
            replace(one, address=str(node["NodeManagerAddress"]), gpus_of_ray=_gpus(node))
            for one, node in zip(facts, nodes, strict=True)
        ]
        meeting = f"{facts[0].address}:{ray.get(actors[0].free_port.remote(), timeout=_LOOK_SECONDS)}"
        rounds = [actor.gloo.remote(rank, len(actors), meeting) for rank, actor in enumerate(actors)]
        gloo: list[float | str] = ray.get(rounds, timeout=2 * _LOOK_SECONDS)
        return [replace(one, gloo=said) for one, said in zip(facts, gloo, strict=True)]
    finally:
        for actor in actors:
            ray.kill(actor)


@ray.remote
class _Node:
    """A process that examines its node."""

    def look(self, mark: str, project: str, look: str, away: dict[str, str]) -> NodeFacts:
        """Facts about this node; `project` is where hosts will run, with its `look` and the `away` directories."""
        from importlib.metadata import version

        from motet.config import budgets

        path, name = Path(mark), socket.gethostname()
        versions = version("motet"), version("torch"), platform.python_version()
        disk = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        return NodeFacts(
            "", versions, address_of(name), budgets.cores(), int(budgets.available_memory()), _sees(path), disk,
            gpus=budgets.gpus(), project=look_of(Path(project)) == look, same=seen_here(away),
        )  # fmt: skip

    def free_port(self) -> int:
        """An unused port."""
        return free_port()

    def gloo(self, rank: int, world: int, address: str) -> float | str:
        """Seconds of a round with all other nodes, or why it failed."""
        from motet.training.gloo_round import gloo_round

        try:
            return gloo_round(rank, world, address, _LOOK_SECONDS)
        except RuntimeError as error:  # any failure in torch.distributed
            return str(error).splitlines()[0]
