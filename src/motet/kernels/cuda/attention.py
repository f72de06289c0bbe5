"""Attention of covered bases on a GPU: causal, in pieces of keys, by one rule for sampling and training.

A row's bits depend on its own sequence alone, and not on the pass that computes it:

* A piece is `PIECE` keys whose borders are positions in the sequence. It is read in pages, in order, with an online softmax
  (Milakov and Gimelshein 2018), and pieces are merged in order. Pages and pieces that a row does not see change no bit, so
  they may be skipped.
* Sums over keys are products of the tensor core, also that of the weights: its order of additions does not depend on the
  tile. All else is computed element by element, and no product is fused with a sum.
* Keys behind a tile's last query are never read, so that nobody else's NaN or Inf arrives.

Programs walk a list of work whose length is in device memory. A launch has at most `PROGRAMS` programs for each
multiprocessor, more than run at once, so that short items make room; how many blocks a sequence has changes no launch.
Where each sequence has one query, an item is one piece, and the partial results of a row are combined by a launch of its
own. Elsewhere an item is a tile of queries with all its pieces.

Legend: T packed rows, H query heads, K KV heads, E head width, S sequences, L entries of a block table, I items.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from torch import Tensor

from motet.kernels.cuda.kernels import attention as kernels
from motet.kernels.cuda.launches import launch
from motet.kernels.cuda.packed_blocks import packed_blocks
from motet.model.accelerator import capability, multiprocessors, send
from motet.model.attention import LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache

PIECE = 256
"""Keys of a piece."""
PAGE = 64
"""Most keys that a program reads at a time; fewer if it does not divide the cache's blocks."""
TILE = 64
"""Folded rows of a tile; a query has a row for each query head of a KV head."""
SLOTS = 4096
"""Pieces in a workspace: 68 MB for 32 heads of 128, enough for 256 rows of 4,096 keys."""
PROGRAMS = 8
"""Programs of a launch for each multiprocessor."""
NO_WINDOW = 1 << 30
"""More keys than any sequence has."""


def warps_on(capability: int) -> int:
    """Of a tile of heads of 65 to 128 lanes: 4 fit into registers on Hopper, and were faster there; elsewhere they spill."""
    return 4 if capability == 9 else 8


@dataclass(frozen=True)
class WorkList:
    """A list of items, on the device."""

    items_I8: Tensor
    """int32: first row, its position, number of queries, table, first piece, end piece, slot or −1, nothing."""
    n_items: Tensor
    """int32 [1]: items in use."""
    slots_T2: Tensor | None = None
    """int32: first slot and number of slots of each row; None if no item has slots."""


@dataclass(frozen=True)
class Workspace:
    """Results of pieces that are not merged yet. Passes of a base run one after another, so they share it."""

    partials: Tensor
    """fp32 [slots, H, E]: weighted sums of the values."""
    peaks: Tensor
    """fp32 [slots, H]: peaks of the scores."""
    totals: Tensor
    """fp32 [slots, H]: sums of the weights."""


