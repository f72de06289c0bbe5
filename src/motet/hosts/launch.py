"""Loads a base, and builds an engine and a trainer on its device. `motet.hosts.host` puts them together."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from motet.config import EngineConfig, HostConfig, JobConfig, RunConfig, budgets
from motet.config.service import Largest
from motet.core.device import Device
from motet.core.errors import ConfigError
from motet.core.model_info import ModelInfo
from motet.hosts.slot_memory import FreeMemory, SampleMemory, check_slots
from motet.hosts.workshop import Workshop
from motet.kernels.cpu.choice import Choice, kernels_of, of_jobs
from motet.model import lean_import
from motet.process.allocator import keep_freed_memory, without_collections
from motet.protocols import Trainer
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import computed_by
from motet.runtime.rundir import RunDirectory

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel
    from motet.rollout.embedded import EmbeddedEngine
    from motet.rollout.sampler_link import SamplerLink
    from motet.rollout.spread import SpreadEngine
    from motet.training.sharded.base import ShardedBase

_SPINS = "2000"
"""Iterations of libgomp's spin loop before a thread sleeps, about ten microseconds."""


def _before_torch() -> None:
    """Keep freed memory, and make OpenMP threads sleep soon at a barrier, unless OMP_WAIT_POLICY is set.

    If another process takes a core, a spinning thread uses up the time slice that its partner needs: with GNU OpenMP's
    default, training on two busy cores took up to ten times as long. A short spin has no measurable cost otherwise.
    """
    keep_freed_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@without_collections()
def warm_up() -> None:
    """Import the modules that loading a base needs, which is most of its time; for a process that does nothing else."""
    _before_torch()
    importlib.import_module("motet.model.load")
    lean_import.allow()
    lean_import.import_transformers()
    importlib.import_module("transformers.modeling_utils")  # imports most of the library
    gc.freeze()  # exclude imported modules from later collections


def open_base(
    config: HostConfig,
    directory: RunDirectory,
    stack: contextlib.ExitStack,
    own: Choice | None = None,
) -> LoraModel | ShardedBase:
    """Load and prove the base of a host. If it has ranks, their processes end with `stack`. `own` as in `load`.

    Raises:
        BaseModelError: the base cannot be used; the message says why.
        RankGone: the process of a rank ended.
    """
    engine = config.engine
    if engine.n_ranks == 1:
        base = load(config.base, engine, own)
        if base.info.experts and config.rollout.engine != "embedded":  # servers cannot use adapters on experts
            from motet.model.experts import NEED_OWN_SAMPLING

            base.revise(experts=(), experts_idle=NEED_OWN_SAMPLING)
        return base
    from motet.training.sharded.base import ShardedBase
    from motet.training.sharded.messages import Join
    from motet.training.sharded.torchrun import rank_group

    embedded = config.rollout.engine == "embedded"
    here = load(config.base, engine, own) if embedded else None
    of_torchrun = isinstance(config, RunConfig) and config.cluster.launcher == "torchrun"  # it has started the ranks
    join = Join.of(config.base, engine, own, embedded=embedded)
    group = rank_group(join, directory.path / "ranks.log", of_torchrun=of_torchrun)
    stack.callback(group.close)
    if here is not None:
        return ShardedBase.beside(here, group)
    return ShardedBase.of(group, trust_remote_code=engine.trust_remote_code)


def own_switches() -> contextlib.AbstractContextManager[None]:
    """Torch's switches as Motet's sums need them; behind it they are as they were, because the process may be a user's."""
    _before_torch()
    from motet.model.accelerator import full_precision

    return full_precision


def load(base: str, config: EngineConfig, own: Choice | None = None) -> LoraModel:
    """Load and prove a base. `own` is the choice for `engine.kernels: auto`, by default the fastest here.

    Raises:
        BaseModelError, ConfigError: the base cannot be used, or the selected kernels are not compiled.
    """
    _before_torch()
    import torch

    with ThreadPoolExecutor(1) as passing:
        loaded = passing.submit(_load, base, config, own).result()
    torch.set_num_threads(1)  # for threads that start from now on; the device's thread sets its own number
    return loaded


@without_collections()
def _load(base: str, config: EngineConfig, own: Choice | None) -> LoraModel:
    """Run in a thread that ends afterwards, so that only the device's thread keeps an OpenMP team.

    OpenMP keeps a team for each thread that has used one. With more threads than cores, every team waits by sleeping,
    and training took 1.5 times as long.
    """
    import torch

    from motet.kernels.supported_bases import load_as_configured

    torch.set_num_threads(budgets.threads_of(config))
    return load_as_configured(base, config, own)


