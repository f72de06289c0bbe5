# mypy: disable-error-code="no-untyped-def"
"""Kernels from a head's products to logprobs and drawn tokens.

Weights are added as whole numbers (`_whole`), whose sum has the same bits in every order. So a row's sum depends on no tile,
dtype, compilation or neighbour, and sampling and passes find the same logprob.

Uppercase arguments are compile-time constants: the vocabulary V, its BLOCKS of 256 ids (padded to LANES), and a head's own
changes (SCALE, DIVIDE and CAP, 0 if it has none; see `LogitChanges`). The logit of an id that `present` or `allowed` excludes
is −∞. Bit i % 32 of word i // 32 of those stands for id i; both may be None.

Legend: C ids of a block, P blocks of a program, B all blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

BLOCK = 256
"""Ids whose weights are added first, as in `model.distribution`."""
_BLOCK = tl.constexpr(BLOCK)
_THREE = tl.constexpr(0x40400000)
"""Bits of 3."""
_SMALL = tl.constexpr(0x35C00000)
"""Bits of 1.5 · 2⁻²⁰."""
_UNIT = tl.constexpr(2.0**-43)
_INF = tl.constexpr(float("inf"))
_ALIGNED = {"raw", "out", "sums"}
"""Arguments aligned to 16 bytes where their size allows it; others may have any alignment."""


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile for argument types only, so that no number of rows changes the machine code."""
    names = [name for name in inspect.signature(function).parameters if name.islower() and name not in _ALIGNED]
    return triton.jit(function, do_not_specialize=names)


def _part(function: Callable[..., Any]) -> Any:
    """A function that kernels call."""
    return triton.jit(function)


# --- parts ------------------------------------------------------------------------------------------------------------


@_part
def _tanh(x):
    """Tanh from exp, which is accurate away from 0; near 0 from the Taylor series, with a relative error up to 3e-7."""
    small = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * tl.div_rn(1.0 - small, 1.0 + small)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(square < 0.0625, near, far)


@_part
def _divided(x, divisor):
    """Quotient, rounded to nearest."""
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@_part
def _finished(raw, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr):
    """fp32 logits of a head's products, before ids are excluded."""
    x = raw.to(tl.float32)
    if SCALE != 0:
        x = x * SCALE
    if DIVIDE != 0:
        x = _divided(x, DIVIDE)
    if CAP != 0:
        x = _tanh(_divided(x, CAP)) * CAP
    return x


