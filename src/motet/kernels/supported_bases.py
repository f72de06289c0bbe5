"""Decides which bases Motet's kernels compute, hands a loaded base over to them, and proves it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from motet.config.engine import EngineConfig, NamedKernels
from motet.core.errors import BaseModelError
from motet.kernels.cpu import library
from motet.kernels.cpu.base import NativeBase
from motet.kernels.cpu.choice import Choice, for_device
from motet.kernels.cpu.library import ARITHMETICS
from motet.kernels.cpu.plan import GATE_NUMBERS
from motet.kernels.cuda import supported_bases
from motet.model.accelerator import free_memory, give_back, place_of
from motet.model.covered_decoder import angle_bytes, gate_of, refusal_of
from motet.model.load import load_base
from motet.model.lora_model import LoraModel
from motet.model.own_kernels import INSTEAD, compute_by
from motet.model.own_kernels import refusal as refusal_of_all
from motet.model.proof import stay_with_torch
from motet.model.shards import Shards

_TORCH = "torch's kernels compute this base"
_ARITHMETICS = {"native": "exact", "native-dpbf16": "exact-dpbf16"}


def refusal(base: LoraModel) -> str:
    """Why Motet's kernels for CPUs cannot compute a base; empty if they can."""
    if base.device.type != "cpu":
        return f"own kernels run on CPUs, and engine.device is {base.device.type}"
    return refusal_of_all(base) or refusal_of_gate(gate_of(base.model.config.get_text_config()))


def refusal_of_gate(gate: str) -> str:
    """Why the kernels for CPUs cannot compute a gate, by its name in transformers; empty if they can."""
    return "" if gate in GATE_NUMBERS else f"own kernels for CPUs have no gate {gate}"


def check_covered(name: str, config: EngineConfig, model: Any) -> None:
    """Check a transformers configuration before weights are read, if Motet's kernels are selected by name.

    Raises:
        BaseModelError: the kernels cannot compute such a base.
    """
    if config.kernels not in ("auto", "torch") and (reason := refusal_of(model, config.block_size)):
        raise BaseModelError(f"{name}: {reason}; {INSTEAD}")


def chosen(config: EngineConfig, own: Choice | None) -> Choice:
    """The kernels that a configuration selects; `own` is the choice for `auto`, by default the fastest here.

    Raises:
        ConfigError: Motet's kernels are selected but not compiled.
    """
    if config.kernels != "auto":
        choice = Choice(config.kernels)
    else:
        kind = place_of(config.device).type
        if setting := config.excludes("native" if kind == "cpu" else "triton"):  # whatever this machine has
            return Choice("torch", f"{_TORCH}: own ones do not know engine.{setting}")
        choice = for_device(kind, own)
    if choice.kernels not in ("torch", "triton"):
        library.load()
    return choice


def load_as_configured(
    name: str, config: EngineConfig, own: Choice | None = None, *, shards: Shards | None = None
) -> LoraModel:
    """Load and prove a base with the kernels that a configuration selects; `own` as in `chosen`.

    Raises:
        BaseModelError: the base cannot be used; the message says why.
        ConfigError: Motet's kernels are selected but not compiled.
    """
    choice = chosen(config, own)
    loaded = load_base(
        name,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        pack=config.pack_weights,
        base_format=config.base_format,
        trust_remote_code=config.trust_remote_code,
        shards=shards,
        check=lambda model: check_covered(name, config, model),
        leaves=lambda base: choice.kernels != "torch" and not against(base, config),
    )
    hand_over(loaded, config, choice)
    give_back(loaded.device)  # what checks and trials allocated
    return loaded


def against(base: LoraModel, config: EngineConfig) -> str:
    """`refusal`; with `auto`, also features of the base that only torch has."""
    if config.kernels == "auto" and base.quantised:
        return f"its files are quantised ({base.quantised}), and own kernels read whole numbers"
    if config.kernels == "auto" and base.has_experts:
        return "own kernels have no adapters on experts"
    return supported_bases.refusal(base) if base.device.type == "cuda" else refusal(base)


def hand_over(base: LoraModel, config: EngineConfig, choice: Choice) -> None:
    """`compute_with` the chosen kernels. With `auto`, torch computes a base that they cannot; a note says why.

    Raises:
        BaseModelError: `compute_with` failed, for kernels that are selected by name or that jobs began with.
    """
    if config.kernels != "auto":
        compute_with(base, choice.kernels)
    elif choice.kernels == "torch" and not choice.kept:
        base.revise(choice.why)
    elif reason := against(base, config):
        base.revise(f"{_TORCH}: {reason}")
    elif choice.kernels == "torch":
        base.revise(choice.why)
    else:
        arithmetic, info = base.arithmetic, base.info
        if failure := _tried(base, choice):
            base.kernels, base.info = None, info
            base.compute_with(arithmetic)
            stay_with_torch(base, pack=config.pack_weights and not failure.of_memory)
            base.revise(f"{_TORCH}: {failure.why}")


@dataclass(frozen=True)
class _Failure:
    """What is kept of an exception, whose traceback would keep the memory of what failed."""

    why: str
    of_memory: bool


def _tried(base: LoraModel, choice: Choice) -> _Failure | None:
    """Let the chosen kernels compute a base; what failed, if torch may compute it instead."""
    try:
        compute_with(base, choice.kernels)
    except (BaseModelError, OSError, MemoryError) as error:
        if choice.kept:  # torch would give these jobs other bytes
            raise
        return _Failure(str(error) or type(error).__name__, isinstance(error, NoRoom | MemoryError))
    return None


class NoRoom(BaseModelError):
    """There is no memory for a second copy of the weights."""


def check_room(base: LoraModel, free: int) -> None:
    """Check that a packed copy of a base's weights, and tables for its positions, fit into `free` bytes.

    Raises:
        NoRoom: it does not.
    """
    config = base.model.config.get_text_config()
    needed = base.info.n_parameters * base.dtype.itemsize
    needed += angle_bytes(base.decoder, config, base.info.max_positions)
    if needed > free:
        raise NoRoom(
            f"{base.info.name}: own kernels need a copy of the weights, {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB "
            f"of memory are free; {INSTEAD}, and engine.pack_weights to false"
        )


def compute_with(base: LoraModel, kernels: NamedKernels) -> None:
    """Let kernels compute a base's passes; check logits against torch's, and that no row's bits depend on other rows.

    Raises:
        BaseModelError: the kernels cannot compute the base, memory is short, or logits differ from torch's.
        ConfigError: the kernels are not compiled.
    """
    if kernels == "torch":
        return
    if kernels == "triton":
        supported_bases.compute_with(base)
        return
    native = library.load()
    arithmetic = "exact" if base.dtype == torch.float32 else _ARITHMETICS[kernels]
    if reason := refusal(base):
        raise BaseModelError(f"{base.info.name}: {reason}; {INSTEAD}")
    check_room(base, free_memory(base.device))
    compute_by(base, lambda: NativeBase(base, native.calls, ARITHMETICS[arithmetic]), f"motet {arithmetic}")
    if arithmetic == "exact-dpbf16" and not native.multiplies_pairs:
        base.revise("engine.kernels is native-dpbf16, and this processor has no vdpbf16ps: passes are slow")
