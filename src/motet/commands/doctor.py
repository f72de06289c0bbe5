"""`motet doctor`: this machine, the budgets derived from it, and whether results are bit-exact on it."""

from __future__ import annotations

import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from motet import __version__
from motet.commands.answers import print_table
from motet.config import EngineConfig, budgets
from motet.core.errors import ConfigError, MotetError
from motet.hosts.launch import load
from motet.hosts.nodes import faults
from motet.hosts.project import too_large
from motet.kernels.cpu import library
from motet.kernels.cpu.choice import kernels_of, of_machine
from motet.observe.text import plain_console
from motet.process import wall
from motet.process.system_calls import LOGGED

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel

_FASTER = 1.1
"""How much faster a type must decode to be advised: less may be noise."""


def examine(base_name: str) -> int:
    """Print the tables; returns 0 if results are exact in every type tried, otherwise 1."""
    console = plain_console()
    config = EngineConfig()
    print_table(console, _machine())
    print_table(console, _wall())
    table = _table(f"base {base_name}", "type", "kernels", "loads in", "decode, 64 rows", "exact", "KV tokens")
    exact, rates = True, dict[str, float]()
    for dtype in ("float32", "bfloat16"):
        started = time.perf_counter()
        try:
            base = load(base_name, config.model_copy(update={"dtype": dtype}))
        except MotetError as error:
            table.add_row(dtype, "", f"refused: {error}", "", "", "")
            exact = False
            continue
        seconds = time.perf_counter() - started
        room = int(budgets.available_memory() * config.kv_memory_fraction) // base.info.kv_bytes_per_token
        rates[dtype] = _decode_rate(base, config)
        rate = f"{rates[dtype]:,.0f} tokens/s"
        exactly = "yes, bit for bit" if base.info.exact else "NO"
        table.add_row(dtype, kernels_of(base.info.processor), f"{seconds:.1f} s", rate, exactly, f"{room:,}")
        for note in base.info.notes:
            console.print(f"note ({dtype}): {note}")
        exact = exact and base.info.exact
    print_table(console, table)
    if rates.get("float32", 0) > _FASTER * rates.get("bfloat16", math.inf):
        console.print("float32 is faster here: set engine.dtype to float32, unless memory is short", soft_wrap=True)
    console.print(
        f"slots: {config.slots} adapters at once, {config.max_rows} rows decoded together (engine.slots, engine.max_rows)",
        soft_wrap=True,
    )
    return 0 if exact else 1


def examine_cluster(address: str, directory: Path, count: int) -> int:
    """Wait for `count` nodes of a Ray cluster and print their facts; returns 0 if hosts can run on all, otherwise 1."""
    if find_spec("ray") is None:
        raise ConfigError("motet doctor --ray needs Ray, which is not installed: pip install 'motet[ray]'")
    from motet.hosts.ray_hosts import examine_nodes

    nodes = examine_nodes(address, directory, count)
    bare = {node.same for node in nodes if not node.project}
    large = {same: reason for same in bare if (reason := too_large(Path.cwd(), directory, same))}
    console = plain_console()
    columns = ("node", "motet, torch, python", "its name means", "cores", "GPUs", "free memory", "directory", "project")
    table = Table(*columns, "gloo round")
    for node in nodes:
        shared = f"{node.free_disk / 2**30:,.1f} GiB free" if node.sees else "not shared"
        gloo = node.gloo if isinstance(node.gloo, str) else f"{1000 * node.gloo:.0f} ms"
        memory = f"{node.free_memory / 2**30:.1f} GiB"
        devices = f"{node.gpus_of_ray} of {node.gpus}"
        project = "there" if node.project else "not copied" if node.same in large else "copied"
        row = (node.address, ", ".join(node.versions), node.name_means, str(node.cores), devices, memory, shared)
        table.add_row(*row, project, gloo)
    print_table(console, table)
    wrong = faults(nodes, directory, large)
    for sentence in wrong:
        console.print(sentence, soft_wrap=True)
    return 1 if wrong else 0


