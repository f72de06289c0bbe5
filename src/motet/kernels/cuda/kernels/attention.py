# mypy: disable-error-code="no-untyped-def"
"""Attention in pieces of keys. `motet.kernels.cuda.attention` launches these kernels and says what their bits depend on.

A program walks a list of items whose length is in memory. An item is a tile of folded rows of one sequence, where row r is
query r // FOLD and query head r % FOLD of a KV head, and a range of pieces of that sequence's keys.

Uppercase arguments are compile-time constants: the base's shape (KV_HEADS, FOLD query heads for each, WIDTH of a head padded
to LANES, SOFTCAP or 0), the cache's BLOCK, the KEYS that are read at a time, the KEYS of a PIECE, and the ROWS of a tile.

Legend: T packed rows, H query heads, K KV heads, E head width, N blocks, C keys, R rows of a tile, I items, S slots of
partial results, L entries of a block table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.model.attention.triton_kernels import tanh

_STATES = {"query", "keys", "values", "output", "partials", "query_row"}
"""Arguments that 16 divides, bytes of an address or elements of a stride; nothing is known of the others."""


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile for argument types only, so that no number and no other address changes the machine code."""
    names = [name for name in inspect.signature(function).parameters if name.islower() and name not in _STATES]
    return triton.jit(function, do_not_specialize=names)


