# mypy: disable-error-code="no-untyped-def"
"""The gradient of the product of queries, keys and values, from those of what attention reads (see `rotary`).

Legend: T packed rows, H query heads, K KV heads, E head width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.adapters import TILE, rows_of
from motet.kernels.cuda.kernels.compiling import kernel, part
from motet.kernels.cuda.kernels.rotary import ALL_HEADS, _head, _squares, _store


@part
def _slopes(at, live_rows, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The two halves of a head's gradient and the rest, from addresses [rows, 1]; fp32."""
    e, rest = tl.arange(0, BLOCK), tl.arange(0, BLOCK_REST)
    live = live_rows[:, None] & (e < HALF)[None, :]
    a = tl.load(at + e[None, :], mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + e[None, :], mask=live, other=0.0).to(tl.float32)
    c = tl.zeros([TILE, BLOCK_REST], tl.float32)
    if REST > 0:
        live = live_rows[:, None] & (rest < REST)[None, :]
        c = tl.load(at + 2 * HALF + rest[None, :], mask=live, other=0.0).to(tl.float32)
    return a, b, c


@part
def _turned_back(
    query, keys, values, head, rows, place, position, cosines, sines, scales,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, ROTATES: tl.constexpr, SCALED: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    """A head's gradient before rotation and the scale of queries."""
    live = rows >= 0
    at_pool = ((place // KV_BLOCK * K + (head - H) % K) * KV_BLOCK + place % KV_BLOCK) * E
    if head < H:
        at = query + rows[:, None].to(tl.int64) * (H * E) + head * E
        a, b, c = _slopes(at, live, HALF, BLOCK, REST, BLOCK_REST)
        if SCALED:
            factor = tl.load(scales + position)[:, None]
            a, b, c = a * factor, b * factor, c * factor
    elif head < H + K:
        a, b, c = _slopes(keys + at_pool, live, HALF, BLOCK, REST, BLOCK_REST)
    else:
        a, b, c = _slopes(values + at_pool, live, HALF, BLOCK, REST, BLOCK_REST)
    if ROTATES and head < H + K:
        e = tl.arange(0, BLOCK)
        at_angle = position[:, None] * HALF + e[None, :]
        cosine = tl.load(cosines + at_angle, mask=(e < HALF)[None, :], other=0.0)
        sine = tl.load(sines + at_angle, mask=(e < HALF)[None, :], other=0.0)
        a, b = a * cosine + b * sine, b * cosine - a * sine
    return a, b, c


@part
def _weighted(a, b, c, weight, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr):
    """A head times the norm's factors."""
    e, rest = tl.arange(0, BLOCK), tl.arange(0, BLOCK_REST)
    a *= tl.load(weight + e, mask=e < HALF, other=0.0)[None, :]
    b *= tl.load(weight + HALF + e, mask=e < HALF, other=0.0)[None, :]
    if REST > 0:
        c *= tl.load(weight + 2 * HALF + rest, mask=rest < REST, other=0.0)[None, :]
    return a, b, c


@part
def _dot(a, b, c, x, y, z, REST: tl.constexpr):
    """Sum of the products of two heads, for each row."""
    total = tl.sum(a * x, 1) + tl.sum(b * y, 1)
    if REST > 0:
        total += tl.sum(c * z, 1)
    return total


@kernel("qkv", "query", "keys", "values", "out", "cosines", "sines", "norm_q", "norm_k", "inner")
def rotate_back(
    qkv, query, keys, values, out, positions, places, cosines, sines, scales, norm_q, norm_k,
    tiles, n_tiles, entries, inner, n_rows, width,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, ROTATES: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, EPSILON: tl.constexpr, KV_BLOCK: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One head of one tile of rows: fill out [T, (H + 2 K) E] from gradients of `rotate_and_write`'s outputs.

    Those are query [T, H, E], and keys and values fp32 [blocks, K, KV_BLOCK, E]. Norms are computed again from qkv.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    position = tl.load(positions + rows, mask=rows >= 0, other=0).to(tl.int64)
    place = tl.load(places + rows, mask=rows >= 0, other=0).to(tl.int64)[:, None]
    a, b, c = _turned_back(
        query, keys, values, head, rows, place, position, cosines, sines, scales,
        H, K, E, HALF, BLOCK, REST, BLOCK_REST, ROTATES, SCALED, KV_BLOCK,
    )  # fmt: skip
    if NORM > 0 and head < H + K:
        x, y, z = _head(
            qkv, entries, inner, n_rows, width, slot, rows, head,
            H, K, E, HALF, BLOCK, REST, BLOCK_REST, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
        )  # fmt: skip
        first = tl.where(head < H, 0, H)
        shift = (head - first) * E if NORM == ALL_HEADS else 0
        if head < H:
            a, b, c = _weighted(a, b, c, norm_q + shift, HALF, BLOCK, REST, BLOCK_REST)
        else:
            a, b, c = _weighted(a, b, c, norm_k + shift, HALF, BLOCK, REST, BLOCK_REST)
        n = 1
        squares, dots = _squares(x, y, z, REST), _dot(a, b, c, x, y, z, REST)
        if NORM == ALL_HEADS:
            n = tl.where(head < H, H, K)
            squares, dots = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
            for other in range(first, first + n):
                left, right, rest = _head(
                    qkv, entries, inner, n_rows, width, slot, rows, other,
                    H, K, E, HALF, BLOCK, REST, BLOCK_REST, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
                )  # fmt: skip
                d, f, g = _turned_back(
                    query, keys, values, other, rows, place, position, cosines, sines, scales,
                    H, K, E, HALF, BLOCK, REST, BLOCK_REST, ROTATES, SCALED, KV_BLOCK,
                )  # fmt: skip
                if head < H:
                    d, f, g = _weighted(d, f, g, norm_q + other * E, HALF, BLOCK, REST, BLOCK_REST)
                else:
                    d, f, g = _weighted(d, f, g, norm_k + (other - H) * E, HALF, BLOCK, REST, BLOCK_REST)
                squares += _squares(left, right, rest, REST)
                dots += _dot(d, f, g, left, right, rest, REST)
        scale = 1.0 / tl.sqrt(squares / (n * E * 1.0) + EPSILON)
        share = (scale * scale * dots / (n * E * 1.0))[:, None]
        a, b, c = a - x * share, b - y * share, c - z * share
        a, b, c = a * scale[:, None], b * scale[:, None], c * scale[:, None]
    to = out + rows[:, None].to(tl.int64) * ((H + 2 * K) * E) + head * E
    _store(to, a, b, c, rows >= 0, qkv.dtype.element_ty, HALF, BLOCK, REST, BLOCK_REST)
