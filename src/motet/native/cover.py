"""Which bases own kernels compute, and how one that torch computed is handed to them and proved again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from motet.config.engine import EngineConfig, NamedKernels
from motet.errors import BaseModelError
from motet.model.exactness import check_exactness, packed_logits
from motet.model.load import place_of
from motet.model.lora import NoAdapters
from motet.model.lora_model import LoraModel
from motet.model.proof import LENGTHS, TOLERANCE, stay_with_torch
from motet.native import library
from motet.native.base import NativeBase
from motet.native.choice import Choice, of_machine
from motet.native.library import ARITHMETICS
from motet.native.plan import Calls

_TORCH = "torch's kernels compute this base"
_ARITHMETICS = {"native": "exact", "native-dpbf16": "exact-dpbf16"}

_DECODERS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Decoders of transformers whose layers the plan has."""


def refusal(base: LoraModel) -> str:
    """Why own kernels do not compute a base; empty where they do."""
    decoder: Any = base.decoder
    config = base.model.config.get_text_config()
    kind = type(decoder).__name__
    if base.device.type != "cpu":
        return f"own kernels run on CPUs, and engine.device is {base.device.type}"
    if base.shards is not None:
        return "own kernels do not compute a base in shards"
    if kind not in _DECODERS or base.experts or base.stateful:
        return f"own kernels compute {', '.join(_DECODERS)}, and this is {kind}"
    if config.hidden_act != "silu":
        return f"own kernels know silu, and this base has {config.hidden_act}"
    first = decoder.layers[0]
    attention, mlp = first.self_attn, first.mlp
    families = [
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    ]
    if any({layer.fused.paths for layer in family} != {tuple(layer.path for layer in family)} for family in families):
        return "own kernels need queries, keys and values in one product, and gate and up in another"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % 16:
        return f"own kernels need heads of a multiple of 16 numbers, and these have {width}"
    if config.num_attention_heads > 64 * config.num_key_value_heads:
        return "own kernels take at most 64 query heads for each of keys"
    if base.block_size % 16:
        return f"own kernels need KV blocks of a multiple of 16 tokens, and these have {base.block_size}"
    if first.self_attn.q_proj.out_features != config.num_attention_heads * width:
        return "queries have another width than the heads"
    return ""


def chosen(config: EngineConfig, own: Choice | None) -> Choice:
    """What computes the base, where own kernels cover it; `own` is what `auto` is, the fastest here by default.

    Raises:
        ConfigError: they are to, and are not compiled.
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


def against(base: LoraModel, config: EngineConfig) -> str:
    """`refusal`, and where nobody names own kernels, also that they keep no weights as they are stored."""
    if config.kernels == "auto" and base.quantised:
        return f"its files are quantised ({base.quantised}), and own kernels read whole numbers"
    return refusal(base)


def hand_over(base: LoraModel, config: EngineConfig, choice: Choice) -> None:
    """`compute_with` what was chosen; where `auto` chose and they do not cover the base, torch computes, and a note says why.

    Raises:
        BaseModelError: they are asked for by name and do not cover it, or logits differ from torch's.
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
        except BaseModelError as error:
            base.kernels = None
            base.read_keys_in_blocks(base.block_size)
            stay_with_torch(base, pack=config.pack_weights)
            base.revise(f"{_TORCH}: {error}")


@torch.no_grad()
def compute_with(base: LoraModel, kernels: NamedKernels) -> None:
    """Hand a base's passes to the kernels of a setting, and prove that they compute the same, in bits that no company changes.

    Raises:
        BaseModelError: they do not cover it, or logits differ from torch's.
        ConfigError: they are not compiled.
    """
    if kernels == "torch":
        return
    native = library.load()
    arithmetic = "exact" if base.dtype == torch.float32 else _ARITHMETICS[kernels]
    if reason := refusal(base):
        raise BaseModelError(f"{base.info.name}: {reason}; set engine.kernels to torch")
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, base.info.vocab_size, (length,), generator=generator) for length in LENGTHS]
    with base.routed(NoAdapters()):
        theirs = packed_logits(base, sequences)[0]
    base.kernels = NativeBase(base, Calls(native.calls), ARITHMETICS[arithmetic])
    base.attention = base.kernels.attention
    with base.routed(NoAdapters()):
        ours = packed_logits(base, sequences)[0]
        largest = max(float(logits.abs().max()) for logits in theirs)
        gap = max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
        if not gap <= TOLERANCE[base.dtype] * largest:
            raise BaseModelError(
                f"{base.info.name}: logits of own kernels differ from torch's by {gap:.3g} (largest logit {largest:.3g}); "
                "set engine.kernels to torch"
            )
        notes = tuple(note for note in base.info.notes if note != base.info.inexact)
        base.info = replace(base.info, notes=notes, inexact="", processor=f"motet {arithmetic}")
        check_exactness(base, sequences)
    if arithmetic == "exact-dpbf16" and not native.multiplies_pairs:
        base.revise("engine.kernels is native-dpbf16, and this processor has no vdpbf16ps: passes are slow")
