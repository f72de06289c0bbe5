# mypy: disable-error-code="no-untyped-def"
"""The kernel that draws where rows are truncated, without a sort.

WIDTH ids are a tile, which is skipped where none of its weights matters. See `weights` for its arguments.

Legend: C ids of a tile, P its blocks of 256, B all blocks.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel, part
from motet.kernels.cuda.kernels.weights import (
    IDS,
    INF,
    LEAST,
    ONE,
    aim_of,
    joined,
    log_of_total,
    logits,
    logprob_of,
    own_number,
    row_weights,
    temperature_of,
    whole,
)


@part
def _tile_weights(
    raw, present, allowed, row, tile, temperature, top,
    V: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Weights of a tile's ids beside the row's peak: the bits of the floats, which order them, and multiples of 2⁻⁴³."""
    id_C = tile * WIDTH + tl.arange(0, WIDTH)
    weight_C = tl.exp(logits(raw, present, allowed, row, id_C, temperature, V, SCALE, DIVIDE, CAP) - top)
    high_C, low_C = whole(weight_C)
    return weight_C.to(tl.int32, bitcast=True), joined(high_C, low_C)


@part
def _tile_peak(peaks, row, tile, top, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Bits of the largest weight of a tile."""
    block_P = tile * (WIDTH // IDS) + tl.arange(0, WIDTH // IDS)
    peak = tl.max(tl.load(peaks + row * BLOCKS + block_P, mask=block_P < BLOCKS, other=-INF), 0)
    return tl.exp(peak - top).to(tl.int32, bitcast=True)


@part
def _from(
    raw, present, allowed, peaks, row, temperature, top, least,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The number of ids whose weights have bits of `least` or more, and the sum of their weights."""
    count_C = tl.zeros([WIDTH], tl.int32)
    sum_C = tl.zeros([WIDTH], tl.int64)
    for tile in range((V + WIDTH - 1) // WIDTH):
        if _tile_peak(peaks, row, tile, top, BLOCKS, WIDTH) >= least:
            bits_C, whole_C = _tile_weights(
                raw, present, allowed, row, tile, temperature, top, V, WIDTH, SCALE, DIVIDE, CAP
            )
            count_C += (bits_C >= least).to(tl.int32)
            sum_C += tl.where(bits_C >= least, whole_C, 0)
    return tl.sum(count_C, 0).to(tl.int64), tl.sum(sum_C, 0)


@part
def _threshold(
    raw, present, allowed, peaks, row, temperature, top, low, goal, BY_SUM: tl.constexpr,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The largest bits from which on ids reach a goal, by number or sum; number and sum of what is heavier.

    `low` where ids heavier than that do not reach it.
    """
    high = low * 0 + ONE
    count = low.to(tl.int64) * 0
    sum = low.to(tl.int64) * 0
    while low < high:
        middle = low + (high - low + 1) // 2
        count_from, sum_from = _from(
            raw, present, allowed, peaks, row, temperature, top, middle, V, BLOCKS, WIDTH, SCALE, DIVIDE, CAP
        )
        reached = (sum_from if BY_SUM else count_from) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
        count = tl.where(reached, count, count_from)
        sum = tl.where(reached, sum, sum_from)
    return low, count, sum


@part
def _place(
    raw, present, allowed, peaks, row, temperature, top, threshold, ties, target,
    V: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The id at which the cumulative weight of ids above a threshold, and of the first `ties` at it, passes a target."""
    before, seen, found = target * 0, target * 0, target * 0
    for tile in range((V + WIDTH - 1) // WIDTH):
        if _tile_peak(peaks, row, tile, top, BLOCKS, WIDTH) >= threshold:
            bits_C, whole_C = _tile_weights(
                raw, present, allowed, row, tile, temperature, top, V, WIDTH, SCALE, DIVIDE, CAP
            )
            tied_C = (bits_C == threshold).to(tl.int64)
            first_C = seen + tl.cumsum(tied_C, 0) <= ties
            kept_C = tl.where((bits_C > threshold) | ((tied_C > 0) & first_C), whole_C, 0)
            end = before + tl.sum(kept_C, 0)
            place = tl.sum((before + tl.cumsum(kept_C, 0) <= target).to(tl.int64), 0)
            found = tl.where((before <= target) & (target < end), tile * WIDTH + place, found)
            before = end
            seen += tl.sum(tied_C, 0)
    return found


@kernel("raw", "sums")
def pick_truncated(
    raw, present, allowed, temperature, key, position, top_k, top_p, min_p, peaks, sums, token, logprob,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Pick again in rows that truncate: by min-p (relative to the best), top-k, then top-p, in that order.

    Ids are ordered by their weights, equal ones by themselves. Those above a threshold are kept, and the first `ties` at it.
    """
    row = tl.program_id(0).to(tl.int64)
    own_temperature, greedy = temperature_of(temperature, row)
    k, p, least = tl.load(top_k + row).to(tl.int64), tl.load(top_p + row), tl.load(min_p + row)
    _, weight_B, top, good = row_weights(peaks, sums, row, BLOCKS, LANES)
    if good & (greedy == 0) & ((k > 0) | (p < 1.0) | (least > 0.0)):
        lower = tl.maximum(least.to(tl.int32, bitcast=True), LEAST) - 1
        if k > 0:
            threshold, count, heavier = _threshold(
                raw, present, allowed, peaks, row, own_temperature, top, lower, k, False,
                V, BLOCKS, WIDTH, SCALE, DIVIDE, CAP,
            )  # fmt: skip
        else:
            count, heavier = _from(
                raw, present, allowed, peaks, row, own_temperature, top, lower + 1,
                V, BLOCKS, WIDTH, SCALE, DIVIDE, CAP,
            )  # fmt: skip
            threshold = lower
        ties = tl.where(threshold > lower, k - count, 0)
        high, low = whole(threshold.to(tl.float32, bitcast=True))
        total = heavier + ties * joined(high, low)
        if p < 1.0:
            share = p.to(tl.float64) * total.to(tl.float64)
            goal = share.to(tl.int64)
            goal = tl.maximum(goal + (goal.to(tl.float64) < share).to(tl.int64), 1)
            threshold, count, heavier = _threshold(
                raw, present, allowed, peaks, row, own_temperature, top, threshold, goal, True,
                V, BLOCKS, WIDTH, SCALE, DIVIDE, CAP,
            )  # fmt: skip
            high, low = whole(threshold.to(tl.float32, bitcast=True))
            each = joined(high, low)
            ties = (goal - heavier + each - 1) // each  # never more than top-k left: the goal is a part of that sum
            total = heavier + ties * each

        target = aim_of(own_number(key, position, row), total)
        found = _place(
            raw, present, allowed, peaks, row, own_temperature, top, threshold, ties, target,
            V, BLOCKS, WIDTH, SCALE, DIVIDE, CAP,
        )  # fmt: skip
        x = logits(raw, present, allowed, row, found, own_temperature, V, SCALE, DIVIDE, CAP)
        tl.store(token + row, found)
        tl.store(logprob + row, logprob_of(x, top, log_of_total(tl.sum(weight_B, 0), good)))
