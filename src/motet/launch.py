"""The composition root: puts base, engine, trainer, device, rewards and jobs together. `motet.running` runs them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet import budgets
from motet.allocator import keep_freed_memory
from motet.barriers import spin_briefly
from motet.config import EngineConfig, RunConfig
from motet.config.service import Largest
from motet.device import Device
from motet.runtime.job import Services
from motet.runtime.learner import Learner
from motet.runtime.rundir import RunDirectory
from motet.runtime.scheduler import FairScheduler
from motet.tasks.reward_http import Addresses, HttpRewards
from motet.tasks.reward_pool import RewardPool
from motet.types import ServerLoad

if TYPE_CHECKING:
    from motet.rollout.sampler_link import SamplerLink
    from motet.rollout.server import ServerEngine

SMALL_MODEL = 500_000_000
"""Parameters below which decoding is slower on several torch threads than on one: its products are too short to share."""


@dataclass
class Workshop:
    """A loaded base and everything that runs on its device."""

    base: Any
    device: Device
    engine: Any
    trainer: Any
    sync: Any
    config: EngineConfig
    notes: list[str] = field(default_factory=list)
    probe_tolerance: float = 0.0
    """Largest mean difference between the engine's and the trainer's logprobs of a probe."""
    keep_versions: int | None = None
    """Versions that the engine keeps besides those that are needed."""
    servers: ServerEngine | None = None
    """The engine, where it asks servers."""
    inexact: tuple[str, ...] = ()
    """Why the bytes of every job may depend on more than the job."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The engine while requests are sent: servers are there, and are let go or ended afterwards.

        Raises:
            MotetError: no server can be used.
        """
        if self.servers is None:
            yield
            return
        try:
            await self.servers.ready()
            yield
        finally:
            await self.servers.close()

    def loads(self) -> Sequence[ServerLoad]:
        """What each server is doing; empty where there is none."""
        return () if self.servers is None else self.servers.loads()

    def close(self) -> None:
        """End the device's thread and the sampling processes."""
        self.device.close()
        if hasattr(self.engine, "notes"):
            self.notes.extend(self.engine.notes())
            self.engine.close()


def warm_up() -> None:
    """Import what loading a base needs, which takes most of its time."""
    keep_freed_memory()
    spin_briefly()
    importlib.import_module("motet.model.load")
    importlib.import_module("transformers.modeling_utils")  # with most of the library


def load(base: str, config: EngineConfig) -> Any:
    """Load and prove a base.

    Raises:
        BaseModelError: with the reason.
    """
    keep_freed_memory()
    spin_briefly()
    with ThreadPoolExecutor(1) as passing:
        loaded = passing.submit(_load, base, config).result()
    _one_thread()
    return loaded


def _load(base: str, config: EngineConfig) -> Any:
    """Runs in a thread that ends afterwards.

    OpenMP keeps a team for each thread that ever asked for one, and as soon as there are more threads than cores, every
    team waits by sleeping: training took half as long again. So only the device's thread may have a team that lasts.
    """
    import torch

    from motet.model.load import load_base

    torch.set_num_threads(_threads(config))
    return load_base(
        base,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        pack=config.pack_weights,
        numerics=config.numerics,
        trust_remote_code=config.trust_remote_code,
    )


def assemble(
    base: Any,
    config: RunConfig,
    needs: Sequence[budgets.Need],
    directory: RunDirectory,
    largest: Largest | None = None,
) -> Workshop:
    """Everything that the jobs of a run share, with the engine that they ask for.

    Raises:
        ConfigError: the settings of servers cannot work.
    """
    if config.rollout.engine == "embedded":
        return build(base, config.engine, needs, directory.path / "samplers.log")
    return _build_on_servers(base, config, directory, largest)


def _build_on_servers(base: Any, config: RunConfig, directory: RunDirectory, largest: Largest | None) -> Workshop:
    """A trainer on this device, and an engine that asks servers."""
    import torch

    from motet import servers
    from motet.rollout.server import FileSync
    from motet.training.torch_trainer import TorchTrainer

    def turn(training: bool) -> None:
        if base.device.type == "cpu":
            torch.set_num_threads(_threads(config.engine))

    base.block_size = config.engine.block_size
    slots = config.engine.slots
    wanted = servers.demand(config.jobs, slots) if largest is None else servers.demand_of_any(largest, slots)
    engine = servers.build_servers(base, config.rollout, wanted, directory.run_id, directory.path)
    trainer = TorchTrainer(base, slots=config.engine.slots, recompute=config.engine.recompute)
    told = f"rollouts are sampled by {config.rollout.engine}, whose tokens depend on what else it serves"
    return Workshop(
        base,
        Device(turn),
        engine,
        trainer,
        FileSync(engine, trainer),
        config.engine,
        list(base.notes),
        probe_tolerance=servers.tolerance(config.rollout, base),
        keep_versions=config.rollout.keep_versions,
        servers=engine,
        inexact=(told,),
    )


