"""Attention as Triton kernels: one launch for all sequences of a pass, for sampling and training alike.

A row depends only on its own sequence, by the rules of `torch_attention`:

* one program processes a tile of one sequence's queries and reads that sequence's keys in blocks of a fixed size, in
  order; a fully hidden block leaves a row's results unchanged, so blocks may be skipped;
* tiles have the same size in decoding and training, and values that differ between the two (strides, block size, window)
  are arguments, never compiled in, so both use the same machine code;
* hidden scores and weights are replaced, and keys after the tile's last query are never read, so another tenant's Inf or
  NaN cannot spread.

The softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022), and the backward pass recomputes the
weights from the logarithms of the row sums. There are no atomic additions.

With TRITON_INTERPRET=1 in the environment when this module is imported, the kernels run on a CPU, slowly.

Legend: T packed rows, H query heads, K KV heads, G = H / K, E head width, R = rows of a tile (query r // G, head r %
G), C keys of a block, S sequences, L entries of a key table, N tiles, M blocks of keys, P places among padded keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.model.accelerator import device_of
from motet.model.attention import triton_kernels
from motet.model.attention.backend import LayerCall, Prefix, Span
from motet.model.attention.triton_metadata import (
    TILE_KEYS,
    TILE_ROWS,
    TritonMetadata,
    cached_metadata,
    packed_metadata,
)
from motet.model.kv_cache import KVCache

NO_WINDOW = 1 << 30
"""More keys than any sequence has."""

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class _KernelCall:
    """Kernel arguments of a layer's call."""

    metadata: TritonMetadata
    scaling: float
    window: int
    softcap: float
    """0 disables it."""
    sinks_H: Tensor | None


@dataclass
class TritonPass:
    """An `AttentionPass`; with a cache also a `ReplayablePass`."""

    metadata: TritonMetadata
    calls: list[LayerCall] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Device memory that a replay reads; copy `values` into it first."""
        return self.metadata.tensors

    def values(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """New contents of the tensors, on the host, for the same number of other spans."""
        metadata = self.metadata
        assert metadata.cache is not None
        return cached_metadata(spans, metadata.cache, torch.device("cpu"), metadata.keys_SL.shape[1]).tensors

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Causal attention [T, H, E] of one layer, with gradients if there is no cache; padding rows are zeros.

        Raises:
            ValueError: more query heads share a KV head than a tile has rows.
        """
        window = NO_WINDOW if call.window is None else min(call.window, NO_WINDOW)
        compiled = _KernelCall(self.metadata, call.scaling, window, call.softcap or 0.0, call.sinks_H)
        with device_of(query_THE):
            if self.metadata.cache is not None:
                return _through_cache(query_THE, key_TKE, value_TKE, compiled, call.layer)
            output: Tensor = _PackedAttention.apply(query_THE, key_TKE, value_TKE, compiled)  # type: ignore[no-untyped-call]
            return output


class TritonAttention:
    """An `AttentionBackend` with Triton kernels."""

    fixed_shapes = True
    reads_past_end = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> TritonPass:
        """A pass over whole sequences."""
        return TritonPass(packed_metadata(lengths, self._device, prefixes))

    def cached(self, spans: Sequence[Span], cache: KVCache) -> TritonPass:
        """A pass over spans whose keys and values go to a cache."""
        return TritonPass(cached_metadata(spans, cache, self._device))

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> TritonPass:
        """`cached` for sequences that may grow to `least_blocks` blocks."""
        return TritonPass(cached_metadata(spans, cache, self._device, least_blocks))


def _through_cache(query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, call: _KernelCall, layer: int) -> Tensor:
    metadata = call.metadata
    assert metadata.cache is not None and metadata.writes is not None
    key_pool, value_pool = metadata.cache.write(layer, metadata.writes, key_TKE, value_TKE)
    n_heads, fold = query_THE.shape[1], query_THE.shape[1] // key_TKE.shape[1]
    output_THE = query_THE.new_zeros(query_THE.shape)
    log_sum_TH = query_THE.new_empty(len(query_THE), n_heads, dtype=torch.float32)
    query_THE = _readable(query_THE)
    # [blocks, K, C, E]: strides of a block, a head and a place in the block
    places = (*_units(key_pool)[:3], *_units(value_pool)[:3])
    _launch(call, query_THE, (key_pool, value_pool), places, fold, output_THE, log_sum_TH, metadata.cache.block_size)
    return output_THE


class _PackedAttention(torch.autograd.Function):
    """Attention among the rows of one packed batch: [T, H, E], [T, K, E], [T, K, E] → [T, H, E]."""

    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, call: _KernelCall) -> Tensor:
        query_THE, key_TKE, value_TKE = (_readable(states) for states in (query_THE, key_TKE, value_TKE))
        n_rows, n_heads, _ = query_THE.shape
        fold = n_heads // key_TKE.shape[1]
        output_THE = query_THE.new_empty(query_THE.shape)
        log_sum_TH = query_THE.new_empty(n_rows, n_heads, dtype=torch.float32)
        _launch(call, query_THE, (key_TKE, value_TKE), _row_places(key_TKE, value_TKE), fold, output_THE, log_sum_TH, 1)
        ctx.call = call
        ctx.save_for_backward(query_THE, key_TKE, value_TKE, output_THE, log_sum_TH)
        return output_THE

    @staticmethod
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_THE, key_TKE, value_TKE, output_THE, log_sum_TH = ctx.saved_tensors
        with device_of(grad_THE):
            return (*_backward(ctx.call, query_THE, key_TKE, value_TKE, output_THE, log_sum_TH, grad_THE), None)


# --- launching --------------------------------------------------------------------------------------------------------