@_part
def _kept(bits, id, live):
    """Whether an id's bit is set."""
    words = tl.load(bits + id // 32, mask=live, other=0)
    return ((words >> (id % 32)) & 1) != 0


@_part
def _logits(
    raw, present, allowed, row, id, temperature,
    V: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Finished logits over the temperature: −∞ for ids that are excluded or outside the vocabulary, ∞ for NaN."""
    live = id < V
    x = _finished(tl.load(raw + row * V + id, mask=live, other=0.0), SCALE, DIVIDE, CAP)
    x = tl.where(x == x, x, _INF)
    kept = live
    if present is not None:
        kept = kept & _kept(present, id, live)
    if allowed is not None:
        kept = kept & _kept(allowed + row * ((V + 31) // 32), id, live)
    x = tl.where(kept, x, -_INF)
    if temperature != 1.0:
        x = _divided(x, temperature)
    return x


@_part
def _temperature(temperature, row):
    """A row's temperature and whether it is greedy; logprobs of greedy rows are of undivided logits."""
    own = tl.load(temperature + row)
    greedy = own == 0.0
    return tl.where(greedy, 1.0, own), greedy


@_part
def _whole(weight):
    """Two int32 numbers for a weight from 0 to 1: its multiples of 2⁻²², and the rest's of 2⁻⁴³, rounded.

    A float's bits count the last places of its binade: those of 3 to 4 are 2⁻²², those from 2⁻²⁰ on are 2⁻⁴³. 256 of either
    number add up within 31 bits.
    """
    high = weight + 3.0
    low = weight - (high - 3.0)
    return high.to(tl.int32, bitcast=True) - _THREE, (low + 1.5 * 2.0**-20).to(tl.int32, bitcast=True) - _SMALL


@_part
def _joined(high, low):
    """Multiples of 2⁻⁴³, int64."""
    return high.to(tl.int64) * 2097152 + low.to(tl.int64)


@_part
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < _INF, x, 0.0)


@_part
def _row_weights(peaks, sums, row, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Peaks of a row's blocks and their weights beside the row's peak, in multiples of 2⁻⁴³; that peak; if it is usable."""
    block_B = tl.arange(0, LANES)
    live_B = block_B < BLOCKS
    peak_B = tl.load(peaks + row * BLOCKS + block_B, mask=live_B, other=-_INF)
    sum_B = tl.load(sums + row * BLOCKS + block_B, mask=live_B, other=0)
    top = tl.max(peak_B, 0)
    usable = tl.abs(top) < _INF
    shares_B = tl.exp(peak_B.to(tl.float64) - _finite_or_zero(top).to(tl.float64))
    weight_B = (sum_B.to(tl.float64) * tl.where(usable, shares_B, 0.0)).to(tl.int64)
    return peak_B, weight_B, top, usable


@_part
def _log_total(total, usable):
    """Of a row's total weight beside its peak, fp64; NaN where the row is not usable."""
    return tl.where(usable, tl.log(tl.maximum(total, 1).to(tl.float64) * _UNIT), float("nan"))


@_part
def _logprob(x, top, log_total):
    """Logprob of a logit, added as `Distribution` adds it."""
    return (x - top) - log_total.to(tl.float32)


@_part
def number_of(key, position):
    """The multiple of 2⁻⁵³ that `core.seeds.uniforms` returns for a key and a position, as uint64."""
    state = key.to(tl.uint64) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return (state ^ (state >> 31)) >> 11


@_part
def _number(key, position, row):
    """A row's number, from its key and position or, without positions, as it is given."""
    if position is None:
        return tl.load(key + row).to(tl.uint64)
    else:
        return number_of(tl.load(key + row), tl.load(position + row))


@_part
def _target(number, total):
    """⌊u · total⌋ of a uniform number in multiples of 2⁻⁵³; below the total."""
    return tl.umulhi(number << 11, total.to(tl.uint64)).to(tl.int64)


# --- kernels ----------------------------------------------------------------------------------------------------------


@_kernel
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
    id_PC = block_P[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    own_temperature, _ = _temperature(temperature, row)
    x_PC = _logits(raw, present, allowed, row, id_PC, own_temperature, V, SCALE, DIVIDE, CAP)
    peak_P = tl.max(x_PC, 1)
    below_PC = x_PC - _finite_or_zero(peak_P)[:, None]
    weight_PC = tl.exp(below_PC)
    high_PC, low_PC = _whole(weight_PC)
    place_P, live_P = row * BLOCKS + block_P, block_P < BLOCKS
    tl.store(peaks + place_P, peak_P, mask=live_P)
    tl.store(sums + place_P, _joined(tl.sum(high_PC, 1), tl.sum(low_PC, 1)), mask=live_P)
    if products is not None:
        product_PC = tl.where(weight_PC > 0, weight_PC * below_PC, 0.0)
        tl.store(products + place_P, tl.sum((product_PC * 16777216.0).to(tl.int32), 1), mask=live_P)


@_kernel
def pick(
    raw, present, allowed, temperature, key, position, peaks, sums, token, logprob, usable,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The token of a row at which its cumulative weight passes ⌊u · total⌋, its logprob, and whether the row is usable."""
    row = tl.program_id(0).to(tl.int64)
    own_temperature, greedy = _temperature(temperature, row)
    peak_B, weight_B, top, good = _row_weights(peaks, sums, row, BLOCKS, LANES)
    total = tl.sum(weight_B, 0)
    target = _target(_number(key, position, row), total)
    block_B = tl.arange(0, LANES)
    drawn = tl.sum((tl.cumsum(weight_B, 0) <= target).to(tl.int32), 0)
    likeliest = tl.min(tl.where(peak_B == top, block_B, LANES), 0)
    block = tl.where(good, tl.where(greedy, likeliest, drawn), 0)
    own_B = block_B == block
    peak = tl.max(tl.where(own_B, peak_B, -_INF), 0)
    weight = tl.sum(tl.where(own_B, weight_B, 0), 0)
    rest = target - tl.sum(tl.where(block_B < block, weight_B, 0), 0)

    place_C = tl.arange(0, _BLOCK)
    x_C = _logits(raw, present, allowed, row, block * _BLOCK + place_C, own_temperature, V, SCALE, DIVIDE, CAP)
    high_C, low_C = _whole(tl.exp(x_C - _finite_or_zero(peak)))
    whole_C = _joined(high_C, low_C)
    sum = tl.sum(whole_C, 0)
    share = rest.to(tl.float64) / tl.maximum(weight, 1).to(tl.float64)
    aim = tl.minimum((share * sum.to(tl.float64)).to(tl.int64), sum - 1)
    passed = tl.sum((tl.cumsum(whole_C, 0) <= aim).to(tl.int32), 0)
    best = tl.min(tl.where(x_C == peak, place_C, _BLOCK), 0)
    place = tl.where(good, tl.where(greedy, best, passed), 0)
    x = tl.max(tl.where(place_C == place, x_C, -_INF), 0)
    tl.store(token + row, block.to(tl.int64) * _BLOCK + place)
    tl.store(logprob + row, _logprob(x, top, _log_total(total, good)))
    tl.store(usable + row, good)


@_kernel
def score(
    raw, present, temperature, token, peaks, sums, products, logprob, entropy, tops, shares,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The logprob of a row's token, its entropy, its peak, and 1 over its total weight beside that."""
    row = tl.program_id(0).to(tl.int64)
    own_temperature, _ = _temperature(temperature, row)
    peak_B, weight_B, top, good = _row_weights(peaks, sums, row, BLOCKS, LANES)
    total = tl.sum(weight_B, 0)
    log_total = _log_total(total, good)
    x = _logits(raw, present, None, row, tl.load(token + row), own_temperature, V, SCALE, DIVIDE, CAP)

    block_B = tl.arange(0, LANES)
    live_B = (block_B < BLOCKS) & (tl.abs(peak_B) < _INF)
    below_B = tl.where(live_B, peak_B - top, 0.0).to(tl.float64)
    sum_B = tl.load(sums + row * BLOCKS + block_B, mask=live_B, other=0).to(tl.float64)
    product_B = tl.load(products + row * BLOCKS + block_B, mask=live_B, other=0).to(tl.float64)
    part_B = tl.exp(below_B) * (product_B * 524288.0 + below_B * sum_B)  # multiples of 2⁻²⁴ are 2¹⁹ of 2⁻⁴³
    expected = tl.sum(tl.where(good, part_B, 0.0).to(tl.int64), 0).to(tl.float64) / tl.maximum(total, 1).to(tl.float64)

    tl.store(logprob + row, _logprob(x, top, log_total))
    tl.store(entropy + row, (log_total - expected).to(tl.float32))
    tl.store(tops + row, top)
    share = 1.0 / (tl.maximum(total, 1).to(tl.float64) * _UNIT)
    tl.store(shares + row, tl.where(good, share, float("nan")).to(tl.float32))


@_kernel
def slopes(
    raw, present, temperature, token, tops, shares, out,
    V: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Gradients of tokens' logprobs with respect to the head's products; `out` may be `raw`."""
    row = tl.program_id(0).to(tl.int64)
    id_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own_temperature, _ = _temperature(temperature, row)
    x_C = _logits(raw, present, None, row, id_C, own_temperature, V, SCALE, DIVIDE, CAP)
    prob_C = tl.exp(x_C - tl.load(tops + row)) * tl.load(shares + row)
    slope_C = tl.where(id_C == tl.load(token + row), 1.0, 0.0) - prob_C
    if own_temperature != 1.0:
        slope_C = _divided(slope_C, own_temperature)
    if CAP != 0:
        raw_C = tl.load(raw + row * V + id_C, mask=id_C < V, other=0.0)
        capped_C = _divided(_finished(raw_C, SCALE, DIVIDE, CAP), CAP)
        slope_C = slope_C * (1.0 - capped_C * capped_C)
    if SCALE != 0:
        slope_C = slope_C * SCALE
    if DIVIDE != 0:
        slope_C = _divided(slope_C, DIVIDE)
    slope_C = tl.where(x_C == -_INF, 0.0, slope_C)
    tl.store(out + row * V + id_C, slope_C.to(out.dtype.element_ty), mask=id_C < V)


@_kernel
def finish(
    raw, present, out, V: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """fp32 logits of a head's products."""
    row = tl.program_id(0).to(tl.int64)
    id_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live_C = id_C < V
    x_C = _finished(tl.load(raw + row * V + id_C, mask=live_C, other=0.0), SCALE, DIVIDE, CAP)
    if present is not None:
        x_C = tl.where(_kept(present, id_C, live_C), x_C, -_INF)
    tl.store(out + row * V + id_C, x_C, mask=live_C)
