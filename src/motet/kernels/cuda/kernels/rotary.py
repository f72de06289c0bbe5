# mypy: disable-error-code="no-untyped-def"
"""What lies between the product of queries, keys and values and attention: adapters, norms, rotation, and the cache.

One kernel for every pass, since the norms of queries and keys are sums: with adapters, without, and of rows without one
among others, it is one machine code.

Legend: T packed rows, H query heads, K KV heads, E head width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.adapters import TILE, rows_of, with_adapter
from motet.kernels.cuda.kernels.compiling import kernel, part

NO_NORM, EACH_HEAD, ALL_HEADS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a norm of queries or keys spans."""


@part
def _stretch(
    qkv, entries, inner, n_rows, width, slot, rows, head, start, n,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Numbers [start, start + n) of a head of some rows, with their adapter; fp32 [rows, BLOCK]."""
    e = tl.arange(0, BLOCK)
    at = qkv + rows[:, None].to(tl.int64) * ((H + 2 * K) * E) + head * E + start + e[None, :]
    y = tl.load(at, mask=(rows >= 0)[:, None] & (e < n)[None, :], other=0.0).to(tl.float32)
    part = tl.where(head < H, 0, tl.where(head < H + K, 1, 2))
    before = tl.where(head < H, 0, tl.where(head < H + K, H, H + K))
    stride = tl.where(head < H, STRIDE_Q, STRIDE_K)
    columns = (head - before) * E + start + e
    return with_adapter(
        y, entries, inner, n_rows, width, slot, part, rows, columns, e < n, stride,
        qkv.dtype.element_ty, ENTRY, PIECES, ALIGNED,
    )  # fmt: skip


@part
def _head(
    qkv, entries, inner, n_rows, width, slot, rows, head,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, ENTRY: tl.constexpr,
    PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The two halves of a head's rotated numbers, and the rest; zeros beyond them."""
    a = _stretch(
        qkv, entries, inner, n_rows, width, slot, rows, head, 0, HALF,
        H, K, E, BLOCK, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
    )  # fmt: skip
    b = _stretch(
        qkv, entries, inner, n_rows, width, slot, rows, head, HALF, HALF,
        H, K, E, BLOCK, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
    )  # fmt: skip
    c = tl.zeros([TILE, BLOCK_REST], tl.float32)
    if REST > 0:
        c = _stretch(
            qkv, entries, inner, n_rows, width, slot, rows, head, 2 * HALF, REST,
            H, K, E, BLOCK_REST, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
        )  # fmt: skip
    return a, b, c


@part
def _squares(a, b, c, REST: tl.constexpr):
    """Sum of a head's squares, for each row."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if REST > 0:
        squares += tl.sum(c * c, 1)
    return squares


@part
def _normed(
    a, b, c, scale, weight, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr
):
    """A head times its scale in each row, and the norm's factors."""
    e, rest = tl.arange(0, BLOCK), tl.arange(0, BLOCK_REST)
    a *= scale[:, None] * tl.load(weight + e, mask=e < HALF, other=0.0)[None, :]
    b *= scale[:, None] * tl.load(weight + HALF + e, mask=e < HALF, other=0.0)[None, :]
    if REST > 0:
        c *= scale[:, None] * tl.load(weight + 2 * HALF + rest, mask=rest < REST, other=0.0)[None, :]
    return a, b, c


@part
def _turned(a, b, position, cosines, sines, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The halves of a head, rotated."""
    e = tl.arange(0, BLOCK)
    at = position[:, None] * HALF + e[None, :]
    cosine = tl.load(cosines + at, mask=(e < HALF)[None, :], other=0.0)
    sine = tl.load(sines + at, mask=(e < HALF)[None, :], other=0.0)
    return a * cosine - b * sine, b * cosine + a * sine


@part
def _store(
    to, a, b, c, live_rows, TYPE: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Round a head and write it to `to` [rows, 1]."""
    e, rest = tl.arange(0, BLOCK), tl.arange(0, BLOCK_REST)
    live = live_rows[:, None] & (e < HALF)[None, :]
    tl.store(to + e[None, :], a.to(TYPE), mask=live)
    tl.store(to + HALF + e[None, :], b.to(TYPE), mask=live)
    if REST > 0:
        tl.store(to + 2 * HALF + rest[None, :], c.to(TYPE), mask=live_rows[:, None] & (rest < REST)[None, :])


@kernel("qkv", "query", "keys", "values", "cosines", "sines", "norm_q", "norm_k", "inner")
def rotate_and_write(
    qkv, query, keys, values, positions, places, cosines, sines, scales, norm_q, norm_k,
    tiles, n_tiles, entries, inner, n_rows, width,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, ROTATES: tl.constexpr, SCALED: tl.constexpr,
    NORM: tl.constexpr, EPSILON: tl.constexpr, KV_BLOCK: tl.constexpr,
    STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One head of one tile of rows: from qkv [T, (H + 2 K) E] to query [T, H, E] and pools [blocks, K, KV_BLOCK, E].

    A head is two halves of HALF numbers that are rotated, and REST that are not. Positions and places (block · KV_BLOCK +
    offset) are [T]; cosines and sines fp32 [positions, HALF], scales of queries fp32 [positions]. Rounded once after
    adapters, and once at the end.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    a, b, c = _head(
        qkv, entries, inner, n_rows, width, slot, rows, head,
        H, K, E, HALF, BLOCK, REST, BLOCK_REST, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
    )  # fmt: skip
    if NORM > 0 and head < H + K:
        first = tl.where(head < H, 0, H)
        n = 1
        squares = _squares(a, b, c, REST)
        if NORM == ALL_HEADS:
            n = tl.where(head < H, H, K)
            squares = tl.zeros([TILE], tl.float32)
            for other in range(first, first + n):
                left, right, rest = _head(
                    qkv, entries, inner, n_rows, width, slot, rows, other,
                    H, K, E, HALF, BLOCK, REST, BLOCK_REST, STRIDE_Q, STRIDE_K, ENTRY, PIECES, ALIGNED,
                )  # fmt: skip
                squares += _squares(left, right, rest, REST)
        scale = 1.0 / tl.sqrt(squares / (n * E * 1.0) + EPSILON)
        shift = (head - first) * E if NORM == ALL_HEADS else 0
        if head < H:
            a, b, c = _normed(a, b, c, scale, norm_q + shift, HALF, BLOCK, REST, BLOCK_REST)
        else:
            a, b, c = _normed(a, b, c, scale, norm_k + shift, HALF, BLOCK, REST, BLOCK_REST)
    position = tl.load(positions + rows, mask=rows >= 0, other=0).to(tl.int64)
    if ROTATES and head < H + K:
        a, b = _turned(a, b, position, cosines, sines, HALF, BLOCK)
    TYPE: tl.constexpr = qkv.dtype.element_ty
    if head < H:
        if SCALED:
            factor = tl.load(scales + position)[:, None]
            a, b, c = a * factor, b * factor, c * factor
        to = query + rows[:, None].to(tl.int64) * (H * E) + head * E
        _store(to, a, b, c, rows >= 0, TYPE, HALF, BLOCK, REST, BLOCK_REST)
        return
    place = tl.load(places + rows, mask=rows >= 0, other=0).to(tl.int64)[:, None]
    at = ((place // KV_BLOCK * K + (head - H) % K) * KV_BLOCK + place % KV_BLOCK) * E
    if head < H + K:
        _store(keys + at, a, b, c, rows >= 0, TYPE, HALF, BLOCK, REST, BLOCK_REST)
    else:
        _store(values + at, a, b, c, rows >= 0, TYPE, HALF, BLOCK, REST, BLOCK_REST)
