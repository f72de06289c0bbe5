# mypy: disable-error-code="no-untyped-def"
"""Gradients through adapters, and of their matrices.

The columns of a fused product are parts: the first has FIRST columns, all others REST each; STRIDE_FIRST and STRIDE_REST are
the distances of rows of their Bᵀ. Slope is the gradient of the product's output. `ds` is the gradient of A x, rounded. `s` is
A x, rounded, where the columns of each linear layer begin at a multiple of TILE (`_column`).

Legend: T packed rows, K inputs, N outputs, W width of A, R rank, U units, G groups of units, S slots, C sums.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.adapters import TILE, rows_of
from motet.kernels.cuda.kernels.compiling import kernel, part

UNIT_SCALE = tl.constexpr(2.0**44)
"""Whole numbers count multiples of 2⁻⁴⁴ (`motet.model.unit_sums`)."""
UNFIT = tl.constexpr(1 << 62)
"""Stands for a number that is NaN, or as large as this."""


@part
def _column(first, rank):
    """The column of s at which a layer's columns begin that begin at `first` in A."""
    return first // rank * ((rank + TILE - 1) // TILE * TILE)


@part
def with_adapter_back(y, entries, ds, width, slot, rows, columns, live, TYPE: tl.constexpr, ENTRY: tl.constexpr):
    """The sum of y [rows, columns], a gradient of a product's input, and ds Aᵀ; y itself if the rows have no adapter. fp32."""
    width = width // TILE * TILE  # as it is: told to the compiler, for wide loads
    entry = entries + slot * ENTRY
    own = tl.load(entry + 1, mask=slot >= 0, other=0).to(tl.int32) // 4 * 4  # as it is: a width is a multiple of four
    a = tl.multiple_of(tl.load(entry, mask=slot >= 0, other=0).to(tl.pointer_type(TYPE)), 16)
    for step in range(0, own, TILE):
        w = step + tl.arange(0, TILE)
        left = tl.load(
            ds + rows[:, None].to(tl.int64) * width + w[None, :],
            mask=(rows >= 0)[:, None] & (w < own)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + columns[None, :].to(tl.int64) * own + w[:, None], mask=(w < own)[:, None] & live[None, :], other=0.0
        )
        y = tl.dot(left, right, y, input_precision="ieee")
    return y


@kernel("y", "ds")
def add_adapters_back(y, ds, tiles, n_tiles, entries, width, K: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr):
    """Add ds Aᵀ to y [T, K] in place."""
    tile = tl.program_id(0)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    if slot < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (rows >= 0)[:, None] & (columns < K)[None, :]
    at = y + rows[:, None].to(tl.int64) * K + columns[None, :]
    before = tl.load(at, mask=live, other=0.0).to(tl.float32)
    TYPE: tl.constexpr = y.dtype.element_ty
    after = with_adapter_back(before, entries, ds, width, slot, rows, columns, columns < K, TYPE, ENTRY)
    tl.store(at, after.to(TYPE), mask=live)