def assemble(
    base: LoraModel | ShardedBase,
    config: HostConfig,
    needs: Sequence[budgets.Need],
    directory: RunDirectory,
    wanted: Sequence[JobConfig] | Largest,
    *,
    alone: bool = True,
) -> Workshop:
    """Build everything that jobs on a host share; `wanted` are its jobs, or the largest job that may come.

    If no other host uses the memory (`alone`), also checks that adapters in all slots and the longest sample fit.

    Raises:
        ConfigError: the settings of servers cannot work, or not even one adapter or the longest sample fits.
    """
    from motet.model.lora_model import LoraModel
    from motet.training.sharded.trainer import ShardedTrainer

    trainer, group = None, None
    if not isinstance(base, LoraModel):
        group = base.group
        trainer = ShardedTrainer(group, slots=config.engine.slots)
    if config.rollout.engine != "embedded":
        workshop = _build_on_servers(base, config, directory, wanted, trainer)
    else:
        whole = base if isinstance(base, LoraModel) else base.here
        assert whole is not None, "the embedded engine samples from a base of its own"
        workshop = build(whole, config.engine, needs, directory.path / "samplers.log", trainer)
    if group is not None:
        group.watch(workshop.device.lose)
    workshop.notes.extend((*base.info.notes, *budgets.idle_gpus(config, base.info.device, budgets.gpus())))
    if alone and isinstance(base, LoraModel) and workshop.memory is not None:
        workshop.samples = SampleMemory.of(base, workshop.memory.of_device, kept_tokens=config.engine.kept_tokens)
        try:
            workshop.check(needs)
            workshop.notes.extend(check_slots(base, config, workshop.memory, wanted))
        except ConfigError:
            workshop.close()
            raise
    return workshop


def _build_on_servers(
    base: LoraModel | ShardedBase,
    config: HostConfig,
    directory: RunDirectory,
    wanted: Sequence[JobConfig] | Largest,
    trainer: Trainer | None,
) -> Workshop:
    """An engine that samples on servers, and a trainer: the given one, or one on this device."""
    import numpy as np
    import torch

    from motet.hosts import servers
    from motet.model.accelerator import free_memory, total_memory, wait_for
    from motet.model.lora_model import LoraModel
    from motet.rollout.file_sync import FileSync
    from motet.runtime.publish_check import PROBE_TEXT

    def turn(training: bool) -> None:
        if base.info.device == "cpu":
            torch.set_num_threads(budgets.threads_of(config.engine))

    def check() -> None:
        if isinstance(base, LoraModel):  # ranks check their own devices
            wait_for(base.device)

    demand = servers.demand(wanted, config.engine.slots)
    asked = servers.build_servers(base.info, config.rollout, demand, directory.run_id, directory.path, directory.part)
    memory = None
    if trainer is None:
        assert isinstance(base, LoraModel)
        if base.kernels is not None:
            base.kernels.prepare(0)
        taken = servers.memory_beside(config.rollout.launch, total_memory(base.device))
        memory = FreeMemory(free_memory(base.device), sampling=taken)
        base.read_keys_in_blocks(config.engine.block_size)
        trainer = make_trainer(base, config.engine)
    text = base.info.tokenizer.encode(PROBE_TEXT)
    caveat = f"rollouts are sampled by {config.rollout.engine}, whose tokens depend on what else it serves"
    return Workshop(
        Device(turn, check),
        asked,
        trainer,
        FileSync(asked, trainer, np.asarray(text, np.int32)),
        probe_tolerance=servers.tolerance(config.rollout, base.info),
        servers=asked,
        memory=memory,
        inexact=(caveat,),
    )


def check_directories(config: EngineConfig) -> None:
    """Raise ConfigError if `engine.parking` or `engine.offload` is set and is no directory."""
    for name, path in (("parking", config.parking), ("offload", config.offload)):
        if path is not None and not (place := Path(os.path.expanduser(path))).is_dir():
            raise ConfigError(f"engine.{name}: {place} is no directory; make it, on a disk with room")


def make_trainer(base: LoraModel, config: EngineConfig) -> Trainer:
    """The trainer that a configuration asks for. Raises as `check_directories`."""
    from motet.training.torch_trainer import TorchTrainer

    check_directories(config)
    return TorchTrainer.of(base, config)