def _wall() -> Table:
    """The result of trying to break out of the wall around processes that score answers or parse other people's data."""
    table = _table("wall around rewards and data of others")
    outcomes = wall.probe()
    held = sum(outcome == "held" for outcome in outcomes.values())
    table.add_row("held", f"{held} of {len(outcomes)} ways out that were tried")
    for what, outcome in outcomes.items():
        if outcome != "held":
            table.add_row(what, outcome)
    for place, reason in wall.left_out().items():
        table.add_row(f"packages in {place}", f"not read: {reason}")
    table.add_row("calls that fail", f"{LOGGED}=1 writes each to the kernel's log: type=1326, with the call's number")
    return table


def _table(title: str, *columns: str) -> Table:
    """A table that takes few lines: a person reads all of them on one screen."""
    form = Table(*columns, title=title, title_justify="left", show_header=bool(columns), box=SIMPLE_HEAD)
    form.padding, form.pad_edge, form.show_edge = (0, 1, 0, 0), False, False
    return form


def _machine() -> Table:
    import torch

    from motet.model.accelerator import gpu_names

    table = _table("machine")
    memory = budgets.available_memory() / 2**30
    table.add_row("motet, python, torch", f"{__version__}, {platform.python_version()}, {torch.__version__}")
    table.add_row("cores, free memory", f"{budgets.cores()}, {memory:.1f} GiB")
    table.add_row("processor", _processor())
    table.add_row("own CPU kernels", _kernels())
    for number, name in enumerate(gpus := gpu_names()):
        table.add_row(f"cuda:{number}", name)
    if gpus:
        table.add_row("own GPU kernels", gpu_kernels())
    if not gpus:
        table.add_row("cuda", "none")
    return table


def _processor() -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() if torch.backends.mkldnn.is_available() else False
    return f"{capability}{', fast bfloat16' if bf16 else ', no bfloat16 in torch'}"


def _kernels() -> str:
    """The form of the C++ kernels in use, why no faster one is, and its highest speed on one core."""
    try:
        native = library.load()
    except ConfigError as error:
        return str(error)
    rates = [f"{name} {native.ceiling(name):,.0f}" for name in library.ARITHMETICS]
    slow = "" if native.multiplies_pairs else " (exact-dpbf16 is emulated here)"
    chosen = f"engine.kernels auto is {of_machine().kernels} for bfloat16"
    return "; ".join([f"{native.form}, {', '.join(rates)} GFLOP/s per core{slow}", chosen, *native.passed_over])


def gpu_kernels() -> str:
    """The version of Triton, which bases its kernels compute, what computes all others, and which cards have run them."""
    try:
        found = f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "Triton is not installed: torch's kernels compute every base"
    chosen = "engine.kernels auto is triton for dense bfloat16 bases that it covers, if they pass the checks at load"
    shown = "no card has run these kernels; a trial program of their ideas ran on an H200 and an H100"
    return f"{found}; {chosen}, and torch for all others; {shown}, with Triton 3.6 and torch 2.11"


def build_kernels() -> int:
    """Compile the C++ kernels into the cache and print the form in use; returns 0 on success, otherwise 1."""
    from motet.kernels.cpu import building

    directory = library.cache_directory()
    try:
        made = building.build(directory)
    except (building.CannotBuild, OSError) as error:
        raise ConfigError(f"the kernels were not compiled: {error}") from error
    console = plain_console()
    for form, why in made.items():
        console.print(f"{form}: {why or directory / building.file_name(form)}", soft_wrap=True)
    library.load.cache_clear()
    console.print(f"own CPU kernels: {_kernels()}", soft_wrap=True)
    return 0


def _decode_rate(base: LoraModel, config: EngineConfig) -> float:
    """Tokens per second of decoding 64 short sequences without adapters."""
    import torch

    from motet.model.attention import Span
    from motet.model.kv_cache import KVCache
    from motet.model.lora import NoAdapters

    rows, steps = 64, 8
    cache = KVCache(rows, config.block_size, base.device)
    places = [(cache.take(1), cache.states.take()) for _ in range(rows)]
    tokens = base.pad(torch.zeros(rows, dtype=torch.long, device=base.device))
    seconds = 0.0
    for position in range(steps):
        started = time.perf_counter()
        attention = base.attention.cached([Span(position, 1, *place) for place in places], cache)
        with torch.no_grad(), base.routed(NoAdapters()):
            positions = torch.full_like(tokens, position)
            tokens = base.logits(base.hidden(tokens, positions, attention)).argmax(-1)
        if position >= 2:
            seconds += time.perf_counter() - started
    return rows * (steps - 2) / seconds