def _unit(width: int) -> int:
    """A power of two that divides the width. Strides are passed in this unit, so that the compiler knows a divisor."""
    return min(width & -width, 16)


def _readable(states: Tensor) -> Tensor:
    """Copy the states if needed: heads contiguous, strides multiples of the unit, aligned to 16 bytes."""
    *strides, last = states.stride()
    unit = _unit(states.shape[-1])
    if last == 1 and not any(stride % unit for stride in strides) and states.data_ptr() % 16 == 0:
        return states
    return states.clone(memory_format=torch.contiguous_format)


def _units(states: Tensor) -> tuple[int, ...]:
    """Strides in units."""
    unit = _unit(states.shape[-1])
    return tuple(stride // unit for stride in states.stride())


def _row_places(*states_TKE: Tensor) -> tuple[int, ...]:
    """Strides of a block (one packed row), a head, and a position in the block."""
    return tuple(stride for states in states_TKE for stride in (*_units(states)[:2], 0))


def _options(query_THE: Tensor, fold: int, softcap: float, narrow: int = 128, smaller: str = "") -> dict[str, Any]:
    """Compile-time options, which depend only on the model's shape and dtype.

    Up to `narrow` lanes of two bytes (64 with a soft cap) fit into the registers of four warps if no lane is masked.
    256 lanes fit into those of eight warps if the `smaller` side of a tile (ROWS or KEYS) is halved.
    """
    width = query_THE.shape[-1]
    lanes = max(16, triton.next_power_of_2(width))
    sides = {"ROWS": TILE_ROWS, "KEYS": TILE_KEYS}
    if lanes > 128 and smaller and fold <= sides[smaller] // 2:  # a tile holds at least one query
        sides[smaller] //= 2
    four = lanes <= min(narrow, 64 if softcap else 128) and width == lanes and query_THE.element_size() == 2
    return {
        "FOLD": fold,
        "STEP": sides["ROWS"] // fold,
        "WIDTH": width,
        "LANES": lanes,
        "UNIT": _unit(width),
        "SOFTCAP": softcap,
        **sides,
        "WIDEN": _INTERPRETED and query_THE.dtype != torch.float32,
        "num_warps": 4 if four else 8,
        "num_stages": 2 if sides["KEYS"] * lanes * query_THE.element_size() <= 16384 else 1,
        "enable_fp_fusion": False,
    }


def _launch(
    call: _KernelCall,
    query_THE: Tensor,
    keys_values: tuple[Tensor, Tensor],
    places: tuple[int, ...],
    fold: int,
    output_THE: Tensor,
    log_sum_TH: Tensor,
    block_size: int,
) -> None:
    """Fill the output and the logarithms of the weight sums; `places` are the strides of keys and values, in units."""
    metadata, tiles = call.metadata, call.metadata.tiles(fold)
    sinks = query_THE if call.sinks_H is None else call.sinks_H  # the kernel ignores this placeholder
    triton_kernels.forward[(len(tiles.sequence_N), query_THE.shape[1] // fold)](
        query_THE, *keys_values, output_THE, log_sum_TH, sinks, *metadata.sequences, tiles.sequence_N, tiles.query_N,
        call.scaling, call.window, metadata.keys_SL.shape[1], query_THE.shape[1], *_units(query_THE)[:2], block_size, *places,
        SINKS=call.sinks_H is not None, **_options(query_THE, fold, call.softcap),
    )  # fmt: skip


def _backward(
    call: _KernelCall,
    query_THE: Tensor,
    key_TKE: Tensor,
    value_TKE: Tensor,
    output_THE: Tensor,
    log_sum_TH: Tensor,
    grad_THE: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    n_heads, (n_rows, n_kv, width) = query_THE.shape[1], key_TKE.shape
    fold = n_heads // n_kv
    metadata, tiles, blocks = call.metadata, call.metadata.tiles(fold), call.metadata.key_blocks
    grad_THE = _readable(grad_THE)
    states = (query_THE, key_TKE, value_TKE)
    strides = tuple(stride for each in (query_THE, grad_THE, key_TKE, value_TKE) for stride in _units(each)[:2])
    sizes = (call.scaling, call.window, metadata.keys_SL.shape[1], n_heads, *strides)
    common_TH, grad_query_THE = torch.empty_like(log_sum_TH), query_THE.new_empty(query_THE.shape)
    triton_kernels.query_gradients[(len(tiles.sequence_N), n_kv)](
        *states, output_THE, grad_THE, log_sum_TH, common_TH, grad_query_THE, *metadata.sequences,
        tiles.sequence_N, tiles.query_N, *sizes, **_options(query_THE, fold, call.softcap, smaller="KEYS"),
    )  # fmt: skip
    n_blocks = len(blocks.sequence_M)
    sums_2PKE = query_THE.new_empty(2, n_blocks * TILE_KEYS, n_kv, width, dtype=torch.float32)
    triton_kernels.key_gradients[(n_blocks, n_kv)](
        *states, grad_THE, log_sum_TH, common_TH, *sums_2PKE, *metadata.sequences,
        blocks.sequence_M, blocks.key_M, *sizes, **_options(query_THE, fold, call.softcap, narrow=64, smaller="ROWS"),
    )  # fmt: skip
    grad_key_TKE, grad_value_TKE = (each.new_empty(each.shape) for each in (key_TKE, value_TKE))
    columns = n_kv * width
    triton_kernels.collect[(n_rows, triton.cdiv(columns, 512))](
        *sums_2PKE, grad_key_TKE, grad_value_TKE, blocks.readers_T, blocks.places_P, columns,
        CHUNK=512, enable_fp_fusion=False,
    )  # fmt: skip
    return grad_query_THE, grad_key_TKE, grad_value_TKE