@dataclass
class CudaPass:
    """An `AttentionPass` for kernels that write keys and values themselves; also a `ReplayablePass` if `single`."""

    backend: CudaAttention
    spans: NDArray[np.int64]
    """[S, 3]: first row, number of rows, position of the first row; sequence s has table s."""
    positions_T: Tensor
    """int32: each row's position in its sequence."""
    places_T: Tensor
    """int64: block · block_size + offset at which a row's key and value are written."""
    tables_SL: Tensor
    """int32: blocks of each sequence."""
    cache: KVCache | None
    n_blocks: int = 0
    """Blocks of the temporary pools, without a cache."""
    copies: tuple[Tensor, Tensor] | None = None
    """int64: places of a prefix's rows, and of the copies in the blocks of other sequences."""
    sequences: tuple[Sequence[int], Sequence[Prefix | None]] = ((), ())
    """Lengths and prefixes of a packed pass, for another backend that computes it again."""
    calls: list[LayerCall] = field(default_factory=list)
    _works: dict[int, WorkList] = field(default_factory=dict)
    _listed: set[int] = field(default_factory=set)
    _first_layer: int | None = None

    @functools.cached_property
    def single(self) -> bool:
        """Whether each sequence has one row, as in decoding."""
        return self.cache is not None and bool((self.spans[:, 1] == 1).all())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Device memory that a replay reads; copy `values` into it first."""
        return self.positions_T, self.places_T, self.tables_SL

    def values(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """New contents of the tensors, on the host, for the same number of other spans."""
        assert self.cache is not None
        placed = _placed(spans, self.cache, self.tables_SL.shape[1])
        return tuple(torch.from_numpy(array) for array in placed[1:])

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Never called, because no torch module runs in such a pass."""
        raise AssertionError("kernels compute this pass")

    def pools(self, layer: int, key_like: Tensor, value_like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [blocks, K, block_size, E]; heads, width and dtype are those of [T, K, E].

        Without a cache it is new memory, uninitialised, for this layer alone.
        """
        if self.cache is not None:
            return self.cache.layer(layer, key_like, value_like)
        shapes = [(self.n_blocks, x.shape[1], self.backend.block_size, x.shape[2]) for x in (key_like, value_like)]
        return key_like.new_empty(shapes[0]), value_like.new_empty(shapes[1])

    def place_rows(self) -> None:
        """Compute `places_T` on the device, from positions and tables that have changed there; only if `single`."""
        assert self.single and self.cache is not None
        n_rows, n_entries = self.tables_SL.shape
        launch(
            kernels.place_rows, [triton.cdiv(n_rows, 128)],
            self.positions_T, self.tables_SL, self.places_T, n_rows, n_entries, self.cache.scrap_block,
            BLOCK=self.backend.block_size, ROWS=128,
        )  # fmt: skip

    def attend_into(self, call: LayerCall, query_THE: Tensor, keys: Tensor, values: Tensor, out_THE: Tensor) -> None:
        """Causal attention of one layer, after the keys and values of all rows were written to the layer's pools.

        Args:
            call: the layer's scaling, window and soft cap.
            query_THE: heads and lanes are contiguous; rows may be part of a wider tensor.
            keys: [blocks, K, block_size, E], as `pools` gives them.
            values: as keys.
            out_THE: contiguous; filled.

        Raises:
            ValueError: the layer has sinks, or more query heads share a KV head than a tile has rows.
        """
        n_heads, width = query_THE.shape[1:]
        fold = n_heads // keys.shape[1]
        if call.sinks_H is not None:
            raise ValueError("these kernels have no sinks")
        if fold > TILE:
            raise ValueError(f"{fold} query heads share a KV head, the kernels take {TILE}")
        assert query_THE.stride()[1:] == (width, 1) and out_THE.is_contiguous()
        self.calls.append(call)
        if self.copies is not None:
            self._copy(keys, values)
        work = self._work(call, self._tile(width, fold)[0] // fold)
        self._attend(call, work, query_THE, keys, values, out_THE)

    def _attend(
        self, call: LayerCall, work: WorkList, query_THE: Tensor, keys: Tensor, values: Tensor, out_THE: Tensor
    ) -> None:
        kv_heads, (n_heads, width) = keys.shape[1], query_THE.shape[1:]
        fold = n_heads // kv_heads
        folded = triton.next_power_of_2(fold)
        rows, warps = self._tile(width, fold)
        if self.single:
            rows, warps = max(16, folded), 4 if folded <= 16 else warps
        shape = {"KV_HEADS": kv_heads, "FOLD": fold, "WIDTH": width, "LANES": max(16, triton.next_power_of_2(width))}
        space = self.backend.workspace(n_heads, width)
        parts = (space.partials, space.peaks, space.totals)
        n_programs = min(len(work.items_I8) * kv_heads, self.backend.n_programs)
        launch(
            kernels.attend, [n_programs],
            query_THE, keys, values, out_THE, *parts, work.items_I8, work.n_items, self.tables_SL,
            call.scaling, _window(call), self.tables_SL.shape[1], query_THE.stride(0),
            **shape, BLOCK=self.backend.block_size, KEYS=self.backend.page, PIECE=PIECE,
            ROWS=rows, SOFTCAP=call.softcap or 0.0, num_warps=warps,
            num_stages=2 if self.backend.page * width * keys.element_size() <= 1 << 15 else 1,
        )  # fmt: skip
        if work.slots_T2 is not None:
            launch(
                kernels.combine, (len(self.positions_T), kv_heads), *parts, work.slots_T2, out_THE,
                **shape, ROWS=folded, num_warps=1, num_stages=1,
            )  # fmt: skip

    def _tile(self, width: int, fold: int) -> tuple[int, int]:
        """Folded rows of a tile and its warps: what fits into registers, by the compiler's count of spills."""
        if width <= 64:
            return TILE, 4
        if width <= 128:
            return TILE, self.backend.warps
        return (TILE // 2 if fold <= TILE // 2 else TILE), 8

    def _copy(self, keys: Tensor, values: Tensor) -> None:
        assert self.copies is not None
        _, kv_heads, block_size, width = keys.shape
        launch(
            kernels.copy_rows, [len(self.copies[0])], keys, values, *self.copies,
            KV_HEADS=kv_heads, WIDTH=width, LANES=triton.next_power_of_2(width), BLOCK=block_size,
            HEADS=triton.next_power_of_2(kv_heads), num_warps=1,
        )  # fmt: skip

    def _work(self, call: LayerCall, step: int) -> WorkList:
        """The list for a layer, whose tiles hold `step` queries.

        Lists of single rows depend on positions that a replay changes, so the first layer makes them anew.
        """
        if not self.single:
            if step not in self._works:
                self._works[step] = tiles(self.spans, step, self.positions_T.device)
            return self._works[step]
        if self._first_layer in (None, call.layer):
            self._first_layer = call.layer
            self._listed.clear()
        window = _window(call)
        if window not in self._works:
            self._works[window] = self._empty()
        if window not in self._listed:
            self._listed.add(window)
            self._list(self._works[window], window)
        return self._works[window]

    def _empty(self) -> WorkList:
        """Memory for the list of single rows, as long as their tables allow."""
        n_rows, n_entries = self.tables_SL.shape
        most = -(-n_entries * self.backend.block_size // PIECE)
        n_slots = 0 if most == 1 else min(n_rows * most, self.backend.slots)
        empty = self.positions_T.new_empty
        return WorkList(empty(n_rows + n_slots, 8), empty(1), empty(n_rows, 2) if n_slots else None)

    def _list(self, work: WorkList, window: int) -> None:
        n_rows = len(self.positions_T)
        n_slots = len(work.items_I8) - n_rows
        slots = work.items_I8.new_empty(n_rows, 2) if work.slots_T2 is None else work.slots_T2
        launch(
            kernels.list_pieces, [n_rows],
            self.positions_T, work.items_I8, slots, work.n_items, n_rows, window, n_slots,
            PIECE=PIECE, ROWS=256, ITEMS=16, num_warps=1,
        )  # fmt: skip


class CudaAttention:
    """The `AttentionBackend` of a base that Motet's kernels compute on a GPU."""

    fixed_shapes = True
    reads_past_end = False

    def __init__(self, block_size: int, device: torch.device) -> None:
        """Blocks have a multiple of 16 tokens.

        Raises:
            ValueError: they have not.
        """
        if block_size % 16:
            raise ValueError(f"block_size is {block_size}, no multiple of 16")
        self.block_size = block_size
        self.page = min(block_size & -block_size, PAGE)
        """Keys that a program reads at a time."""
        self.slots = SLOTS
        """Pieces whose results the workspace holds; a row that finds no room there is not split."""
        self.warps = warps_on(capability(device) if device.type == "cuda" else 9)
        """Of a tile of heads of 65 to 128 lanes."""
        self._device = device
        self._workspaces: dict[tuple[int, int], Workspace] = {}

    @property
    def n_programs(self) -> int:
        """Most programs of a launch."""
        return PROGRAMS * (multiprocessors(self._device) if self._device.type == "cuda" else 1)

    def workspace(self, n_heads: int, width: int) -> Workspace:
        """The workspace of layers with this many query heads; its addresses never change."""
        space = self._workspaces.get((n_heads, width))
        if space is None:
            sizes = ((self.slots, n_heads, width), (self.slots, n_heads), (self.slots, n_heads))
            space = Workspace(*(torch.empty(size, dtype=torch.float32, device=self._device) for size in sizes))
            self._workspaces[n_heads, width] = space
        return space

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> CudaPass:
        """A pass over whole sequences. A prefix's full blocks are shared, the rows of its last one copied."""
        blocks = packed_blocks(lengths, prefixes or [None] * len(lengths), self.block_size)
        rows = np.array(lengths)
        before = np.array([0] * len(rows) if not prefixes else [0 if x is None else len(x.rows) for x in prefixes])
        spans = np.stack([rows.cumsum() - rows, rows, before], 1)
        tables = _tables(blocks.tables, max(map(len, blocks.tables)), 0)
        fixed = send(self._device, _positions(spans), tables, blocks.places_T, blocks.sources_C, blocks.targets_C)
        positions_T, tables_SL, places_T, *copies = fixed
        copied = (copies[0], copies[1]) if len(copies[0]) else None
        given = lengths, prefixes
        return CudaPass(self, spans, positions_T, places_T, tables_SL, None, blocks.n_blocks, copied, given)

    def cached(self, spans: Sequence[Span], cache: KVCache) -> CudaPass:
        """A pass over spans whose keys and values go to a cache."""
        return self._cached(spans, cache, 0)

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> CudaPass | None:
        """`cached` for sequences that may grow to `least_blocks` blocks; None unless each span is one token."""
        return self._cached(spans, cache, least_blocks) if all(span.length == 1 for span in spans) else None

    def _cached(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> CudaPass:
        reach = max(-(-(span.start + span.length) // cache.block_size) for span in spans)
        placed, *values = _placed(spans, cache, max(reach, least_blocks))
        positions_T, places_T, tables_SL = send(self._device, *values)
        return CudaPass(self, placed, positions_T, places_T, tables_SL, cache)


def tiles(spans: NDArray[np.int64], step: int, device: torch.device) -> WorkList:
    """Items of at most `step` queries for spans [S, 3] (see `CudaPass.spans`), those with most keys first."""
    counts = -(-spans[:, 1] // step)
    table_I = np.repeat(np.arange(len(spans)), counts)
    done_I = (np.arange(len(table_I)) - np.repeat(counts.cumsum() - counts, counts)) * step
    row_I, length_I, position_I = spans[table_I].T
    queries_I = np.minimum(length_I - done_I, step)
    ends_I = -(-(position_I + done_I + queries_I) // PIECE)
    zeros_I = np.zeros_like(table_I)
    columns = (row_I + done_I, position_I + done_I, queries_I, table_I, zeros_I, ends_I, zeros_I - 1, zeros_I)
    items_I8 = np.stack(columns, 1).astype(np.int32)
    order = np.argsort(-(position_I + done_I), kind="stable")
    return WorkList(*send(device, items_I8[order], np.array([len(items_I8)], np.int32)))


def _placed(spans: Sequence[Span], cache: KVCache, n_entries: int) -> tuple[NDArray[Any], ...]:
    """Spans [S, 3], positions [T], places [T], and tables [S, L], which end with blocks that nobody reads."""
    firsts, lengths = (np.array([getattr(span, name) for span in spans]) for name in ("start", "length"))
    placed = np.stack([lengths.cumsum() - lengths, lengths, firsts], 1)
    positions = _positions(placed)
    tables = _tables([span.blocks for span in spans], n_entries, cache.scrap_block)
    blocks = tables[np.repeat(np.arange(len(spans)), lengths), positions // cache.block_size].astype(np.int64)
    return placed, positions, blocks * cache.block_size + positions % cache.block_size, tables


def _positions(spans: NDArray[np.int64]) -> NDArray[np.int32]:
    rows, lengths, firsts = spans.T
    positions: NDArray[np.int32] = (np.arange(lengths.sum()) + np.repeat(firsts - rows, lengths)).astype(np.int32)
    return positions


def _tables(blocks: Sequence[Sequence[int]], n_entries: int, rest: int) -> NDArray[np.int32]:
    tables = np.full((len(blocks), n_entries), rest, np.int32)
    for table, own in zip(tables, blocks, strict=True):
        table[: len(own)] = own[:n_entries]
    return tables


def _window(call: LayerCall) -> int:
    return NO_WINDOW if call.window is None else min(call.window, NO_WINDOW)
