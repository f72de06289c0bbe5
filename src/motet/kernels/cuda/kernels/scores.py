# mypy: disable-error-code="no-untyped-def"
"""Kernels from a head's products to logprobs, entropies and gradients of given tokens.

See `weights` for their arguments.

Legend: C ids of a tile, B blocks of 256 ids.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel
from motet.kernels.cuda.kernels.weights import (
    INF,
    UNIT,
    bit_of,
    divided,
    finished,
    log_of_total,
    logits,
    logprob_of,
    row_weights,
    temperature_of,
)


@kernel("raw", "sums")
def score(
    raw, present, temperature, token, peaks, sums, products, logprob, entropy, tops, shares,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The logprob of a row's token, its entropy, its peak, and 1 over its total weight beside that."""
    row = tl.program_id(0).to(tl.int64)
    own_temperature, _ = temperature_of(temperature, row)
    peak_B, weight_B, top, good = row_weights(peaks, sums, row, BLOCKS, LANES)
    total = tl.sum(weight_B, 0)
    log_total = log_of_total(total, good)
    x = logits(raw, present, None, row, tl.load(token + row), own_temperature, V, SCALE, DIVIDE, CAP)

    block_B = tl.arange(0, LANES)
    live_B = (block_B < BLOCKS) & (tl.abs(peak_B) < INF)
    below_B = tl.where(live_B, peak_B - top, 0.0).to(tl.float64)
    sum_B = tl.load(sums + row * BLOCKS + block_B, mask=live_B, other=0).to(tl.float64)
    product_B = tl.load(products + row * BLOCKS + block_B, mask=live_B, other=0).to(tl.float64)
    part_B = tl.exp(below_B) * (product_B * 524288.0 + below_B * sum_B)  # multiples of 2⁻²⁴ are 2¹⁹ of 2⁻⁴³
    expected = tl.sum(tl.where(good, part_B, 0.0).to(tl.int64), 0).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)

    tl.store(logprob + row, logprob_of(x, top, log_total))
    tl.store(entropy + row, (log_total - expected).to(tl.float32))
    tl.store(tops + row, top)
    share = 1.0 / (tl.maximum(total, 1).to(tl.float64) * UNIT)
    tl.store(shares + row, tl.where(good, share, float("nan")).to(tl.float32))


@kernel("raw", "out")
def slopes(
    raw, present, temperature, token, tops, shares, out,
    V: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Gradients of tokens' logprobs with respect to the head's products; `out` may be `raw`."""
    row = tl.program_id(0).to(tl.int64)
    id_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own_temperature, _ = temperature_of(temperature, row)
    x_C = logits(raw, present, None, row, id_C, own_temperature, V, SCALE, DIVIDE, CAP)
    prob_C = tl.exp(x_C - tl.load(tops + row)) * tl.load(shares + row)
    slope_C = tl.where(id_C == tl.load(token + row), 1.0, 0.0) - prob_C
    if own_temperature != 1.0:
        slope_C = divided(slope_C, own_temperature)
    if CAP != 0:
        raw_C = tl.load(raw + row * V + id_C, mask=id_C < V, other=0.0)
        capped_C = divided(finished(raw_C, SCALE, DIVIDE, CAP), CAP)
        slope_C = slope_C * (1.0 - capped_C * capped_C)
    if SCALE != 0:
        slope_C = slope_C * SCALE
    if DIVIDE != 0:
        slope_C = divided(slope_C, DIVIDE)
    slope_C = tl.where(x_C == -INF, 0.0, slope_C)
    tl.store(out + row * V + id_C, slope_C.to(out.dtype.element_ty), mask=id_C < V)


@kernel("raw", "out")
def finish(
    raw, present, out, V: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """fp32 logits of a head's products."""
    row = tl.program_id(0).to(tl.int64)
    id_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live_C = id_C < V
    x_C = finished(tl.load(raw + row * V + id_C, mask=live_C, other=0.0), SCALE, DIVIDE, CAP)
    if present is not None:
        x_C = tl.where(bit_of(present, id_C, live_C), x_C, -INF)
    tl.store(out + row * V + id_C, x_C, mask=live_C)
