# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of rows with frozen weights and with A of adapters. `ways` launches them.

A program multiplies a tile of rows and columns; K is added in order in steps of DEPTH, in fp32, and the result is rounded once.
So neither the tile nor the other rows change the bits of a row. Programs behind those of the product multiply A (`_shrink`).

Uppercase arguments are compile-time constants. entry_size is the length of an adapter's entry (`AdapterGroup.entries_SC`).

Legend: M rows of a tile, N its columns, K its inputs.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

_RUNTIME = ["entries", "tiles", "n_tiles", "n_rows", "width", "entry_size", "piece_size"]
"""Numbers and addresses that no machine code depends on, although Triton would compile 1 and multiples of 16 apart."""
_STAGES = tl.constexpr(3)
"""Of a product with A, whatever those of the tile: its buffers must fit where the tile's were."""


@triton.jit
def _place(program, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr):
    """The tile of a program. Up to SIDE_BY_SIDE tiles with the same columns follow each other, so that they share a cache."""
    down, across = tl.cdiv(n_rows, ROWS), tl.cdiv(n_columns, COLUMNS)
    band = program // (SIDE_BY_SIDE * across)
    within = program % (SIDE_BY_SIDE * across)
    height = tl.minimum(down - band * SIDE_BY_SIDE, SIDE_BY_SIDE)
    return band * SIDE_BY_SIDE + within % height, within // height


@triton.jit
def _store(y, sums_MN, bias, row_M, column_N, n_rows, n_columns, BIAS: tl.constexpr):
    """Add the bias in fp32 and round."""
    live_N = column_N < n_columns
    if BIAS:
        sums_MN += tl.load(bias + column_N, mask=live_N, other=0.0).to(tl.float32)[None, :]
    at = y + row_M[:, None].to(tl.int64) * n_columns + column_N[None, :]
    tl.store(at, sums_MN.to(y.dtype.element_ty), mask=(row_M < n_rows)[:, None] & live_N[None, :])


@triton.jit
def _sums(x, a, row_M, live_M, column_N, start, end, n_inputs, width, DEPTH: tl.constexpr):
    """Sums of x[row, k] A[k, column] over a piece of K; columns beyond the width are zeros."""
    sums_MN = tl.zeros((row_M.shape[0], column_N.shape[0]), tl.float32)
    for first in tl.range(start, end, DEPTH, num_stages=_STAGES):
        k_K = first + tl.arange(0, DEPTH)
        live_K = k_K < end
        x_MK = tl.load(
            x + row_M[:, None].to(tl.int64) * n_inputs + k_K[None, :], mask=live_M[:, None] & live_K[None, :], other=0.0
        )
        a_KN = tl.load(
            a + k_K[:, None] * width + column_N[None, :], mask=live_K[:, None] & (column_N < width)[None, :], other=0.0
        )
        sums_MN = tl.dot(x_MK, a_KN, sums_MN, input_precision="ieee")
    return sums_MN


