"""Attention metadata for passes of Motet's kernels: which rows attend to which KV blocks.

Legend: T packed rows, H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from motet.model.attention import LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache


@dataclass
class NativePass:
    """An `AttentionPass` that holds metadata only: the kernels compute attention within the pass."""

    spans: list[tuple[int, int, int, int]]
    """Runs of rows that attend: first row, number of rows, position of the first row, index into `tables`."""
    writes: list[tuple[int, int, int, int]]
    """The same for rows whose keys and values are written to the blocks of that table."""
    tables: list[NDArray[np.int32]]
    n_blocks: int
    block_size: int
    cache: KVCache | None = None
    """The cache that holds the blocks; None if they are temporary memory of the pass."""
    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Never called, because no torch module runs in such a pass."""
        raise AssertionError("kernels compute this pass")


class NativeAttention:
    """The `AttentionBackend` of a base that Motet's kernels compute."""

    fixed_shapes = True
    reads_past_end = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> NativePass:
        """A pass over whole sequences. A prefix's keys and values are copied to the blocks of each sequence with it."""
        spans, writes, tables = [], [], []
        row = n_blocks = 0
        for index, length in enumerate(lengths):
            prefix = prefixes[index] if prefixes else None
            position = 0
            for first, own in () if prefix is None else prefix.stretches:
                writes.append((first, own, position, index))
                position += own
            spans.append((row, length, position, index))
            writes.append(spans[-1])
            needed = -(-(position + length) // self._block_size)
            tables.append(np.arange(n_blocks, n_blocks + needed, dtype=np.int32))
            row, n_blocks = row + length, n_blocks + needed
        return NativePass(spans, writes, tables, n_blocks, self._block_size)

    def cached(self, spans: Sequence[Span], cache: KVCache) -> NativePass:
        """A pass over spans whose keys and values are written to a cache."""
        placed, row = [], 0
        for index, span in enumerate(spans):
            placed.append((row, span.length, span.start, index))
            row += span.length
        tables = [np.array(span.blocks, np.int32) for span in spans]
        return NativePass(placed, placed, tables, cache.n_blocks + 2, cache.block_size, cache)

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> None:
        """Returns None: CPU passes are not recorded as graphs."""
        return
