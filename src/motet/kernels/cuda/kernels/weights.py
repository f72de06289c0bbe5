# mypy: disable-error-code="no-untyped-def"
"""Parts of kernels that read a head's products: finished logits, and weights in whole numbers.

Weights are added as whole numbers (`whole`), whose sum has the same bits in every order. So a row's sum depends on no tile,
dtype, compilation or neighbour, and sampling and passes find the same logprob.

Uppercase arguments are compile-time constants: the vocabulary V, its BLOCKS of 256 ids (padded to LANES), and a head's own
changes (SCALE, DIVIDE and CAP, 0 if it has none; see `LogitChanges`). The logit of an id that `present` or `allowed` excludes
is −∞. Bit i % 32 of word i // 32 of those stands for id i; both may be None.

Legend: C ids of a block, P blocks of a program, B all blocks.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import part

BLOCK = 256
"""Ids whose weights are added first, as in `model.distribution`."""
IDS = tl.constexpr(BLOCK)
_THREE = tl.constexpr(0x40400000)
"""Bits of 3."""
_SMALL = tl.constexpr(0x35C00000)
"""Bits of 1.5 · 2⁻²⁰."""
UNIT = tl.constexpr(2.0**-43)
ONE = tl.constexpr(0x3F800000)
"""Bits of 1, the weight of the likeliest id."""
LEAST = tl.constexpr(0x2A000000)
"""Bits of 2⁻⁴³; truncation drops what is lighter."""
INF = tl.constexpr(float("inf"))


@part
def tanh(x):
    """Tanh from exp, which is accurate away from 0; near 0 from the Taylor series, with a relative error up to 3e-7."""
    small = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * tl.div_rn(1.0 - small, 1.0 + small)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(square < 0.0625, near, far)


@part
def divided(x, divisor):
    """Quotient, rounded to nearest."""
    return tl.div_rn(x, tl.zeros_like(x) + divisor)


@part
def finished(raw, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr):
    """fp32 logits of a head's products, before ids are excluded."""
    x = raw.to(tl.float32)
    if SCALE != 0:
        x = x * SCALE
    if DIVIDE != 0:
        x = divided(x, DIVIDE)
    if CAP != 0:
        x = tanh(divided(x, CAP)) * CAP
    return x


@part
def bit_of(bits, id, live):
    """Whether an id's bit is set."""
    words = tl.load(bits + id // 32, mask=live, other=0)
    return ((words >> (id % 32)) & 1) != 0


@part
def logits(
    raw, present, allowed, row, id, temperature,
    V: tl.constexpr, SCALE: tl.constexpr, DIVIDE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Finished logits over the temperature: −∞ for ids that are excluded or outside the vocabulary, ∞ for NaN."""
    live = id < V
    x = finished(tl.load(raw + row * V + id, mask=live, other=0.0), SCALE, DIVIDE, CAP)
    x = tl.where(x == x, x, INF)
    kept = live
    if present is not None:
        kept = kept & bit_of(present, id, live)
    if allowed is not None:
        kept = kept & bit_of(allowed + row * ((V + 31) // 32), id, live)
    x = tl.where(kept, x, -INF)
    if temperature != 1.0:
        x = divided(x, temperature)
    return x


@part
def temperature_of(temperature, row):
    """A row's temperature and whether it is greedy; logprobs of greedy rows are of undivided logits."""
    own = tl.load(temperature + row)
    greedy = own == 0.0
    return tl.where(greedy, 1.0, own), greedy


@part
def whole(weight):
    """Two int32 numbers for a weight from 0 to 1: its multiples of 2⁻²², and the rest's of 2⁻⁴³, rounded.

    A float's bits count the last places of its binade: those of 3 to 4 are 2⁻²², those from 2⁻²⁰ on are 2⁻⁴³. 256 of either
    number add up within 31 bits.
    """
    high = weight + 3.0
    low = weight - (high - 3.0)
    return high.to(tl.int32, bitcast=True) - _THREE, (low + 1.5 * 2.0**-20).to(tl.int32, bitcast=True) - _SMALL


@part
def joined(high, low):
    """Multiples of 2⁻⁴³, int64."""
    return high.to(tl.int64) * 2097152 + low.to(tl.int64)


@part
def finite_or_zero(x):
    """Zero in place of infinities."""
    return tl.where(tl.abs(x) < INF, x, 0.0)


@part
def row_weights(peaks, sums, row, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Peaks of a row's blocks and their weights beside the row's peak, in multiples of 2⁻⁴³; that peak; if it is usable."""
    block_B = tl.arange(0, LANES)
    live_B = block_B < BLOCKS
    peak_B = tl.load(peaks + row * BLOCKS + block_B, mask=live_B, other=-INF)
    sum_B = tl.load(sums + row * BLOCKS + block_B, mask=live_B, other=0)
    top = tl.max(peak_B, 0)
    usable = tl.abs(top) < INF
    shares_B = tl.exp(peak_B.to(tl.float64) - finite_or_zero(top).to(tl.float64))
    weight_B = (sum_B.to(tl.float64) * tl.where(usable, shares_B, 0.0)).to(tl.int64)
    return peak_B, weight_B, top, usable


@part
def log_of_total(total, usable):
    """Of a row's total weight beside its peak, fp64; NaN where the row is not usable."""
    return tl.where(usable, tl.log(tl.maximum(total, 1).to(tl.float64) * UNIT), float("nan"))


@part
def logprob_of(x, top, log_total):
    """Logprob of a logit, added as `Distribution` adds it."""
    return (x - top) - log_total.to(tl.float32)


@part
def number_of(key, position):
    """The multiple of 2⁻⁵³ that `core.seeds.uniforms` returns for a key and a position, as uint64."""
    state = key.to(tl.uint64) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return (state ^ (state >> 31)) >> 11


@part
def own_number(key, position, row):
    """A row's number, from its key and position or, without positions, as it is given."""
    if position is None:
        return tl.load(key + row).to(tl.uint64)
    else:
        return number_of(tl.load(key + row), tl.load(position + row))


@part
def aim_of(number, total):
    """⌊u · total⌋ of a uniform number in multiples of 2⁻⁵³; below the total."""
    return tl.umulhi(number << 11, total.to(tl.uint64)).to(tl.int64)