@triton.jit
def _shrink(program, x, entries, tiles, n_tiles, inner, n_rows, n_inputs, width, entry_size, piece_size,
            COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """inner[piece, row, :] = x[row, piece of K] A[piece of K, :], of a tile's rows and COLUMNS columns.

    A is [K, its width], found by its address, a multiple of 16 bytes. Its width is a multiple of four, which is told to the
    compiler for wide loads. A second loop with wider ones would have buffers of its own beside these.
    """
    piece_size = piece_size // 32 * 32  # as it is: told to the compiler, or x would be read in narrow loads
    pieces, blocks = tl.cdiv(n_inputs, piece_size), tl.cdiv(width, COLUMNS)
    tile, rest = program // (pieces * blocks), program % (pieces * blocks)
    piece, block = rest // blocks, rest % blocks
    used, slot = tl.load(n_tiles), tl.load(tiles + tile * 17)
    row_M = tl.load(tiles + tile * 17 + 1 + tl.arange(0, 16))
    if (tile < used) & (slot >= 0):
        entry = entries + slot.to(tl.int64) * entry_size
        own_width = tl.load(entry + 1).to(tl.int32) // 4 * 4  # as it is: a width is a multiple of four
        column_N = block * COLUMNS + tl.arange(0, COLUMNS)
        if block * COLUMNS < own_width:
            live_M = row_M >= 0
            a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
            start = piece * piece_size
            end = tl.minimum(start + piece_size, n_inputs)
            sums_MN = _sums(x, a, row_M, live_M, column_N, start, end, n_inputs, own_width, DEPTH)
            at = inner + (piece * n_rows.to(tl.int64) + row_M[:, None]) * width + column_N[None, :]
            tl.store(at, sums_MN, mask=live_M[:, None] & (column_N < own_width)[None, :])


@triton.jit(do_not_specialize=_RUNTIME)
def multiply(x, weight, bias, y, entries, tiles, n_tiles, inner, n_rows, n_columns, n_inputs, width,
             entry_size, piece_size, BIAS: tl.constexpr, BACK: tl.constexpr, ADAPTERS: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
             A_COLUMNS: tl.constexpr, A_DEPTH: tl.constexpr):  # fmt: skip
    """Fill y = x Wᵀ + bias, weight [columns, inputs]; with BACK y = x W, weight [inputs, columns]. With ADAPTERS also inner."""
    program = tl.program_id(0)
    own = tl.cdiv(n_rows, ROWS) * tl.cdiv(n_columns, COLUMNS)
    if program < own:
        down, across = _place(program, n_rows, n_columns, ROWS, COLUMNS, SIDE_BY_SIDE)
        row_M = down * ROWS + tl.arange(0, ROWS)
        column_N = across * COLUMNS + tl.arange(0, COLUMNS)
        k_K = tl.arange(0, DEPTH)
        x_at = x + (row_M % n_rows)[:, None].to(tl.int64) * n_inputs + k_K[None, :]
        if BACK:
            w_at = weight + k_K[:, None].to(tl.int64) * n_columns + (column_N % n_columns)[None, :]
        else:
            w_at = weight + (column_N % n_columns)[None, :].to(tl.int64) * n_inputs + k_K[:, None]
        sums_MN = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, n_inputs, DEPTH):
            live_K = k_K < n_inputs - first
            x_MK = tl.load(x_at, mask=live_K[None, :], other=0.0)
            w_KN = tl.load(w_at, mask=live_K[:, None], other=0.0)
            sums_MN = tl.dot(x_MK, w_KN, sums_MN, input_precision="ieee")
            x_at += DEPTH
            if BACK:
                w_at += DEPTH * n_columns.to(tl.int64)
            else:
                w_at += DEPTH
        _store(y, sums_MN, bias, row_M, column_N, n_rows, n_columns, BIAS)
    elif ADAPTERS:
        _shrink(program - own, x, entries, tiles, n_tiles, inner, n_rows, n_inputs, width,
                entry_size, piece_size, A_COLUMNS, A_DEPTH)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def multiply_by_descriptors(x, x_blocks, weight, bias, y, entries, tiles, n_tiles, inner, n_rows, n_columns, n_inputs, width,
                            entry_size, piece_size, BIAS: tl.constexpr, BACK: tl.constexpr, ADAPTERS: tl.constexpr,
                            ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDE_BY_SIDE: tl.constexpr,
                            A_COLUMNS: tl.constexpr, A_DEPTH: tl.constexpr):  # fmt: skip
    """The same as `multiply`, where blocks of x and of the weight are copied by descriptors."""
    program = tl.program_id(0)
    own = tl.cdiv(n_rows, ROWS) * tl.cdiv(n_columns, COLUMNS)
    if program < own:
        down, across = _place(program, n_rows, n_columns, ROWS, COLUMNS, SIDE_BY_SIDE)
        sums_MN = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, n_inputs, DEPTH):
            x_MK = x_blocks.load([down * ROWS, first])
            w_KN = weight.load([first, across * COLUMNS]) if BACK else weight.load([across * COLUMNS, first]).T
            sums_MN = tl.dot(x_MK, w_KN, sums_MN, input_precision="ieee")
        row_M = down * ROWS + tl.arange(0, ROWS)
        column_N = across * COLUMNS + tl.arange(0, COLUMNS)
        _store(y, sums_MN, bias, row_M, column_N, n_rows, n_columns, BIAS)
    elif ADAPTERS:
        _shrink(program - own, x, entries, tiles, n_tiles, inner, n_rows, n_inputs, width,
                entry_size, piece_size, A_COLUMNS, A_DEPTH)  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def shrink(x, entries, tiles, n_tiles, inner, n_rows, n_inputs, width, entry_size, piece_size,
           A_COLUMNS: tl.constexpr, A_DEPTH: tl.constexpr):  # fmt: skip
    """Fill `inner` alone, where a library multiplies."""
    _shrink(tl.program_id(0), x, entries, tiles, n_tiles, inner, n_rows, n_inputs, width,
            entry_size, piece_size, A_COLUMNS, A_DEPTH)  # fmt: skip
