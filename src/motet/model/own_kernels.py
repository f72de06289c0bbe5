"""Hands the passes of a loaded base over to Motet's own kernels, and proves it again; the same for CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from motet.core.errors import BaseModelError
from motet.model.covered_decoder import linears_of, refusal_of
from motet.model.exactness import check_exactness, packed_logits
from motet.model.lora import NoAdapters
from motet.model.lora_model import Kernels, LoraModel
from motet.model.packed import PackedExperts
from motet.model.reference_model import LENGTHS
from motet.model.tolerance import judge

INSTEAD = "set engine.kernels to torch"


def refusal(base: LoraModel) -> str:
    """Why no kernels of Motet's own can compute a base; empty if some can."""
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


@torch.no_grad()
def compute_by(base: LoraModel, kernels: Callable[[], Kernels], processor: str) -> None:
    """Let kernels compute a base's passes; check logits against torch's, and that no row's bits depend on other rows.

    Raises:
        BaseModelError: logits differ from torch's.
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, base.info.vocab_size, (length,), generator=generator).to(base.device) for length in LENGTHS
    ]
    with base.routed(NoAdapters()):
        theirs = torch.cat(packed_logits(base, sequences)[0])
    base.kernels = kernels()
    base.attention = base.kernels.attention
    with base.routed(NoAdapters()):
        verdict = judge(base, torch.cat(packed_logits(base, sequences)[0]), theirs, chosen_anew=True)
        if not verdict.close:
            raise BaseModelError(f"{base.info.name}: logits of own kernels differ from torch's by {verdict}; {INSTEAD}")
        if base.has_experts:
            base.revise(experts=(), experts_idle="own kernels have no adapters on experts")
        notes = tuple(note for note in base.info.notes if note != base.info.inexact)
        base.info = replace(base.info, notes=notes, inexact="", processor=processor)
        check_exactness(base, sequences)
