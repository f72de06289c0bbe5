"""Tiny bases that Motet's kernels for GPUs compute, here in Triton's interpreter unless there is a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace

import tests.support.triton_on_cpu
from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.product_backends import table_for
from motet.kernels.cuda.products import Products
from motet.model.lora_model import LoraModel
from tests.support import tiny_models as tiny

DEVICE = tests.support.triton_on_cpu.DEVICE
DENSE = (
    "llama", "llama_biased", "qwen2", "qwen2_linear", "qwen3", "qwen3_wide", "qwen3_vl", "gemma", "gemma2", "gemma3",
    "gemma3_mixed", "mistral", "ministral", "ministral3", "phi3", "granite", "olmo2", "olmo3", "exaone4", "seed_oss",
    "smollm3", "vaultgemma", "llama_long",
)  # fmt: skip
"""One for each dense family that is covered, and some for settings of theirs; the last has one layer, and is fast here."""
GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that are one in Phi-3."""


def load(name: str) -> LoraModel:
    """A base of its own."""
    base = tiny.load(name, device=DEVICE.type)
    base.compute_with(replace(base.arithmetic, rows=1))
    base.kernels = own = CudaBase(base, lambda _: Products(table_for(base.device, base.dtype)))
    base.attention = own.attention
    return base


def by_torch(name: str) -> LoraModel:
    """A base that torch computes, of a type that the kernels are used for."""
    return tiny.load(name, "bfloat16" if DEVICE.type == "cuda" else "float32", DEVICE.type)


@functools.cache
def base(name: str) -> LoraModel:
    """A base that tests share and leave as it is."""
    return load(name)


def own(base: LoraModel) -> CudaBase:
    """Its kernels."""
    assert isinstance(base.kernels, CudaBase)
    return base.kernels


def targets(base: LoraModel, *names: str) -> list[str]:
    """Target modules by the names of Llama."""
    there = {path.rpartition(".")[2] for path in base.linears}
    of_phi = {part: whole for whole, parts in GROUPS.items() for part in parts}
    return sorted({name if name in there else of_phi[name] for name in names})
