# mypy: disable-error-code="no-untyped-def"
"""Gradients of attention, without atomic additions. `motet.kernels.cuda.attention_back` launches these kernels.

Each number is written by one program, which adds in an order that the sequence alone gives: of a query over its keys, of a
key over the queries that see it, sequence after sequence where several share it. Folded rows, items and uppercase arguments
are those of `attention`; STEP is the number of queries in a tile.

Legend: T packed rows, H query heads, E head width, C keys, R rows of a tile, I items, U users of a block, P places.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel, part
from motet.model.attention.triton_kernels import tanh


@part
def _scores(query_RE, key_CE, position_R, key_C, live_R, scaling, window, SOFTCAP: tl.constexpr):
    """Scores, which rows see which keys, and the slopes of scores in the products of queries and keys."""
    zeros_RC = tl.zeros([query_RE.shape[0], key_CE.shape[0]], tl.float32)
    score_RC = tl.dot(query_RE, tl.trans(key_CE), zeros_RC, input_precision="ieee") * scaling
    slope_RC = zeros_RC + scaling
    if SOFTCAP > 0:
        capped_RC = tanh(score_RC / SOFTCAP)
        score_RC = capped_RC * SOFTCAP
        slope_RC *= 1.0 - capped_RC * capped_RC
    distance_RC = position_R[:, None] - key_C[None, :]
    seen_RC = (distance_RC >= 0) & (distance_RC < window) & live_R[:, None]
    return score_RC, seen_RC, slope_RC


@part
def _places(
    table, page, last, head,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Positions of a page's keys, their elements in the pools, and which are read."""
    lane_E = tl.arange(0, LANES)
    key_C = page + tl.arange(0, KEYS)
    block = tl.load(table + page // BLOCK).to(tl.int64)
    place_C = (block * KV_HEADS + head) * BLOCK + page % BLOCK + tl.arange(0, KEYS)
    return key_C, place_C[:, None] * WIDTH + lane_E[None, :], (key_C < last)[:, None] & (lane_E < WIDTH)[None, :]


@kernel("query", "keys", "values", "output", "slope", "query_slope")
def attend_back_queries(
    query, keys, values, output, slope, query_slope, logs, dots, items, tables, scaling, window, n_entries,
    KV_HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fill query_slope [T, H, E] from slope [T, H, E], the output's.

    Also logs [T, H], the logarithms of the sums of weights, and dots [T, H], the products of output and slope.
    """
    item, head = items + tl.program_id(0) * 8, tl.program_id(1)
    row_R, lane_E = tl.arange(0, ROWS), tl.arange(0, LANES)
    row, position, n_queries = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    table = tables + tl.load(item + 3).to(tl.int64) * n_entries
    live_R = row_R // FOLD < n_queries
    mask_RE = live_R[:, None] & (lane_E < WIDTH)[None, :]
    at_R = ((row + row_R // FOLD) * KV_HEADS + head) * FOLD + row_R % FOLD
    at_RE = at_R[:, None] * WIDTH + lane_E[None, :]
    query_RE = tl.load(query + at_RE, mask=mask_RE, other=0.0)
    slope_RE = tl.load(slope + at_RE, mask=mask_RE, other=0.0)
    output_RE = tl.load(output + at_RE, mask=mask_RE, other=0.0)
    dot_R = tl.sum(output_RE.to(tl.float32) * slope_RE.to(tl.float32), 1)
    position_R, last = position + row_R // FOLD, position + n_queries
    begin = tl.maximum(position - window + 1, 0) // KEYS * KEYS
    peak_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    for page in range(begin, last, KEYS):
        key_C, at_CE, held_CE = _places(table, page, last, head, KV_HEADS, WIDTH, LANES, BLOCK, KEYS)
        key_CE = tl.load(keys + at_CE, mask=held_CE, other=0.0)
        score_RC, seen_RC, _ = _scores(query_RE, key_CE, position_R, key_C, live_R, scaling, window, SOFTCAP)
        score_RC = tl.where(seen_RC, score_RC, float("-inf"))
        higher_R = tl.maximum(peak_R, tl.max(score_RC, 1))
        finite_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
        total_R = total_R * tl.exp(peak_R - finite_R) + tl.sum(tl.exp(score_RC - finite_R[:, None]), 1)
        peak_R = higher_R
    log_R = tl.where(live_R, peak_R + tl.log(tl.where(live_R, total_R, 1.0)), 0.0)
    tl.store(logs + at_R, log_R, mask=live_R)
    tl.store(dots + at_R, dot_R, mask=live_R)
    sum_RE = tl.zeros([ROWS, LANES], tl.float32)
    for page in range(begin, last, KEYS):
        key_C, at_CE, held_CE = _places(table, page, last, head, KV_HEADS, WIDTH, LANES, BLOCK, KEYS)
        key_CE = tl.load(keys + at_CE, mask=held_CE, other=0.0)
        value_CE = tl.load(values + at_CE, mask=held_CE, other=0.0)
        score_RC, seen_RC, by_RC = _scores(query_RE, key_CE, position_R, key_C, live_R, scaling, window, SOFTCAP)
        weight_RC = tl.where(seen_RC, tl.exp(score_RC - log_R[:, None]), 0.0)
        zeros_RC = tl.zeros([ROWS, KEYS], tl.float32)
        weight_slope_RC = tl.dot(slope_RE, tl.trans(value_CE), zeros_RC, input_precision="ieee")
        score_slope_RC = tl.where(seen_RC, weight_RC * (weight_slope_RC - dot_R[:, None]) * by_RC, 0.0)
        sum_RE = tl.dot(score_slope_RC.to(key_CE.dtype), key_CE, sum_RE, input_precision="ieee")
    tl.store(query_slope + at_RE, sum_RE.to(query_slope.dtype.element_ty), mask=mask_RE)


@kernel("query", "keys", "values", "slope", "key_slope", "value_slope")
def attend_back_keys(
    query, keys, values, slope, key_slope, value_slope, logs, dots, items, users, scaling, window,
    KV_HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fill the gradients of up to KEYS keys and values, fp32, in pools like theirs.

    Items [I, 5] are keys of one block: the block, their first position, how many, their first user, the end of their users.
    Users [U, 3] are sequences whose rows may see them: the first row, the number of rows, the first row's position.
    """
    STEP: tl.constexpr = ROWS // FOLD
    item, head = items + tl.program_id(0) * 5, tl.program_id(1)
    block, first_key, n_keys = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    row_R, lane_E, column_C = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, KEYS)
    place_C = (block * KV_HEADS + head) * BLOCK + first_key % BLOCK + column_C
    at_CE = place_C[:, None] * WIDTH + lane_E[None, :]
    held_CE = (column_C < n_keys)[:, None] & (lane_E < WIDTH)[None, :]
    key_CE = tl.load(keys + at_CE, mask=held_CE, other=0.0)
    value_CE = tl.load(values + at_CE, mask=held_CE, other=0.0)
    key_sum_CE = tl.zeros([KEYS, LANES], tl.float32)
    value_sum_CE = tl.zeros([KEYS, LANES], tl.float32)
    for user in range(tl.load(item + 3), tl.load(item + 4)):
        row, n_rows = tl.load(users + user * 3).to(tl.int64), tl.load(users + user * 3 + 1)
        position = tl.load(users + user * 3 + 2)
        start = tl.maximum(first_key - position, 0) // STEP * STEP
        end = tl.minimum(n_rows, first_key + n_keys - 1 + window - position)
        for first in range(start, end, STEP):
            own_R = first + row_R // FOLD
            live_R = (row_R // FOLD < STEP) & (own_R < n_rows)
            mask_RE = live_R[:, None] & (lane_E < WIDTH)[None, :]
            at_R = ((row + own_R) * KV_HEADS + head) * FOLD + row_R % FOLD
            at_RE = at_R[:, None] * WIDTH + lane_E[None, :]
            query_RE = tl.load(query + at_RE, mask=mask_RE, other=0.0)
            slope_RE = tl.load(slope + at_RE, mask=mask_RE, other=0.0)
            log_R = tl.load(logs + at_R, mask=live_R, other=0.0)
            dot_R = tl.load(dots + at_R, mask=live_R, other=0.0)
            score_RC, seen_RC, by_RC = _scores(
                query_RE, key_CE, position + own_R, first_key + column_C, live_R, scaling, window, SOFTCAP
            )
            weight_RC = tl.where(seen_RC, tl.exp(score_RC - log_R[:, None]), 0.0)
            zeros_RC = tl.zeros([ROWS, KEYS], tl.float32)
            weight_slope_RC = tl.dot(slope_RE, tl.trans(value_CE), zeros_RC, input_precision="ieee")
            score_slope_RC = tl.where(seen_RC, weight_RC * (weight_slope_RC - dot_R[:, None]) * by_RC, 0.0)
            value_sum_CE = tl.dot(
                tl.trans(weight_RC.to(slope_RE.dtype)), slope_RE, value_sum_CE, input_precision="ieee"
            )
            key_sum_CE = tl.dot(
                tl.trans(score_slope_RC.to(query_RE.dtype)), query_RE, key_sum_CE, input_precision="ieee"
            )
    tl.store(key_slope + at_CE, key_sum_CE, mask=held_CE)
    tl.store(value_slope + at_CE, value_sum_CE, mask=held_CE)


@kernel("key_slope", "value_slope")
def add_copies(
    key_slope, value_slope, sources, starts, targets,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a place's copies to its own: of source p, copies [starts[p], starts[p + 1]) in order."""
    index = tl.program_id(0)
    head_K, lane_E = tl.arange(0, HEADS), tl.arange(0, LANES)
    mask_KE = (head_K < KV_HEADS)[:, None] & (lane_E < WIDTH)[None, :]
    source = tl.load(sources + index)
    to_K = (source // BLOCK * KV_HEADS + head_K) * BLOCK + source % BLOCK
    to_KE = to_K[:, None] * WIDTH + lane_E[None, :]
    key_KE = tl.load(key_slope + to_KE, mask=mask_KE, other=0.0)
    value_KE = tl.load(value_slope + to_KE, mask=mask_KE, other=0.0)
    for copy in range(tl.load(starts + index), tl.load(starts + index + 1)):
        target = tl.load(targets + copy)
        from_K = (target // BLOCK * KV_HEADS + head_K) * BLOCK + target % BLOCK
        from_KE = from_K[:, None] * WIDTH + lane_E[None, :]
        key_KE += tl.load(key_slope + from_KE, mask=mask_KE, other=0.0)
        value_KE += tl.load(value_slope + from_KE, mask=mask_KE, other=0.0)
    tl.store(key_slope + to_KE, key_KE, mask=mask_KE)
    tl.store(value_slope + to_KE, value_KE, mask=mask_KE)
