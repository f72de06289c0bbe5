"""Decides which bases Motet's kernels compute, hands a loaded base over to them, and proves it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from motet.config.engine import EngineConfig, NamedKernels
from motet.core.errors import BaseModelError
from motet.model.accelerator import free_memory, place_of
from motet.model.covered_decoder import angle_bytes, linears_of, refusal_of
from motet.model.exactness import check_exactness, packed_logits
from motet.model.load import load_base
from motet.model.lora import NoAdapters
from motet.model.lora_model import LoraModel
from motet.model.packed import PackedExperts
from motet.model.proof import LENGTHS, TOLERANCE, stay_with_torch
from motet.model.shards import Shards
from motet.native import library
from motet.native.base import NativeBase
from motet.native.choice import Choice, of_machine
from motet.native.library import ARITHMETICS

_INSTEAD = "set engine.kernels to torch"
_TORCH = "torch's kernels compute this base"
_ARITHMETICS = {"native": "exact", "native-dpbf16": "exact-dpbf16"}


def refusal(base: LoraModel) -> str:
    """Why Motet's kernels cannot compute a base; empty if they can."""
    if base.device.type != "cpu":
        return f"own kernels run on CPUs, and engine.device is {base.device.type}"
    if base.shards is not None:
        return "own kernels do not compute a base in shards"
    if reason := refusal_of(base.model.config, base.block_size):
        return reason
    if base.info.max_positions < max(LENGTHS):
        return f"own kernels are proved on {max(LENGTHS)} tokens, and this base takes {base.info.max_positions}"
    families = [family for layer in base.decoder.layers for family in linears_of(layer)]  # type: ignore[union-attr]
    if any({layer.fused.paths for layer in family} != {tuple(layer.path for layer in family)} for family in families):
        return "own kernels need queries, keys and values in one product, and gate and up in another"
    if any(isinstance(module, PackedExperts) for module in base.model.modules()):
        return "own kernels need experts that are not packed: set engine.base_format to unpacked"
    return ""


def check_covered(name: str, config: EngineConfig, model: Any) -> None:
    """Check a transformers configuration before weights are read, if Motet's kernels are selected by name.

    Raises:
        BaseModelError: the kernels cannot compute such a base.
    """
    if config.kernels not in ("auto", "torch") and (reason := refusal_of(model, config.block_size)):
        raise BaseModelError(f"{name}: {reason}; {_INSTEAD}")


def chosen(config: EngineConfig, own: Choice | None) -> Choice:
    """The kernels that a configuration selects; `own` is the choice for `auto`, by default the fastest here.

    Raises:
        ConfigError: Motet's kernels are selected but not compiled.
    """
    if config.kernels != "auto":
        choice = Choice(config.kernels)
    elif place_of(config.device).type != "cpu":
        return Choice("torch")
    elif setting := config.without_own_kernels:
        return Choice("torch", f"{_TORCH}: own ones do not know engine.{setting}")
    else:
        choice = own or of_machine()
    if choice.kernels != "torch":
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
        numerics=config.numerics,
        base_format=config.base_format,
        trust_remote_code=config.trust_remote_code,
        shards=shards,
        check=lambda model: check_covered(name, config, model),
        leaves=lambda base: choice.kernels != "torch" and not against(base, config),
    )
    hand_over(loaded, config, choice)
    return loaded


def against(base: LoraModel, config: EngineConfig) -> str:
    """`refusal`; with `auto`, also features of the base that only torch has."""
    if config.kernels == "auto" and base.quantised:
        return f"its files are quantised ({base.quantised}), and own kernels read whole numbers"
    if config.kernels == "auto" and base.has_experts:
        return "own kernels have no adapters on experts"
    return refusal(base)


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
        try:
            compute_with(base, choice.kernels)
        except (BaseModelError, OSError, MemoryError) as error:
            if choice.kept:  # torch would give these jobs other bytes
                raise
            base.kernels = None
            base.read_keys_in_blocks(base.block_size)
            stay_with_torch(base, pack=config.pack_weights and not isinstance(error, NoRoom | MemoryError))
            base.revise(f"{_TORCH}: {error}")


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
            f"of memory are free; {_INSTEAD}, and engine.pack_weights to false"
        )


@torch.no_grad()
def compute_with(base: LoraModel, kernels: NamedKernels) -> None:
    """Let kernels compute a base's passes; check logits against torch's, and that no row's bits depend on other rows.

    Raises:
        BaseModelError: the kernels cannot compute the base, memory is short, or logits differ from torch's.
        ConfigError: the kernels are not compiled.
    """
    if kernels == "torch":
        return
    native = library.load()
    arithmetic = "exact" if base.dtype == torch.float32 else _ARITHMETICS[kernels]
    if reason := refusal(base):
        raise BaseModelError(f"{base.info.name}: {reason}; {_INSTEAD}")
    check_room(base, free_memory(base.device))
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, base.info.vocab_size, (length,), generator=generator) for length in LENGTHS]
    with base.routed(NoAdapters()):
        theirs = base.changes.of_tokens(torch.cat(packed_logits(base, sequences)[0]))
    base.kernels = NativeBase(base, native.calls, ARITHMETICS[arithmetic])
    base.attention = base.kernels.attention
    with base.routed(NoAdapters()):
        ours = base.changes.of_tokens(torch.cat(packed_logits(base, sequences)[0]))
        gaps_N = (ours - theirs).square().mean(-1)
        choosy = base.has_experts and base.dtype == torch.bfloat16  # rounding may send a row to another expert
        gap = float(((gaps_N.median() if choosy else gaps_N.mean()) / theirs.square().mean()).sqrt())
        if not gap <= TOLERANCE[base.dtype]:
            raise BaseModelError(
                f"{base.info.name}: logits of own kernels differ from torch's by {gap:.1%} of their size; {_INSTEAD}"
            )
        if base.has_experts:
            base.revise(experts=(), experts_idle="own kernels have no adapters on experts")
        notes = tuple(note for note in base.info.notes if note != base.info.inexact)
        base.info = replace(base.info, notes=notes, inexact="", processor=f"motet {arithmetic}")
        check_exactness(base, sequences)
    if arithmetic == "exact-dpbf16" and not native.multiplies_pairs:
        base.revise("engine.kernels is native-dpbf16, and this processor has no vdpbf16ps: passes are slow")