def build(base: Any, config: EngineConfig, needs: Sequence[budgets.Need], log: Path | None = None) -> Workshop:
    """Engine and trainer on one base and one device; errors of sampling processes go to `log`."""
    import torch

    from motet.rollout.embedded import EmbeddedEngine, SameTensors
    from motet.rollout.spread import SpreadEngine
    from motet.training.torch_trainer import TorchTrainer

    base.block_size = config.block_size  # who brings a base of their own may have loaded it with another
    n_samplers = _samplers(base, config)
    rows, threads = max(4, -(-config.max_rows // (1 + n_samplers))), _threads(config)
    per_token = budgets.kv_bytes_per_token(base.model.config.get_text_config(), base.dtype.itemsize)
    memory = int(_free_memory(base.device) * config.kv_memory_fraction) // (1 + n_samplers)
    limits = {
        "max_rows": rows,
        "kv_tokens": config.kv_tokens or budgets.kv_tokens(needs, rows, config.block_size, per_token, memory),
        "prefill_tokens": config.prefill_tokens,
    }
    places: list[SpreadEngine] = []
    tick_threads = 1 if n_samplers or base.n_parameters < SMALL_MODEL else threads

    def turn(training: bool) -> None:
        """Training takes every core; sampling takes one in each process."""
        if base.device.type == "cpu":
            torch.set_num_threads(threads if training else tick_threads)
        for place in places:
            place.turn(training)

    device = Device(turn)
    engine: Any = EmbeddedEngine(base, device, **limits, share=1 / (1 + n_samplers))
    if n_samplers:
        engine = SpreadEngine(engine, _start_samplers(n_samplers, base, config, limits, device, log))
        places.append(engine)
    trainer = TorchTrainer(base, slots=config.slots, recompute=config.recompute)
    return Workshop(
        base,
        device,
        engine,
        trainer,
        SameTensors(engine, trainer.weights),
        config,
        list(base.notes),
        probe_tolerance=0.05 if base.inexact else 0.0,
    )


def _samplers(base: Any, config: EngineConfig) -> int:
    if base.device.type != "cpu":
        return 0
    if config.samplers != "auto":
        return int(config.samplers)
    weights = base.n_parameters * base.dtype.itemsize
    return budgets.samplers(_threads(config), weights, budgets.available_memory())


def _start_samplers(
    n: int, base: Any, config: EngineConfig, limits: dict[str, int], device: Device, log: Path | None
) -> list[SamplerLink]:
    from motet.rollout.sampler_link import SamplerLink
    from motet.rollout.sampler_messages import Load

    fingerprint = base.fingerprint()
    message = Load(
        base=base.name,
        dtype=str(base.dtype).removeprefix("torch."),
        pack=config.pack_weights,
        block_size=base.block_size,
        trust_remote_code=config.trust_remote_code,
        limits=limits,
    )
    return [SamplerLink(message, fingerprint, device.busy, 1 / (1 + n), log) for _ in range(n)]


def _threads(config: EngineConfig) -> int:
    return config.threads or budgets.cores()


def _one_thread() -> None:
    """From now on threads start with one torch thread; the device's takes what it needs."""
    import torch

    torch.set_num_threads(1)


def _free_memory(device: Any) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else budgets.available_memory()


def services(workshop: Workshop, directory: RunDirectory, rewards: RewardPool | None = None) -> Services:
    """What the jobs of a run share; rewards at HTTP addresses may be anywhere, unless `rewards` says otherwise."""
    config = workshop.config
    scheduler = FairScheduler(workshop.engine.capacity + workshop.engine.capacity // 2)
    return Services(
        engine=workshop.engine,
        trainer=workshop.trainer,
        sync=workshop.sync,
        device=workshop.device,
        scheduler=scheduler,
        learner=Learner(workshop.trainer, workshop.device, config.train_tokens, scheduler.standing),
        rewards=rewards or RewardPool(config.reward_processes, {"http": HttpRewards(Addresses(anywhere=True))}),
        micro_batch_tokens=config.micro_batch_tokens,
        probe_tolerance=workshop.probe_tolerance,
        keep_versions=workshop.keep_versions,
        engine_suffix=f"{directory.run_id}.{directory.attempt}",
        threads=_threads(config),
    )
