"""The structs of `csrc/plan.hpp`, field for field, and the packing of weights into them.

Legend: K inputs, N outputs of a product, R rank, W columns of A.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from motet.model.lora import AdapterLayout, AdapterWeights
from motet.process.allocator import HUGE, huge_memory, memory_again

ALIGNMENT = 64
"""Alignment of packed matrices, in bytes."""
TYPES = {torch.float32: 0, torch.bfloat16: 1}
GATE_NUMBERS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Values of `Gate` in csrc/kernels.hpp, by the names of transformers."""
LINEARS = 4
"""Fused products of a layer: queries, keys and values; attention output; gate and up; down."""


class Weight(ctypes.Structure):
    """A frozen weight, or several fused along their outputs."""

    _fields_ = [
        *((name, c_void_p) for name in ("forward", "rows", "back", "bias")),
        ("k", c_int64),
        ("n", c_int64),
    ]


class Layer(ctypes.Structure):
    """One layer of the decoder."""

    _fields_ = [
        *((name, c_void_p) for name in ("norm_in", "norm_mlp", "norm_attended", "norm_done", "norm_q", "norm_k")),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("linears", Weight * LINEARS),
        ("router", Weight),
        ("experts", c_void_p),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Plan(ctypes.Structure):
    """A base: its shapes, constants and layers."""

    _fields_ = [
        *((name, c_int64) for name in ("n_layers", "width", "heads", "kv_heads", "head_width", "inner", "vocabulary")),
        *((name, c_int64) for name in ("positions", "rotated", "norms_whole", "n_experts", "n_chosen", "among_chosen")),
        *((name, c_int32) for name in ("type", "arithmetic", "gate")),
        *((name, c_float) for name in ("epsilon", "embedding_scale", "residual")),
        ("layers", ctypes.POINTER(Layer)),
        ("norm_out", c_void_p),
        ("embedding", c_void_p),
        ("query_scales", c_void_p),
        ("head", Weight),
    ]


class Part(ctypes.Structure):
    """One adapted layer of a fused product."""

    _fields_ = [(name, c_int64) for name in ("first", "n", "b", "b_back", "flat")]


class Lora(ctypes.Structure):
    """An adapter's matrices on one fused product."""

    _fields_ = [
        *((name, c_int64) for name in ("rank", "columns", "a", "a_back", "flat")),
        ("parts", ctypes.POINTER(Part)),
        ("n_parts", c_int64),
    ]


class Adapter(ctypes.Structure):
    """An adapter's matrices on all fused products."""

    _fields_ = [("linears", ctypes.POINTER(Lora)), ("packed", c_void_p)]


class AdaptedRows(ctypes.Structure):
    """Consecutive rows with one adapter (`Run` in C++)."""

    _fields_ = [
        ("first", c_int64),
        ("last", c_int64),
        ("adapter", ctypes.POINTER(Adapter)),
        ("scaling", c_float),
        ("gradient", c_void_p),
        ("largest", c_void_p),
    ]


class Pass(ctypes.Structure):
    """The arguments of one pass."""

    _fields_ = [
        *((name, c_int64) for name in ("n_rows", "n_spans", "n_writes", "n_runs", "threads")),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("spans", c_void_p),
        ("writes", c_void_p),
        ("runs", ctypes.POINTER(AdaptedRows)),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("n_blocks", c_int64),
        ("block", c_int64),
        ("kept", c_void_p),
        ("recompute", c_int64),
        ("hidden", c_void_p),
    ]


def room(n_bytes: int) -> Tensor:
    """Memory that begins at a multiple of `ALIGNMENT`; large sizes are in huge pages, if Linux has them."""
    if n_bytes < HUGE:
        return torch.empty(n_bytes, dtype=torch.uint8)
    return torch.frombuffer(huge_memory(n_bytes), dtype=torch.uint8)


Matrix = tuple[Tensor, int, int, int, int]
"""A matrix to pack: a tensor, its strides over k and n, k, and n."""


def pack_all(library: ctypes.CDLL, matrices: Sequence[Matrix], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Pack matrices into one buffer; returns it and the address of each."""
    kind = TYPES[dtype]
    sizes = [-(-library.motet_packed_bytes(kind, k, n) // ALIGNMENT) * ALIGNMENT for _, _, _, k, n in matrices]
    memory = room(sum(sizes) + ALIGNMENT)
    address = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    addresses = []
    for (source, stride_k, stride_n, k, n), size in zip(matrices, sizes, strict=True):
        library.motet_pack(TYPES[source.dtype], source.data_ptr(), stride_k, stride_n, k, n, kind, address)
        addresses.append(address)
        address += size
    return memory, addresses


def forth(weight_NK: Tensor) -> Matrix:
    """The weight as packed for x · Wᵀ."""
    n_outputs, n_inputs = weight_NK.shape
    return weight_NK, 1, n_inputs, n_inputs, n_outputs


def back(weight_NK: Tensor) -> Matrix:
    """The weight as packed for gradient · W."""
    n_outputs, n_inputs = weight_NK.shape
    return weight_NK, n_inputs, 1, n_outputs, n_inputs


class PackedLayout:
    """Where the matrices of adapters of one layout are, packed for the kernels."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layout: AdapterLayout,
        places: dict[str, tuple[int, tuple[int, ...]]],
        dtype: torch.dtype,
        *,
        backward: bool,
    ) -> None:
        """`places` maps the leader of fused layers to their linear in the plan, and the outputs of each layer.

        `backward` includes the matrices of the backward pass.
        """
        self.layout, self.backward, self.n_bytes = layout, backward, 0
        n_layers = max(place for place, _ in places.values()) // LINEARS + 1
        self.linears = (Lora * (n_layers * LINEARS))()
        self._memory: list[Any] = []

        def take(k: int, n: int) -> int:
            place, n_bytes = self.n_bytes, library.motet_packed_bytes(TYPES[dtype], k, n)
            self.n_bytes += -(-n_bytes // ALIGNMENT) * ALIGNMENT
            return place

        def both(k: int, n: int) -> tuple[int, int]:
            return take(k, n), take(n, k) if backward else 0

        for group in layout.fused:
            place, sizes = places[group.leader]
            parts = (Part * len(group.members))()
            for part, (index, layer) in zip(parts, group.members, strict=True):
                part.first, part.n, part.flat = sum(sizes[:index]), layer.n_out, layer.offset
                part.b, part.b_back = both(layout.rank, layer.n_out)
            a, a_back = both(group.members[0][1].n_in, group.width)
            self.linears[place] = Lora(layout.rank, group.width, a, a_back, group.offset, parts, len(parts))
            self._memory.append(parts)


class PackedAdapter:
    """An adapter's matrices, packed for the kernels."""

    def __init__(
        self, library: ctypes.CDLL, plan: Plan, weights: AdapterWeights, packed: PackedLayout, threads: int
    ) -> None:
        self._layout = packed
        self._memory = torch.frombuffer(memory_again(packed.n_bytes), dtype=torch.uint8)  # begins at a page
        self.adapter = Adapter(packed.linears, self._memory.data_ptr())
        to = ctypes.byref(plan), ctypes.byref(self.adapter), weights.flat.data_ptr()
        library.motet_pack_adapter(*to, int(packed.backward), threads)