@part
def _add_part(
    total, sums, slope, s, entry, index, start, rank, live_rows,
    COLUMNS: tl.constexpr, STRIDE: tl.constexpr, DEPTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add to the columns of ds from `start` on what a part gives them; and write A x to the part's columns of s."""
    TYPE: tl.constexpr = slope.dtype.element_ty
    first = tl.load(entry + 3 + 2 * index).to(tl.int32)
    if (first >= 0) & (first < start + TILE) & (first + rank > start):
        b = tl.load(entry + 4 + 2 * index).to(tl.pointer_type(TYPE))
        if ALIGNED:
            b = tl.multiple_of(b, 16)
        r = start + tl.arange(0, TILE) - first
        live_r = ((r >= 0) & (r < rank))[None, :]
        tl.store(s + (_column(first, rank) + r)[None, :], sums.to(TYPE), mask=live_rows & live_r)
        for n0 in range(0, COLUMNS, DEPTH):
            n = n0 + tl.arange(0, DEPTH)
            left = tl.load(slope + n[None, :], mask=live_rows & (n < COLUMNS)[None, :], other=0.0)
            at = b + r[None, :].to(tl.int64) * STRIDE + n[:, None]
            right = tl.load(at, mask=live_r & (n < COLUMNS)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
    return total


@kernel("slope", "inner", "s", "ds")
def shrink_back(
    slope, s, ds, tiles, n_tiles, entries, inner, n_rows, width, s_width,
    FIRST: tl.constexpr, REST: tl.constexpr, STRIDE_FIRST: tl.constexpr, STRIDE_REST: tl.constexpr,
    PARTS: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Fill s [T, s_width], from the pieces of A x `inner`, and ds = slope Bᵀ [T, width]; TILE of their columns a program.

    Layers that are one for several parts add these in order. Columns of no part are zeros.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    if slot < 0:
        return
    entry = entries + slot * ENTRY
    own, rank = tl.load(entry + 1).to(tl.int32) // 4 * 4, tl.load(entry + 2).to(tl.int32)
    width = width // TILE * TILE  # as it is: told to the compiler, for wide loads
    start = tl.program_id(1) * TILE
    if start >= own:
        return
    TYPE: tl.constexpr = slope.dtype.element_ty
    w = start + tl.arange(0, TILE)
    live_rows = (rows >= 0)[:, None]
    live = live_rows & (w < own)[None, :]
    row = rows[:, None].to(tl.int64)
    at = inner + row * width + w[None, :]
    sums = tl.load(at, mask=live, other=0.0)
    for index in tl.static_range(1, PIECES):
        sums += tl.load(at + index * (n_rows.to(tl.int64) * width), mask=live, other=0.0)
    total = tl.zeros([TILE, TILE], tl.float32)
    N: tl.constexpr = FIRST + (PARTS - 1) * REST
    total = _add_part(
        total,
        sums,
        slope + row * N,
        s + row * s_width,
        entry,
        0,
        start,
        rank,
        live_rows,
        FIRST,
        STRIDE_FIRST,
        DEPTH,
        ALIGNED,
    )
    for index in tl.static_range(1, PARTS):
        total = _add_part(
            total, sums, slope + row * N + (FIRST + (index - 1) * REST), s + row * s_width, entry, index, start, rank,
            live_rows, REST, STRIDE_REST, DEPTH, ALIGNED,
        )  # fmt: skip
    tl.store(ds + row * width + w[None, :], total.to(TYPE), mask=live)


@part
def _add_unit_sums(
    left, right, width, n_columns, columns, live_columns, w, live_w, units, first, end, factor, sums, largest, elements,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Add leftᵀ right of units [first, end), each in its own fp32 sum that begins at its first row, to `sums`."""
    total = tl.zeros([TILE, columns.shape[0]], tl.int64)
    most = tl.zeros([TILE, columns.shape[0]], tl.int64)
    live = live_w[:, None] & live_columns[None, :]
    width = width // TILE * TILE  # as it is: told to the compiler, for wide loads
    for unit in range(first, end):
        row, n = tl.load(units + unit * 2).to(tl.int64), tl.load(units + unit * 2 + 1)
        sums_WC = tl.zeros([TILE, columns.shape[0]], tl.float32)
        for start in range(0, n, ROWS):
            r = start + tl.arange(0, ROWS)
            at = (row + r)[:, None]
            # columns that do not count are read too, for wide loads; their sums are not used
            left_RW = tl.load(left + at * width + w[None, :], mask=(r < n)[:, None], other=0.0)
            right_RC = tl.load(
                right + at * n_columns + columns[None, :], mask=(r < n)[:, None] & live_columns[None, :], other=0.0
            )
            sums_WC = tl.dot(tl.trans(left_RW), right_RC, sums_WC, input_precision="ieee")
        number = (tl.where(live, sums_WC, 0.0) * factor).to(tl.float64) * UNIT_SCALE
        size = tl.abs(number)
        fits = size < UNFIT * 1.0
        total += tl.floor(tl.where(fits, number, 0.0) + 0.5).to(tl.int64)
        most = tl.maximum(most, tl.ceil(tl.where(fits, size, UNFIT * 1.0)).to(tl.int64))
    tl.atomic_add(sums + elements, total, mask=live, sem="relaxed")
    tl.atomic_max(largest, tl.max(tl.max(most, 1), 0), sem="relaxed")


@kernel("x", "slope", "s", "ds")
def add_units(
    x, slope, s, ds, units, groups, entries, places, factors, width, s_width,
    K: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, STRIDE_FIRST: tl.constexpr, STRIDE_REST: tl.constexpr,
    PARTS: tl.constexpr, ENTRY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradients of A and B, in whole numbers, to the sums of the adapters; TILE of their ranks a program.

    Units [U, 2] are rows: the first, and how many. Groups [G, 4] are units of one adapter: the first, the end, its slot, its
    sums. Places [C, 3] are addresses: of an adapter's weights, of its sums, which have the same layout, and of the largest
    number of any unit. Factors [C] are of gradients of A.
    """
    group = groups + tl.program_id(0) * 4
    block = tl.program_id(1)
    first, end, slot, own = tl.load(group), tl.load(group + 1), tl.load(group + 2), tl.load(group + 3)
    entry, place = entries + slot * ENTRY, places + own * 3
    weights = tl.load(place)
    sums = tl.load(place + 1).to(tl.pointer_type(tl.int64))
    largest = tl.load(place + 2).to(tl.pointer_type(tl.int64))
    total_width, rank = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    start = tl.program_id(2) * TILE
    w = start + tl.arange(0, TILE)
    BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    N: tl.constexpr = FIRST + (PARTS - 1) * REST
    OF_A: tl.constexpr = (K + BLOCK - 1) // BLOCK
    OF_FIRST: tl.constexpr = (FIRST + BLOCK - 1) // BLOCK
    OF_REST: tl.constexpr = (REST + BLOCK - 1) // BLOCK
    if block < OF_A:
        if start < total_width:
            k = block * BLOCK + tl.arange(0, BLOCK)
            elements = k[None, :].to(tl.int64) * total_width + w[:, None]
            _add_unit_sums(
                ds, x, width, K, k, k < K, w, w < total_width, units, first, end, tl.load(factors + own),
                sums + (tl.load(entry) - weights) // BYTES, largest, elements, ROWS,
            )  # fmt: skip
    else:
        within = block - OF_A
        part = tl.where(within < OF_FIRST, 0, 1 + (within - OF_FIRST) // OF_REST)
        column = tl.load(entry + 3 + 2 * part).to(tl.int32)
        if (column >= 0) & (start < rank):
            count = tl.where(part == 0, FIRST, REST)
            offset = tl.where(part == 0, 0, FIRST + (part - 1) * REST)
            stride = tl.where(part == 0, STRIDE_FIRST, STRIDE_REST)
            n = tl.where(part == 0, within, (within - OF_FIRST) % OF_REST) * BLOCK + tl.arange(0, BLOCK)
            elements = w[:, None].to(tl.int64) * stride + n[None, :]
            _add_unit_sums(
                s + _column(column, rank), slope + offset, s_width, N, n, n < count, w, w < rank, units, first, end, 1.0,
                sums + (tl.load(entry + 4 + 2 * part) - weights) // BYTES, largest, elements, ROWS,
            )  # fmt: skip
