# mypy: disable-error-code="no-untyped-def"
"""The second product with an adapter, B · (A x), added where the base's product is read.

Legend: T packed rows, P pieces of K, W width of the products with A, R rank, N outputs.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel, part

TILE = tl.constexpr(16)
"""Rows of a tile, and steps of the rank."""


@part
def rows_of(tiles, tile):
    """A tile's slot, and its rows: -1 in free places."""
    at = tiles + tile.to(tl.int64) * (TILE + 1)
    return tl.load(at), tl.load(at + 1 + tl.arange(0, TILE))


@part
def with_adapter(
    y, entries, inner, n_rows, width, slot, part, rows, columns, live_columns, stride,
    TYPE: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The sum of y [rows, columns] and the adapter's part, rounded to TYPE once; y itself if the rows have none. fp32.

    Inner [P, T, W] has A x in pieces. They are added in order and rounded; the sum over the rank is in steps of 16, so
    that a row's bits depend on its own adapter only. B is [R, stride]; its columns begin at those of the part.
    """
    entry = entries + slot * ENTRY
    first = tl.load(entry + 3 + 2 * part, mask=slot >= 0, other=-1)
    rank = tl.load(entry + 2, mask=first >= 0, other=0).to(tl.int32)
    b = tl.load(entry + 4 + 2 * part, mask=first >= 0, other=0).to(tl.pointer_type(TYPE))
    piece = n_rows.to(tl.int64) * width
    live_rows = rows >= 0
    total = tl.zeros(y.shape, tl.float32)
    for step in range(0, rank, TILE):
        r = step + tl.arange(0, TILE)
        live = live_rows[:, None] & (r < rank)[None, :]
        at = inner + rows[:, None].to(tl.int64) * width + (first + r)[None, :]
        sums = tl.load(at, mask=live, other=0.0)
        for index in tl.static_range(1, PIECES):
            sums += tl.load(at + index * piece, mask=live, other=0.0)
        at_b = b + r[:, None] * stride + columns[None, :]
        if ALIGNED:
            at_b = tl.multiple_of(at_b, [16, 16])
        numbers = tl.load(at_b, mask=(r < rank)[:, None] & live_columns[None, :], other=0.0)
        total = tl.dot(sums.to(TYPE), numbers, total, input_precision="ieee")
    return tl.where(rank > 0, (y + total).to(TYPE).to(tl.float32), y)


@kernel("y", "inner")
def add_adapters(
    y, tiles, n_tiles, entries, inner, n_rows, width,
    N: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add adapters to a product y [T, N] in place."""
    tile = tl.program_id(0)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    if slot < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (rows >= 0)[:, None] & (columns < N)[None, :]
    at = y + rows[:, None].to(tl.int64) * N + columns[None, :]
    before = tl.load(at, mask=live, other=0.0).to(tl.float32)
    after = with_adapter(
        before, entries, inner, n_rows, width, slot, 0, rows, columns, columns < N, N,
        y.dtype.element_ty, ENTRY, PIECES, ALIGNED,
    )  # fmt: skip
    tl.store(at, after.to(y.dtype.element_ty), mask=live)
