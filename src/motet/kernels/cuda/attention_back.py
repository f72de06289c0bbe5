"""Gradients of a packed pass's attention, in two launches, and one more where prefixes were copied.

Keys that several sequences share are in one place, whose gradient is the sum over the sequences in their order. No number of
a sequence depends on other sequences, except those that share a prefix with it.

Legend: T packed rows, H query heads, K KV heads, E head width, I items, U users of a block, P places, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.kernels.cuda.attention import NO_WINDOW, CudaPass, tiles
from motet.kernels.cuda.kernels import attention_back as kernels
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.packed_blocks import PackedBlocks, packed_blocks
from motet.model.accelerator import send
from motet.model.attention import LayerCall

ROWS = 64
"""Folded rows of a tile."""


@dataclass(frozen=True)
class Copies:
    """Places with copies, each with its copies together."""

    sources_P: Tensor
    starts_P1: Tensor
    """Where each source's copies begin among the targets, and their number at the end."""
    targets_C: Tensor

    @classmethod
    def of(cls, blocks: PackedBlocks, device: torch.device) -> Copies | None:
        """None if there are none."""
        if not len(blocks.sources_C):
            return None
        order = np.argsort(blocks.sources_C, kind="stable")
        sources, firsts = np.unique(blocks.sources_C[order], return_index=True)
        starts = np.append(firsts, len(order))
        return cls(*send(device, sources, starts, blocks.targets_C[order]))


@dataclass(frozen=True)
class AttentionBack:
    """What all layers of a backward pass share."""

    attention: CudaPass
    queries_I8: Tensor
    """int32 items of `motet.kernels.cuda.attention`."""
    items_I5: Tensor
    """int32: block, first position, number of keys, first user, end of the users."""
    users_U3: Tensor
    """int32: first row, number of rows, position of the first row."""
    copies: Copies | None

    @classmethod
    def of(cls, attention: CudaPass, width: int, fold: int) -> AttentionBack:
        """Those of a pass without a cache, whose heads have this width; `fold` query heads share a KV head."""
        lengths, prefixes = attention.sequences
        size, device = attention.backend.block_size, attention.positions_T.device
        blocks = packed_blocks(lengths, prefixes or [None] * len(lengths), size)
        items, users = _keys(blocks, attention.spans.tolist(), size, _keys_of(attention, width))
        items_I5, users_U3 = send(device, np.array(items, np.int32), np.array(users, np.int32))
        queries_I8 = tiles(attention.spans, _rows(width, fold) // fold, device).items_I8
        return cls(attention, queries_I8, items_I5, users_U3, Copies.of(blocks, device))

    def gradients(
        self, call: LayerCall, query_THE: Tensor, keys: Tensor, values: Tensor, out_THE: Tensor, slope_THE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries [T, H, E], and of keys and values, fp32 in pools like theirs; `slope_THE` is of the output."""
        attention = self.attention
        (n_rows, n_heads, width), kv_heads = query_THE.shape, keys.shape[1]
        fold = n_heads // kv_heads
        shape = {
            "KV_HEADS": kv_heads, "FOLD": fold, "WIDTH": width, "LANES": max(16, triton.next_power_of_2(width)),
            "BLOCK": attention.backend.block_size, "KEYS": _keys_of(attention, width),
            "ROWS": _rows(width, fold), "SOFTCAP": call.softcap or 0.0,
            "num_warps": 4 if width <= 64 else 8, "num_stages": 1,
        }  # fmt: skip
        query_slope = torch.empty_like(query_THE)
        key_slope, value_slope = (torch.empty_like(pool, dtype=torch.float32) for pool in (keys, values))
        logs, dots = query_slope.new_empty(2, n_rows, n_heads, dtype=torch.float32)
        window = NO_WINDOW if call.window is None else min(call.window, NO_WINDOW)
        launch(
            kernels.attend_back_queries, (len(self.queries_I8), kv_heads),
            query_THE, keys, values, out_THE, slope_THE, query_slope, logs, dots, self.queries_I8, attention.tables_SL,
            call.scaling, window, attention.tables_SL.shape[1], **shape,
        )  # fmt: skip
        launch(
            kernels.attend_back_keys, (len(self.items_I5), kv_heads),
            query_THE, keys, values, slope_THE, key_slope, value_slope, logs, dots, self.items_I5, self.users_U3,
            call.scaling, window, **shape,
        )  # fmt: skip
        if self.copies is not None:
            launch(
                kernels.add_copies, (len(self.copies.sources_P),),
                key_slope, value_slope, self.copies.sources_P, self.copies.starts_P1, self.copies.targets_C,
                KV_HEADS=kv_heads, WIDTH=width, LANES=triton.next_power_of_2(width), BLOCK=shape["BLOCK"],
                HEADS=triton.next_power_of_2(kv_heads), num_warps=1,
            )  # fmt: skip
        return query_slope, key_slope, value_slope


def _keys_of(attention: CudaPass, width: int) -> int:
    """Keys that a program reads at a time, fewer of wide heads."""
    return attention.backend.page if width <= 128 else min(attention.backend.page, 32)


def _rows(width: int, fold: int) -> int:
    """Folded rows of a tile, fewer of wide heads."""
    return ROWS if width <= 128 or fold > ROWS // 2 else ROWS // 2


def _keys(
    blocks: PackedBlocks, spans: Sequence[Sequence[int]], size: int, step: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Items and users; a block's first user is the sequence that wrote its last keys."""
    users_of: dict[int, list[int]] = {}
    index_of: dict[int, int] = {}
    for sequence, table in enumerate(blocks.tables):
        for index, block in enumerate(table):
            users_of.setdefault(block, []).append(sequence)
            index_of[block] = index
    items, users = list[list[int]](), list[list[int]]()
    for block, sequences in users_of.items():
        _, n_rows, position = spans[sequences[0]]
        first = index_of[block] * size
        end = min(first + size, position + n_rows)
        among = [len(users), len(users) + len(sequences)]
        users += [list(spans[sequence]) for sequence in sequences]
        items += [[block, start, min(step, end - start), *among] for start in range(first, end, step)]
    return items, users