def build(
    base: LoraModel,
    config: EngineConfig,
    needs: Sequence[budgets.Need],
    log: Path | None = None,
    elsewhere: Trainer | None = None,
) -> Workshop:
    """An embedded engine and a trainer, or `elsewhere`, on one device; sampling processes write errors to `log`."""
    import torch

    from motet.model.accelerator import free_memory, wait_for
    from motet.rollout.embedded import EmbeddedEngine, SameTensors, SavedFiles
    from motet.rollout.spread import SpreadEngine
    from motet.training.torch_trainer import TorchTrainer

    base.read_keys_in_blocks(config.block_size)  # callers may have loaded their base with another block size
    n_samplers = _samplers(base, config)
    rows, threads = max(4, -(-config.max_rows // (1 + n_samplers))), budgets.threads_of(config)
    if base.kernels is not None:
        base.kernels.prepare(0 if n_samplers else threads)
    free = free_memory(base.device)
    memory, states = int(free * config.kv_memory_fraction) // (1 + n_samplers), base.info.state_bytes
    rows = budgets.rows_with_states(rows, states, memory)
    memory -= (rows + 1) * states
    kv_tokens, each = config.kv_tokens, base.info.kv_bytes_per_token
    kv_tokens = kv_tokens or budgets.kv_tokens(needs, rows, config.block_size, each, memory)
    limits = {"max_rows": rows, "kv_tokens": kv_tokens, "prefill_tokens": config.prefill_tokens}
    host = int(budgets.available_memory() * config.host_kv_memory_fraction) // (1 + n_samplers)
    limits |= {"kept_tokens": int(kv_tokens * config.kept_kv), "host_kv_bytes": host}
    spread: SpreadEngine | None = None
    tick_threads = budgets.tick_threads(threads, n_samplers, base.info.n_parameters)

    def turn(training: bool) -> None:
        """Training uses every core. Sampling uses `tick_threads` here, and one core in each sampling process."""
        if base.info.device == "cpu":
            torch.set_num_threads(threads if training else tick_threads)
        if spread is not None:
            spread.turn(training)

    device = Device(turn, lambda: wait_for(base.device))
    here = EmbeddedEngine(base, device, **limits, share=1 / (1 + n_samplers))
    if n_samplers:
        spread = SpreadEngine(here, _start_samplers(n_samplers, base, config, limits, device, log))
    engine = spread or here
    trainer = elsewhere or make_trainer(base, config)
    return Workshop(
        device,
        engine,
        trainer,
        SameTensors(engine.install, trainer.weights)
        if isinstance(trainer, TorchTrainer)
        else SavedFiles(engine, trainer),
        probe_tolerance=0.05 if base.info.inexact else 0.0,
        spread=spread,
        memory=_memory_beside(base.info, free, n_samplers, limits),
        kv_tokens=here.cache.n_blocks * here.cache.block_size,
    )


def _memory_beside(info: ModelInfo, free: int, n_samplers: int, limits: dict[str, int]) -> FreeMemory:
    """`limits` apply to each process that samples; sampling processes also have a copy of the base each."""
    caches = limits["kv_tokens"] * info.kv_bytes_per_token + (limits["max_rows"] + 1) * info.state_bytes
    if info.device != "cpu":
        return FreeMemory(free, caches, limits["host_kv_bytes"])
    bases = n_samplers * 2 * info.n_parameters * info.element_bytes  # weights and their second copy
    return FreeMemory(free, (1 + n_samplers) * (caches + limits["host_kv_bytes"]) + bases, processes=1 + n_samplers)


def _samplers(base: LoraModel, config: EngineConfig) -> int:
    info = base.info
    if info.device != "cpu" or (config.samplers == "auto" and base.kernels is not None):
        return 0
    if config.samplers != "auto":
        return config.samplers
    weights = info.n_parameters * info.element_bytes
    return budgets.samplers(budgets.threads_of(config), weights, budgets.available_memory())


def _start_samplers(
    n: int, base: LoraModel, config: EngineConfig, limits: dict[str, int], device: Device, log: Path | None
) -> list[SamplerLink]:
    from motet.rollout.sampler_link import SamplerLink
    from motet.rollout.sampler_messages import LoadSampler

    fingerprint = base.fingerprint()
    message = LoadSampler(
        base=base.info.name,
        dtype=base.info.dtype,
        pack=config.pack_weights,
        base_format=config.base_format,
        block_size=base.block_size,
        trust_remote_code=config.trust_remote_code,
        kernels=kernels_of(base.info.processor),
        limits=limits,
    )
    return [SamplerLink(message, fingerprint, device.busy, 1 / (1 + n), log) for _ in range(n)]


@contextlib.contextmanager
def sampling(base: LoraModel, config: EngineConfig, rows: int, tokens: int) -> Iterator[EmbeddedEngine]:
    """An engine without a trainer, on its own device, for `rows` completions at a time of `tokens` tokens in total."""
    import torch

    from motet.model.accelerator import wait_for
    from motet.rollout.embedded import EmbeddedEngine

    threads = budgets.cores()
    if base.kernels is None:
        threads = budgets.tick_threads(threads, 0, base.info.n_parameters)
    device = Device(lambda _: torch.set_num_threads(threads), lambda: wait_for(base.device))
    room = int(budgets.available_memory() * config.kv_memory_fraction) // base.info.kv_bytes_per_token
    kv_tokens = min(tokens + config.block_size, max(room, config.block_size))
    try:
        yield EmbeddedEngine(base, device, max_rows=rows, kv_tokens=kv_tokens, prefill_tokens=tokens)
    finally:
        device.close()


def auto_kernels(engine: EngineConfig, jobs: Iterable[JobDirectory]) -> Choice | None:
    """The kernels that `auto` selects: those that these jobs began with, or the fastest here.

    Raises:
        ConfigError: the jobs began with own kernels, which do not support a setting.
    """
    if engine.kernels != "auto":
        return None
    choice = of_jobs(computed_by(jobs))
    if choice.kept and (setting := engine.excludes(choice.kernels)):
        raise ConfigError(
            f"jobs of this run began with Motet's own kernels, which do not know the setting engine.{setting}: leave it out"
        )
    return choice