def _part(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return triton.jit(function)


@_part
def _merged(peak_R, total_R, sum_RE, next_peak_R, next_total_R, next_RE):
    """The results over earlier pieces and one more: peaks of the scores, sums of the weights, weighted sums of the values.

    A piece of which a row sees nothing has a peak of −∞ and changes no bit.
    """
    higher_R = tl.maximum(peak_R, next_peak_R)
    finite_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
    before_R, after_R = tl.exp(peak_R - finite_R), tl.exp(next_peak_R - finite_R)
    sum_RE = sum_RE * before_R[:, None] + next_RE * after_R[:, None]
    return higher_R, total_R * before_R + next_total_R * after_R, sum_RE


@_part
def _finished(sum_RE, total_R, live_R):
    """The attention output. A page that a row does not see may turn −0 into 0, so that is always done."""
    return (sum_RE + 0.0) / tl.where(live_R, total_R, 1.0)[:, None]


@_part
def _piece(
    query_RE, position_R, live_R, keys, values, table, head, start, stop, last, scaling, window,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Peaks, sums of weights and weighted sums of the values over the pages [start, stop) of one piece."""
    ROWS: tl.constexpr = query_RE.shape[0]
    lane_E, one_16 = tl.arange(0, LANES), tl.arange(0, 16)
    peak_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    sum_RE = tl.zeros([ROWS, LANES], tl.float32)
    for page in range(start, stop, KEYS):
        block = tl.load(table + page // BLOCK).to(tl.int64)
        key_C = page + tl.arange(0, KEYS)
        place_C = (block * KV_HEADS + head) * BLOCK + page % BLOCK + tl.arange(0, KEYS)
        place_CE = place_C[:, None] * WIDTH + lane_E[None, :]
        # no key behind the tile's last query is read: 0 · NaN is NaN
        held_CE = (key_C < last)[:, None] & (lane_E < WIDTH)[None, :]
        key_CE = tl.load(keys + place_CE, mask=held_CE, other=0.0)
        value_CE = tl.load(values + place_CE, mask=held_CE, other=0.0)
        zeros_RC = tl.zeros([ROWS, KEYS], tl.float32)
        score_RC = tl.dot(query_RE, tl.trans(key_CE), zeros_RC, input_precision="ieee") * scaling
        if SOFTCAP > 0:
            score_RC = tanh(score_RC / SOFTCAP) * SOFTCAP
        distance_RC = position_R[:, None] - key_C[None, :]
        seen_RC = (distance_RC >= 0) & (distance_RC < window) & live_R[:, None]
        score_RC = tl.where(seen_RC, score_RC, float("-inf"))
        higher_R = tl.maximum(peak_R, tl.max(score_RC, 1))
        finite_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)  # for rows that have seen no key yet
        weight_RC = tl.exp(score_RC - finite_R[:, None]).to(value_CE.dtype)  # exactly 0 where a key is hidden
        shrink_R = tl.exp(peak_R - finite_R)  # exactly 1 if the peak is unchanged
        # tensor cores add weights in one order, whatever the tile; `tl.sum` does not
        ones_C16 = tl.full([KEYS, 16], 1.0, value_CE.dtype)
        total_R16 = tl.dot(weight_RC, ones_C16, tl.zeros([ROWS, 16], tl.float32), input_precision="ieee")
        total_R = total_R * shrink_R + tl.sum(tl.where(one_16[None, :] == 0, total_R16, 0.0), 1)
        sum_RE = tl.dot(weight_RC, value_CE, sum_RE * shrink_R[:, None], input_precision="ieee")
        peak_R = higher_R
    return peak_R, total_R, sum_RE


@_kernel
def attend(
    query, keys, values, output, partials, peaks, totals, items, n_items, tables,
    scaling, window, n_entries, query_row,
    KV_HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of the items [I, 8]: first row, its position, queries, table, first piece, end piece, slot or −1, nothing.

    Without a slot the item has all pieces of its rows, and the output is written; with one it has one query and one piece.
    """
    row_R, lane_E = tl.arange(0, ROWS), tl.arange(0, LANES)
    for index in range(tl.program_id(0), tl.load(n_items) * KV_HEADS, tl.num_programs(0)):
        item, head = items + index // KV_HEADS * 8, index % KV_HEADS
        row, position, n_queries = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
        table = tables + tl.load(item + 3).to(tl.int64) * n_entries
        first_piece, end_piece, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6).to(tl.int64)
        live_R = row_R // FOLD < n_queries
        mask_RE = live_R[:, None] & (lane_E < WIDTH)[None, :]
        at_R = (row + row_R // FOLD) * query_row + (head * FOLD + row_R % FOLD) * WIDTH
        query_RE = tl.load(query + at_R[:, None] + lane_E[None, :], mask=mask_RE, other=0.0)
        last = position + n_queries
        begin = tl.maximum(position - window + 1, 0)  # the first key that a row of the tile sees
        peak_R = tl.full([ROWS], float("-inf"), tl.float32)
        total_R = tl.zeros([ROWS], tl.float32)
        sum_RE = tl.zeros([ROWS, LANES], tl.float32)
        for piece in range(tl.maximum(first_piece, begin // PIECE), end_piece):
            next_peak_R, next_total_R, next_RE = _piece(
                query_RE, position + row_R // FOLD, live_R, keys, values, table, head,
                tl.maximum(piece * PIECE, begin // KEYS * KEYS), tl.minimum(piece * PIECE + PIECE, last), last,
                scaling, window, KV_HEADS, WIDTH, LANES, BLOCK, KEYS, SOFTCAP,
            )  # fmt: skip
            peak_R, total_R, sum_RE = _merged(peak_R, total_R, sum_RE, next_peak_R, next_total_R, next_RE)
        if slot < 0:
            at_R = ((row + row_R // FOLD) * KV_HEADS + head) * FOLD + row_R % FOLD
            value_RE = _finished(sum_RE, total_R, live_R).to(output.dtype.element_ty)
            tl.store(output + at_R[:, None] * WIDTH + lane_E[None, :], value_RE, mask=mask_RE)
        else:
            at_R = (slot * KV_HEADS + head) * FOLD + row_R
            tl.store(partials + at_R[:, None] * WIDTH + lane_E[None, :], sum_RE, mask=mask_RE)
            tl.store(peaks + at_R, peak_R, mask=live_R)
            tl.store(totals + at_R, total_R, mask=live_R)


@_kernel
def combine(
    partials, peaks, totals, slots, output,
    KV_HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a row's pieces in order; nothing if it has no slots [T, 2], the first and their number."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, n_pieces = tl.load(slots + row * 2).to(tl.int64), tl.load(slots + row * 2 + 1)
    if n_pieces > 0:
        row_R, lane_E = tl.arange(0, ROWS), tl.arange(0, LANES)
        live_R = row_R < FOLD
        mask_RE = live_R[:, None] & (lane_E < WIDTH)[None, :]
        peak_R = tl.full([ROWS], float("-inf"), tl.float32)
        total_R = tl.zeros([ROWS], tl.float32)
        sum_RE = tl.zeros([ROWS, LANES], tl.float32)
        for piece in range(n_pieces):
            at_R = ((first + piece) * KV_HEADS + head) * FOLD + row_R
            next_RE = tl.load(partials + at_R[:, None] * WIDTH + lane_E[None, :], mask=mask_RE, other=0.0)
            next_peak_R = tl.load(peaks + at_R, mask=live_R, other=float("-inf"))
            next_total_R = tl.load(totals + at_R, mask=live_R, other=0.0)
            peak_R, total_R, sum_RE = _merged(peak_R, total_R, sum_RE, next_peak_R, next_total_R, next_RE)
        at_R = (row * KV_HEADS + head) * FOLD + row_R
        value_RE = _finished(sum_RE, total_R, live_R).to(output.dtype.element_ty)
        tl.store(output + at_R[:, None] * WIDTH + lane_E[None, :], value_RE, mask=mask_RE)


@_kernel
def list_pieces(
    positions, items, slots, n_items, n_rows, window, n_slots, PIECE: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr
):  # fmt: skip
    """The items of rows that have one query each, an item for each piece with a key that the row sees.

    A row whose pieces find no more slots is one item. Each program counts the items of earlier rows and writes its own.
    """
    own = tl.program_id(0)
    n_taken, n_listed, own_item, own_slot, is_split = 0, 0, 0, 0, 0
    for start in range(0, n_rows, ROWS):
        row_R = start + tl.arange(0, ROWS)
        live_R = row_R < n_rows
        position_R = tl.load(positions + row_R, mask=live_R, other=0)
        n_R = position_R // PIECE - tl.maximum(position_R - window + 1, 0) // PIECE + 1
        wanted_R = tl.where(live_R & (n_R > 1), n_R, 0)
        taken_R = n_taken + tl.cumsum(wanted_R, 0)
        split_R = (wanted_R > 0) & (taken_R <= n_slots)
        listed_R = tl.where(split_R, n_R, live_R.to(tl.int32))
        own_item += tl.sum(tl.where(row_R < own, listed_R, 0), 0)
        own_slot += tl.sum(tl.where((row_R == own) & split_R, taken_R - n_R, 0), 0)
        is_split += tl.sum(((row_R == own) & split_R).to(tl.int32), 0)
        n_taken += tl.sum(wanted_R, 0)
        n_listed += tl.sum(listed_R, 0)
    position = tl.load(positions + own)
    first, end = tl.maximum(position - window + 1, 0) // PIECE, position // PIECE + 1
    n_own = tl.where(is_split > 0, end - first, 1)
    for start in range(0, n_own, ITEMS):
        item_I = start + tl.arange(0, ITEMS)
        at_I, live_I, zero_I = items + (own_item + item_I) * 8, item_I < n_own, item_I * 0
        tl.store(at_I, zero_I + own, mask=live_I)
        tl.store(at_I + 1, zero_I + position, mask=live_I)
        tl.store(at_I + 2, zero_I + 1, mask=live_I)
        tl.store(at_I + 3, zero_I + own, mask=live_I)
        tl.store(at_I + 4, first + item_I, mask=live_I)
        tl.store(at_I + 5, tl.where(is_split > 0, first + item_I + 1, end), mask=live_I)
        tl.store(at_I + 6, tl.where(is_split > 0, own_slot + item_I, -1), mask=live_I)
    tl.store(slots + own * 2, own_slot)
    tl.store(slots + own * 2 + 1, tl.where(is_split > 0, n_own, 0))
    tl.store(n_items, n_listed, mask=own == 0)


@_kernel
def place_rows(positions, tables, places, n_rows, n_entries, scrap, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Where the keys of rows that have one query each are written; in the scrap block if the table is too short."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < n_rows
    position_R = tl.load(positions + row_R, mask=live_R, other=0)
    entry_R = position_R // BLOCK
    at_R = tables + row_R.to(tl.int64) * n_entries + entry_R
    block_R = tl.load(at_R, mask=live_R & (entry_R < n_entries), other=0).to(tl.int64)
    block_R = tl.where(entry_R < n_entries, block_R, scrap)
    tl.store(places + row_R, block_R * BLOCK + position_R % BLOCK, mask=live_R)


@_kernel
def copy_rows(
    keys, values, sources, targets,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Copy a row's keys and values to another place in the same blocks."""
    head_K, lane_E = tl.arange(0, HEADS), tl.arange(0, LANES)
    mask_KE = (head_K < KV_HEADS)[:, None] & (lane_E < WIDTH)[None, :]
    source, target = tl.load(sources + tl.program_id(0)), tl.load(targets + tl.program_id(0))
    from_K = (source // BLOCK * KV_HEADS + head_K) * BLOCK + source % BLOCK
    to_K = (target // BLOCK * KV_HEADS + head_K) * BLOCK + target % BLOCK
    from_KE, to_KE = from_K[:, None] * WIDTH + lane_E[None, :], to_K[:, None] * WIDTH + lane_E[None, :]
    tl.store(keys + to_KE, tl.load(keys + from_KE, mask=mask_KE, other=0.0), mask=mask_KE)
    tl.store(values + to_KE, tl.load(values + from_KE, mask=mask_KE, other=0.0), mask=mask_KE)
