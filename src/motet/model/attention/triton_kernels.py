# mypy: disable-error-code="no-untyped-def"
"""Attention kernels. `triton_attention` launches them and documents what their bits depend on.

A program processes a tile of one sequence's folded rows, where row r is query r // FOLD and query head r % FOLD of a KV
head, or a block of one sequence's keys. Key l is at offset l % block_size of block keys[sequence, l // block_size]; a
block is a KV cache block, or a single packed row.

Uppercase arguments are compile-time constants: the model's shape (FOLD query heads per KV head, WIDTH of a head, padded
to LANES, SOFTCAP, whether it has SINKS), the size of tiles (ROWS, which hold STEP whole queries; KEYS), the UNIT of
strides, and WIDEN for the interpreter.

Legend: R rows of a tile, C keys of a block, E head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

_STATES = {"query", "key", "value", "output", "grad", "log_sum", "common", "grad_query", "grad_key", "grad_value"}
"""Arguments aligned to 16 bytes; others may have any alignment."""


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile for argument types only, so that no size or address changes the machine code."""
    names = [name for name in inspect.signature(function).parameters if name.islower() and name not in _STATES]
    return triton.jit(function, do_not_specialize=names)


def _part(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return triton.jit(function)


# --- parts ------------------------------------------------------------------------------------------------------------


@_part
def _dot(left, right, total, WIDEN: tl.constexpr):
    """Left · right, added to total in fp32. The interpreter lacks bfloat16, whose products are exact in fp32."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@_part
def _load(states, place_R, live_R, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Load rows of states [R, LANES], with zeros for dead rows: their memory may hold NaN, and 0 · NaN is NaN."""
    lane_E = tl.arange(0, LANES)
    mask = live_R[:, None] & (lane_E < WIDTH)[None, :]
    return tl.load(states + place_R[:, None] + lane_E[None, :], mask=mask, other=0.0)


@_part
def _store(states, place_R, live_R, value_RE, WIDTH: tl.constexpr, LANES: tl.constexpr):
    lane_E = tl.arange(0, LANES)
    mask = live_R[:, None] & (lane_E < WIDTH)[None, :]
    tl.store(states + place_R[:, None] + lane_E[None, :], value_RE.to(states.dtype.element_ty), mask=mask)


@_part
def _rows(start, n_queries, FOLD: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr):
    """For each row of a tile: its query, its head within the KV head's group, and whether it is live."""
    row_R = tl.arange(0, ROWS)
    own_R = start + row_R // FOLD
    return own_R, row_R % FOLD, (own_R < n_queries) & (row_R < STEP * FOLD)


@_part
def _seen(position_R, live_R, key_C, window):
    distance_RC = position_R[:, None] - key_C[None, :]
    return (distance_RC >= 0) & (distance_RC < window) & live_R[:, None]


@_part
def tanh(x):
    """Tanh from exp, which is accurate away from 0; near 0 from the Taylor series, with a relative error up to 3e-7."""
    small = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(square < 0.0625, near, far)


@_part
def _scores(query_RE, key_CE, scaling, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    """fp32 scores [R, C], and the factor from a score's gradient to that of the product of query and key."""
    zeros_RC = tl.zeros([query_RE.shape[0], key_CE.shape[0]], tl.float32)
    score_RC = _dot(query_RE, tl.trans(key_CE), zeros_RC, WIDEN) * scaling
    slope_RC = zeros_RC + scaling
    if SOFTCAP > 0:
        capped_RC = tanh(score_RC / SOFTCAP)
        score_RC = capped_RC * SOFTCAP
        slope_RC = (1.0 - capped_RC * capped_RC) * scaling
    return score_RC, slope_RC


@_part
def _score_gradients(score_RC, slope_RC, seen_RC, log_sum_R, common_R, grad_RE, value_CE, WIDEN: tl.constexpr):
    """Weights [R, C], and the gradients of the products of query and key; 0 where a key is hidden."""
    weight_RC = tl.where(seen_RC, tl.exp(score_RC - log_sum_R[:, None]), 0.0)
    zeros_RC = tl.zeros([grad_RE.shape[0], value_CE.shape[0]], tl.float32)
    grad_weight_RC = _dot(grad_RE, tl.trans(value_CE), zeros_RC, WIDEN)
    return weight_RC, weight_RC * (grad_weight_RC - common_R[:, None]) * slope_RC


# --- kernels ----------------------------------------------------------------------------------------------------------


@_kernel
def forward(
    query, key, value, output, log_sum, sinks,
    rows, queries, firsts, keys, tile_sequence, tile_query,
    scaling, window, n_keys, n_heads, query_row, query_head, block_size,
    key_block, key_head, key_place, value_block, value_head, value_place,
    SINKS: tl.constexpr, FOLD: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Output and logarithms of the weight sums of one tile and KV head."""
    sequence, start = tl.load(tile_sequence + tl.program_id(0)).to(tl.int64), tl.load(tile_query + tl.program_id(0))
    n_queries, first = tl.load(queries + sequence), tl.load(firsts + sequence)
    own_R, head_R, live_R = _rows(start, n_queries, FOLD, STEP, ROWS)
    row_R = (tl.load(rows + sequence) + own_R).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    head_R = head * FOLD + head_R
    query_RE = _load(query, row_R * (query_row * UNIT) + head_R * (query_head * UNIT), live_R, WIDTH, LANES)
    peak_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    if SINKS:
        peak_R = tl.load(sinks + head_R, mask=live_R, other=float("-inf")).to(tl.float32)
        total_R += 1.0
    output_RE = tl.zeros([ROWS, LANES], tl.float32)
    end = first + tl.minimum(start + STEP, n_queries)
    begin = tl.maximum(first + start - window + 1, 0) // KEYS * KEYS  # earlier blocks are hidden from every row
    for block in tl.range(begin, end, KEYS):
        key_C = block + tl.arange(0, KEYS)
        live_C = key_C < end
        table_C = tl.load(keys + sequence * n_keys + key_C // block_size, mask=live_C, other=0).to(tl.int64)
        place_C = (key_C % block_size).to(tl.int64)
        key_at_C = table_C * (key_block * UNIT) + head * (key_head * UNIT) + place_C * (key_place * UNIT)
        value_at_C = table_C * (value_block * UNIT) + head * (value_head * UNIT) + place_C * (value_place * UNIT)
        key_CE = _load(key, key_at_C, live_C, WIDTH, LANES)
        value_CE = _load(value, value_at_C, live_C, WIDTH, LANES)
        score_RC, _ = _scores(query_RE, key_CE, scaling, SOFTCAP, WIDEN)
        seen_RC = _seen(first + own_R, live_R, key_C, window)
        score_RC = tl.where(seen_RC, score_RC, float("-inf"))
        higher_R = tl.maximum(peak_R, tl.max(score_RC, 1))
        finite_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)  # for rows that have seen no key yet
        weight_RC = tl.exp(score_RC - finite_R[:, None])  # exactly 0 where a key is hidden
        shrink_R = tl.exp(peak_R - finite_R)  # exactly 1 if the peak is unchanged
        total_R = total_R * shrink_R + tl.sum(weight_RC, 1)
        output_RE = _dot(weight_RC.to(value_CE.dtype), value_CE, output_RE * shrink_R[:, None], WIDEN)
        peak_R = higher_R
    total_R = tl.where(live_R, total_R, 1.0)
    output_RE = (output_RE + 0.0) / total_R[:, None]  # a hidden block turns −0 into 0, so always do that here
    place_R = row_R * n_heads + head_R
    _store(output, place_R * WIDTH, live_R, output_RE, WIDTH, LANES)
    tl.store(log_sum + place_R, peak_R + tl.log(total_R), mask=live_R)


@_kernel
def query_gradients(
    query, key, value, output, grad, log_sum, common, grad_query,
    rows, queries, firsts, keys, tile_sequence, tile_query,
    scaling, window, n_keys, n_heads, query_row, query_head, grad_row, grad_head,
    key_row, key_head, value_row, value_head,
    FOLD: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile's queries, and the common part of each row's score gradients; without a cache."""
    sequence, start = tl.load(tile_sequence + tl.program_id(0)).to(tl.int64), tl.load(tile_query + tl.program_id(0))
    n_queries, first = tl.load(queries + sequence), tl.load(firsts + sequence)
    own_R, head_R, live_R = _rows(start, n_queries, FOLD, STEP, ROWS)
    row_R = (tl.load(rows + sequence) + own_R).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    head_R = head * FOLD + head_R
    place_R = row_R * n_heads + head_R
    query_RE = _load(query, row_R * (query_row * UNIT) + head_R * (query_head * UNIT), live_R, WIDTH, LANES)
    grad_RE = _load(grad, row_R * (grad_row * UNIT) + head_R * (grad_head * UNIT), live_R, WIDTH, LANES)
    output_RE = _load(output, place_R * WIDTH, live_R, WIDTH, LANES)
    common_R = tl.sum(grad_RE.to(tl.float32) * output_RE.to(tl.float32), 1)
    tl.store(common + place_R, common_R, mask=live_R)
    log_sum_R = tl.load(log_sum + place_R, mask=live_R, other=0.0)
    sum_RE = tl.zeros([ROWS, LANES], tl.float32)
    end = first + tl.minimum(start + STEP, n_queries)
    begin = tl.maximum(first + start - window + 1, 0) // KEYS * KEYS
    for block in tl.range(begin, end, KEYS):
        key_C = block + tl.arange(0, KEYS)
        live_C = key_C < end
        table_C = tl.load(keys + sequence * n_keys + key_C, mask=live_C, other=0).to(tl.int64)
        key_CE = _load(key, table_C * (key_row * UNIT) + head * (key_head * UNIT), live_C, WIDTH, LANES)
        value_CE = _load(value, table_C * (value_row * UNIT) + head * (value_head * UNIT), live_C, WIDTH, LANES)
        score_RC, slope_RC = _scores(query_RE, key_CE, scaling, SOFTCAP, WIDEN)
        seen_RC = _seen(first + own_R, live_R, key_C, window)
        _, part_RC = _score_gradients(score_RC, slope_RC, seen_RC, log_sum_R, common_R, grad_RE, value_CE, WIDEN)
        sum_RE = _dot(part_RC.to(key_CE.dtype), key_CE, sum_RE, WIDEN)
    _store(grad_query, place_R * WIDTH, live_R, sum_RE, WIDTH, LANES)


@_kernel
def key_gradients(
    query, key, value, grad, log_sum, common, grad_key, grad_value,
    rows, queries, firsts, keys, block_sequence, block_key,
    scaling, window, n_keys, n_heads, query_row, query_head, grad_row, grad_head,
    key_row, key_head, value_row, value_head,
    FOLD: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, summed over the sequence's own tiles in order; fp32."""
    sequence, block = tl.load(block_sequence + tl.program_id(0)).to(tl.int64), tl.load(block_key + tl.program_id(0))
    n_queries, first = tl.load(queries + sequence), tl.load(firsts + sequence)
    first_row = tl.load(rows + sequence)
    head = tl.program_id(1).to(tl.int64)
    key_C = block + tl.arange(0, KEYS)
    live_C = key_C < first + n_queries
    table_C = tl.load(keys + sequence * n_keys + key_C, mask=live_C, other=0).to(tl.int64)
    key_CE = _load(key, table_C * (key_row * UNIT) + head * (key_head * UNIT), live_C, WIDTH, LANES)
    value_CE = _load(value, table_C * (value_row * UNIT) + head * (value_head * UNIT), live_C, WIDTH, LANES)
    key_sum_CE = tl.zeros([KEYS, LANES], tl.float32)
    value_sum_CE = tl.zeros([KEYS, LANES], tl.float32)
    begin = tl.maximum(block - first, 0) // STEP * STEP
    end = tl.minimum(n_queries, block + KEYS - 1 + window - first)
    for start in tl.range(begin, end, STEP):
        own_R, head_R, live_R = _rows(start, n_queries, FOLD, STEP, ROWS)
        row_R = (first_row + own_R).to(tl.int64)
        head_R = head * FOLD + head_R
        place_R = row_R * n_heads + head_R
        query_RE = _load(query, row_R * (query_row * UNIT) + head_R * (query_head * UNIT), live_R, WIDTH, LANES)
        grad_RE = _load(grad, row_R * (grad_row * UNIT) + head_R * (grad_head * UNIT), live_R, WIDTH, LANES)
        log_sum_R = tl.load(log_sum + place_R, mask=live_R, other=0.0)
        common_R = tl.load(common + place_R, mask=live_R, other=0.0)
        score_RC, slope_RC = _scores(query_RE, key_CE, scaling, SOFTCAP, WIDEN)
        seen_RC = _seen(first + own_R, live_R, key_C, window)
        weight_RC, part_RC = _score_gradients(
            score_RC, slope_RC, seen_RC, log_sum_R, common_R, grad_RE, value_CE, WIDEN
        )
        value_sum_CE = _dot(tl.trans(weight_RC.to(grad_RE.dtype)), grad_RE, value_sum_CE, WIDEN)
        key_sum_CE = _dot(tl.trans(part_RC.to(query_RE.dtype)), query_RE, key_sum_CE, WIDEN)
    place_C = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    place_C = (place_C * tl.num_programs(1) + head) * WIDTH
    _store(grad_key, place_C, key_C >= 0, key_sum_CE, WIDTH, LANES)
    _store(grad_value, place_C, key_C >= 0, value_sum_CE, WIDTH, LANES)


@_kernel
def collect(key, value, grad_key, grad_value, readers, places, columns, CHUNK: tl.constexpr):
    """Gradients of one packed row: the sum over all sequences that read it, in order."""
    row = tl.program_id(0).to(tl.int64)
    column_E = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    live_E = column_E < columns
    key_E, value_E = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for reader in tl.range(tl.load(readers + row), tl.load(readers + row + 1)):
        at_E = tl.load(places + reader).to(tl.int64) * columns + column_E
        key_E += tl.load(key + at_E, mask=live_E, other=0.0)
        value_E += tl.load(value + at_E, mask=live_E, other=0.0)
    tl.store(grad_key + row * columns + column_E, key_E.to(grad_key.dtype.element_ty), mask=live_E)
    tl.store(grad_value + row * columns + column_E, value_E.to(grad_value.dtype.element_ty), mask=live_E)
