# mypy: disable-error-code="no-untyped-def"
"""Kernels from a head's products to drawn tokens.

See `weights` for their arguments.

Legend: C ids of a block, P blocks of a program, B all blocks.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel
from motet.kernels.cuda.kernels.weights import (
    IDS,
    INF,
    aim_of,
    finite_or_zero,
    joined,
    log_of_total,
    logits,
    logprob_of,
    own_number,
    row_weights,
    temperature_of,
    whole,
)


@kernel("raw", "sums")
def block_sums(
    raw, present, allowed, temperature, peaks, sums, products,
    V: tl.constexpr, BLOCKS: tl.constexpr, PER: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Of each block of a row: its peak, and the sum of its weights exp(x − peak) in multiples of 2⁻⁴³.

    `products` may be None, or receives the sums of exp(x − peak) · (x − peak) in multiples of 2⁻²⁴.
    """
    row = tl.program_id(0).to(tl.int64)
    block_P = tl.program_id(1) * PER + tl.arange(0, PER)
    id_PC = block_P[:, None] * IDS + tl.arange(0, IDS)[None, :]
    own_temperature, _ = temperature_of(temperature, row)
    x_PC = logits(raw, present, allowed, row, id_PC, own_temperature, V, SCALE, DIVIDE, CAP)
    peak_P = tl.max(x_PC, 1)
    below_PC = x_PC - finite_or_zero(peak_P)[:, None]
    weight_PC = tl.exp(below_PC)
    high_PC, low_PC = whole(weight_PC)
    place_P, live_P = row * BLOCKS + block_P, block_P < BLOCKS
    tl.store(peaks + place_P, peak_P, mask=live_P)
    tl.store(sums + place_P, joined(tl.sum(high_PC, 1), tl.sum(low_PC, 1)), mask=live_P)
    if products is not None:
        product_PC = tl.where(weight_PC > 0, weight_PC * below_PC, 0.0)
        tl.store(products + place_P, tl.sum((product_PC * 16777216.0).to(tl.int32), 1), mask=live_P)


@kernel("raw", "sums")
def pick(
    raw, present, allowed, temperature, key, position, peaks, sums, token, logprob, usable,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The token of a row at which its cumulative weight passes ⌊u · total⌋, its logprob, and whether the row is usable."""
    row = tl.program_id(0).to(tl.int64)
    own_temperature, greedy = temperature_of(temperature, row)
    peak_B, weight_B, top, good = row_weights(peaks, sums, row, BLOCKS, LANES)
    total = tl.sum(weight_B, 0)
    target = aim_of(own_number(key, position, row), total)
    block_B = tl.arange(0, LANES)
    drawn = tl.sum((tl.cumsum(weight_B, 0) <= target).to(tl.int32), 0)
    likeliest = tl.min(tl.where(peak_B == top, block_B, LANES), 0)
    block = tl.where(good, tl.where(greedy, likeliest, drawn), 0)
    own_B = block_B == block
    peak = tl.max(tl.where(own_B, peak_B, -INF), 0)
    weight = tl.sum(tl.where(own_B, weight_B, 0), 0)
    rest = target - tl.sum(tl.where(block_B < block, weight_B, 0), 0)

    place_C = tl.arange(0, IDS)
    x_C = logits(raw, present, allowed, row, block * IDS + place_C, own_temperature, V, SCALE, DIVIDE, CAP)
    high_C, low_C = whole(tl.exp(x_C - finite_or_zero(peak)))
    whole_C = joined(high_C, low_C)
    sum = tl.sum(whole_C, 0)
    share = rest.to(tl.float64) / tl.maximum(weight, 1).to(tl.float64)
    aim = tl.minimum((share * sum.to(tl.float64)).to(tl.int64), sum - 1)
    passed = tl.sum((tl.cumsum(whole_C, 0) <= aim).to(tl.int32), 0)
    best = tl.min(tl.where(x_C == peak, place_C, IDS), 0)
    place = tl.where(good, tl.where(greedy, best, passed), 0)
    x = tl.max(tl.where(place_C == place, x_C, -INF), 0)
    tl.store(token + row, block.to(tl.int64) * IDS + place)
    tl.store(logprob + row, logprob_of(x, top, log_of_total(total, good)))
    tl.store(usable + row, good)
