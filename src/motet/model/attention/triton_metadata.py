"""Maps packed rows to their keys, as tensors for the kernels of `motet.model.attention.triton_kernels`.

The GPU counterpart of `torch_metadata`: one launch serves sequences of all lengths, so nothing is grouped or padded.
Values that change from token to token are in tensors whose shapes depend only on the number of sequences and on the
blocks of the longest one. Legend: T packed rows, S sequences, L entries of a sequence's key table, N tiles of queries,
M blocks of keys, P places among padded keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.model.accelerator import send
from motet.model.attention.backend import Prefix, Span, prefix_length
from motet.model.kv_cache import KVCache, Writes

TILE_ROWS = 64
"""Folded query rows per program; a query has one row for each query head of a KV head."""

TILE_KEYS = 64
"""Keys that a program reads at a time."""

_Ints = NDArray[np.integer[Any]]


def queries_per_tile(fold: int) -> int:
    """Whole queries in a tile, if `fold` query heads share a KV head.

    Raises:
        ValueError: a tile cannot hold one query.
    """
    if fold > TILE_ROWS:
        raise ValueError(
            f"{fold} query heads share a KV head, the kernels take {TILE_ROWS}; compute with Arithmetic(attention='torch')"
        )
    return TILE_ROWS // fold


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries, each of one sequence."""

    sequence_N: Tensor
    """int32: the tile's sequence."""
    query_N: Tensor
    """int32: the tile's first query, counted from the sequence's first own query."""


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys for the backward pass, and the places to sum for each row. Keys are padded to whole blocks."""

    sequence_M: Tensor
    """int32: the block's sequence."""
    key_M: Tensor
    """int32: the block's first key in its sequence."""
    readers_T: Tensor
    """int32 [T + 1]: start of each packed row's entries in `places_P`, and the end."""
    places_P: Tensor
    """int32: a row's position among all padded keys, for each sequence that reads it; its own first, then the others in
    order.
    """


@dataclass
class TritonMetadata:
    """The sequence of each row, and the positions of its keys."""

    rows_S: Tensor
    """int32: packed row of each sequence's first own query."""
    queries_S: Tensor
    """int32: number of own queries."""
    firsts_S: Tensor
    """int32: position of the first own query in its sequence; earlier keys are in the cache or in a shared prefix."""
    keys_SL: Tensor
    """int32: with a cache, the sequence's KV blocks followed by zero blocks; without, the packed row of each key."""
    lengths: tuple[int, ...]
    """`queries_S` on the host."""
    prefixes: tuple[Prefix | None, ...] = ()
    cache: KVCache | None = None
    writes: Writes | None = None
    _tiles: dict[int, Tiles] = field(default_factory=dict)

    @property
    def sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Per-sequence tensors for the kernels."""
        return self.rows_S, self.queries_S, self.firsts_S, self.keys_SL

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that change from one decoded token to the next."""
        assert self.writes is not None
        return *self.sequences, self.writes.blocks_T, self.writes.offsets_T

    def tiles(self, fold: int) -> Tiles:
        """Tiles of all queries if `fold` query heads share a KV head; cached.

        Raises:
            ValueError: a tile cannot hold one query.
        """
        step = min(queries_per_tile(fold), max(self.lengths))
        tiles = self._tiles.get(step)
        if tiles is None:
            starts = [(index, query) for index, length in enumerate(self.lengths) for query in range(0, length, step)]
            sequence_N, query_N = np.array(starts, dtype=np.int32).T
            tiles = self._tiles[step] = Tiles(*_send(self.rows_S.device, sequence_N, query_N))
        return tiles

    @functools.cached_property
    def key_blocks(self) -> KeyBlocks:
        """Key blocks for the backward pass; only without a cache."""
        sequences: list[int] = []
        keys: list[int] = []
        rows, places, shared_rows, shared_places = [], [], [], []
        row = 0
        for index, (length, prefix) in enumerate(zip(self.lengths, self.prefixes, strict=True)):
            first, place = prefix_length(prefix), len(keys) * TILE_KEYS
            starts = range(0, first + length, TILE_KEYS)
            sequences.extend([index] * len(starts))
            keys.extend(starts)
            rows.append(np.arange(row, row + length))
            places.append(np.arange(place + first, place + first + length))
            if prefix is not None:
                shared_rows.append(prefix.rows)
                shared_places.append(np.arange(place, place + first))
            row += length
        all_rows, all_places = np.concatenate(rows + shared_rows), np.concatenate(places + shared_places)
        readers = np.concatenate([[0], np.bincount(all_rows, minlength=row).cumsum()])
        by_row = np.argsort(all_rows, kind="stable")
        return KeyBlocks(*_send(self.rows_S.device, np.array(sequences), np.array(keys), readers, all_places[by_row]))


def packed_metadata(
    lengths: Sequence[int], device: torch.device, prefixes: Sequence[Prefix | None] = ()
) -> TritonMetadata:
    """Metadata of whole sequences in order."""
    before = tuple(prefixes) or (None,) * len(lengths)
    firsts = np.array([prefix_length(prefix) for prefix in before])
    queries = np.array(lengths)
    rows = queries.cumsum() - queries
    keys = np.zeros((len(queries), int((firsts + queries).max())), dtype=np.int32)
    for own, row, first, length, prefix in zip(keys, rows, firsts, lengths, before, strict=True):
        if prefix is not None:
            own[:first] = prefix.rows
        own[first : first + length] = np.arange(row, row + length)
    rows_S, queries_S, firsts_S, keys_SL = _send(device, rows, queries, firsts, keys)
    return TritonMetadata(rows_S, queries_S, firsts_S, keys_SL, tuple(lengths), before)


def cached_metadata(
    spans: Sequence[Span], cache: KVCache, device: torch.device, least_blocks: int = 0
) -> TritonMetadata:
    """Metadata of spans whose keys and values go to a cache; L is at least `least_blocks`, for shapes that stay fixed."""
    firsts, queries = (np.array([getattr(span, name) for span in spans]) for name in ("start", "length"))
    reach = -(-(firsts + queries) // cache.block_size)
    keys = np.full((len(spans), max(int(reach.max()), least_blocks)), cache.zero_block, dtype=np.int32)
    for own, span, n_blocks in zip(keys, spans, reach, strict=True):
        own[:n_blocks] = span.blocks[:n_blocks]
    rows = queries.cumsum() - queries
    sequence_T = np.repeat(np.arange(len(spans)), queries)
    position_T = np.arange(int(queries.sum())) - np.repeat(rows - firsts, queries)
    blocks_T = keys[sequence_T, position_T // cache.block_size]
    (writes,) = send(device, np.stack([blocks_T, position_T % cache.block_size]).astype(np.int64))
    rows_S, queries_S, firsts_S, keys_SL = _send(device, rows, queries, firsts, keys)
    lengths = tuple(int(length) for length in queries)
    return TritonMetadata(rows_S, queries_S, firsts_S, keys_SL, lengths, cache=cache, writes=Writes(*writes))


def _send(device: torch.device, *arrays: _Ints) -> list[Tensor]:
    """The arrays as int32 tensors, in one copy to the device."""
    flat = np.concatenate([array.ravel() for array in arrays]).astype(np.int32)
    parts = send(device, flat)[0].split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
