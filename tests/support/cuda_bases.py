"""Tiny bases that Motet's kernels for GPUs compute, here in Triton's interpreter unless there is a GPU."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.cuda.adapters import AdapterGroup, AdapterTables, piece_of
from motet.cuda.base import CudaBase
from motet.cuda.launches import called
from motet.cuda.products import ProductWeight
from motet.model.lora_model import LoraModel
from tests.support import tiny_models as tiny

DEVICE = tests.support.triton_on_cpu.DEVICE
DENSE = (
    "llama", "llama_biased", "qwen2", "qwen2_linear", "qwen3", "qwen3_wide", "qwen3_vl", "gemma", "gemma2", "gemma3",
    "gemma3_mixed", "mistral", "ministral", "ministral3", "phi3", "granite", "olmo2", "olmo3", "exaone4", "seed_oss",
    "smollm3", "vaultgemma",
)  # fmt: skip
"""One for each dense family that is covered, and some for settings of theirs."""
GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that are one in Phi-3."""


class RowByRow:
    """Products by torch, a row at a time."""

    def multiply(
        self,
        x_TK: Tensor,
        weight: ProductWeight,
        y_TN: Tensor,
        adapters: tuple[AdapterTables, AdapterGroup] | None = None,
    ) -> None:
        called("multiply")
        weight_KN = weight.weight_NK.float().t()
        for x, y in zip(x_TK.float(), y_TN, strict=True):
            y.copy_(x @ weight_KN if weight.bias_N is None else x @ weight_KN + weight.bias_N.float())
        if adapters is not None:
            self._shrink(x_TK, *adapters)

    def _shrink(self, x_TK: Tensor, tables: AdapterTables, group: AdapterGroup) -> None:
        n_inputs = x_TK.shape[1]
        piece = piece_of(n_inputs)
        for slot, *rows in tables.tiles_N17[: int(tables.n_tiles)].tolist():
            address, width, *_ = [0, 0] if slot < 0 else group.entries_SC[slot].tolist()
            if not address:
                continue
            numbers = (ctypes.c_float * (n_inputs * width)).from_address(address)
            a_KW = torch.frombuffer(numbers, dtype=torch.float32).view(n_inputs, width)
            for row in (row for row in rows if row >= 0):
                for index, first in enumerate(range(0, n_inputs, piece)):
                    part = slice(first, first + piece)
                    group.inner[index, row, :width] = x_TK[row, part].float() @ a_KW[part]

    def back(self, slope_TN: Tensor, weight: ProductWeight) -> Tensor:
        return slope_TN @ weight.weight_NK


def load(name: str) -> LoraModel:
    """A base of its own."""
    base = tiny.load(name)
    base.kernels = own = CudaBase(base, RowByRow())  # type: ignore[arg-type]
    base.attention = own.attention
    return base


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
