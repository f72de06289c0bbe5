"""The structs of `csrc/plan.hpp`, field for field, and the packing of weights into them.

Legend: K inputs, N outputs of a product, R rank, W columns of A.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet.model.lora import AdapterWeights
from motet.process.allocator import memory_apart

ALIGNMENT = 64
"""Alignment of packed matrices, in bytes."""
TYPES = {torch.float32: 0, torch.bfloat16: 1}
GATES = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Values of `Gate` in csrc/kernels.hpp, by the names of transformers."""
LINEARS = 4
"""Fused products of a layer: queries, keys and values; attention output; gate and up; down."""

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "kept_bytes": (c_int64, [c_void_p, c_void_p]),
    "scratch_bytes": (c_int64, [c_void_p, c_void_p]),
    "forward": (c_char_p, [c_void_p, c_void_p]),
    "backward": (c_char_p, [c_void_p, c_void_p, c_void_p]),
    "head": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "head_back": (c_char_p, [c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
}


class Calls:
    """The functions of `csrc/plan.hpp` in a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.packed_bytes, self.pack = library.motet_packed_bytes, library.motet_pack  # `native.library` declares them
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, f"motet_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    packed_bytes: Callable[..., int]
    pack: Callable[..., None]
    kept_bytes: Callable[..., int]
    scratch_bytes: Callable[..., int]
    forward: Callable[..., bytes | None]
    backward: Callable[..., bytes | None]
    head: Callable[..., bytes | None]
    head_back: Callable[..., bytes | None]


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
        *(
            (name, c_int64)
            for name in (
                "n_layers",
                "width",
                "heads",
                "kv_heads",
                "head_width",
                "inner",
                "vocabulary",
                "positions",
                "rotated",
                "norms_whole",
                "n_experts",
                "n_chosen",
                "among_chosen",
            )
        ),
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

    _fields_ = [("first", c_int64), ("n", c_int64), ("b", c_void_p), ("b_back", c_void_p), ("gradient", c_int64)]


class Lora(ctypes.Structure):
    """An adapter's matrices on one fused product."""

    _fields_ = [
        ("rank", c_int64),
        ("columns", c_int64),
        ("a", c_void_p),
        ("a_back", c_void_p),
        ("gradient", c_int64),
        ("parts", ctypes.POINTER(Part)),
        ("n_parts", c_int64),
    ]


class Adapter(ctypes.Structure):
    """An adapter's matrices on all fused products."""

    _fields_ = [("linears", ctypes.POINTER(Lora))]


class AdaptedRows(ctypes.Structure):
    """Consecutive rows with one adapter (`Run` in C++)."""

    _fields_ = [
        ("first", c_int64),
        ("last", c_int64),
        ("adapter", ctypes.POINTER(Adapter)),
        ("scaling", c_float),
        ("gradient", c_void_p),
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


_HUGE = 4 << 20
"""Bytes from which memory is requested in huge pages."""


def room(n_bytes: int) -> Tensor:
    """Memory that begins at a multiple of `ALIGNMENT`; large sizes are in huge pages, if Linux has them."""
    if n_bytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(n_bytes, dtype=torch.uint8)
    memory = memory_apart(n_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


Matrix = tuple[Tensor, int, int, int, int]
"""A matrix to pack: a tensor, its strides over k and n, k, and n."""


def pack_all(library: Calls, matrices: Sequence[Matrix], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Pack matrices into one buffer; returns it and the address of each."""
    kind = TYPES[dtype]
    sizes = [-(-library.packed_bytes(kind, k, n) // ALIGNMENT) * ALIGNMENT for _, _, _, k, n in matrices]
    memory = room(sum(sizes) + ALIGNMENT)
    address = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    addresses = []
    for (source, stride_k, stride_n, k, n), size in zip(matrices, sizes, strict=True):
        library.pack(TYPES[source.dtype], source.data_ptr(), stride_k, stride_n, k, n, kind, address)
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


@dataclass
class PackedAdapter:
    """An adapter's matrices, packed for the kernels."""

    adapter: Adapter
    backward: bool
    """Whether it includes the matrices of the backward pass."""
    memory: list[Any] = field(default_factory=list)
    """Keeps alive what `adapter` points to."""

    @classmethod
    def of(
        cls,
        library: Calls,
        weights: AdapterWeights,
        places: dict[str, tuple[int, tuple[int, ...]]],
        *,
        backward: bool,
    ) -> PackedAdapter:
        """`places` maps the leader of fused layers to their linear in the plan, and the outputs of each layer."""
        rank = weights.layout.rank
        matrices: list[Matrix] = []
        for group in weights.layout.fused:
            own = weights.matrices[group.leader]
            for matrix_KN in (own.a, *(b for _, b in own.bs)):
                n_inputs, n_outputs = matrix_KN.shape
                matrices.append((matrix_KN, n_outputs, 1, n_inputs, n_outputs))
                if backward:
                    matrices.append((matrix_KN, 1, n_outputs, n_outputs, n_inputs))
        memory, addresses = pack_all(library, matrices, weights.flat.dtype)
        given = iter(addresses)
        n_layers = max(place for place, _ in places.values()) // LINEARS + 1
        loras = (Lora * (n_layers * LINEARS))()
        kept: list[Any] = [memory, loras]
        for group in weights.layout.fused:
            place, sizes = places[group.leader]
            a, a_back = next(given), next(given) if backward else 0
            parts = (Part * len(group.members))()
            for part, (index, layer) in zip(parts, group.members, strict=True):
                b, b_back = next(given), next(given) if backward else 0
                part.first, part.n, part.gradient = sum(sizes[:index]), layer.n_out, layer.offset
                part.b, part.b_back = b, b_back
            loras[place] = Lora(rank, group.width, a, a_back, group.offset, parts, len(parts))
            kept.append(parts)
        return cls(Adapter(loras), backward, kept)
