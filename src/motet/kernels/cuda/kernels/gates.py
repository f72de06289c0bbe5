# mypy: disable-error-code="no-untyped-def"
"""Gates of MLPs, which also add adapters to the product of gate and up.

Legend: T packed rows, I inner width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.adapter_gradients import with_adapter_back
from motet.kernels.cuda.kernels.adapters import rows_of, with_adapter
from motet.kernels.cuda.kernels.compiling import kernel, part


@part
def _gate(g, TANH: tl.constexpr):
    """SiLU, or the approximation of GELU by tanh, whose factor (1 + tanh(z / 2)) / 2 is 1 / (1 + exp(-z)); fp32."""
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if TANH else g
    return g / (1.0 + tl.exp(-z))


@part
def _read(
    both, entries, inner, n_rows, width, slot, rows, columns,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gate and up of both [T, 2 I] with their adapters, in fp32: the same numbers in a pass and in its backward pass."""
    live_columns = columns < WIDTH
    live = (rows >= 0)[:, None] & live_columns[None, :]
    at = both + rows[:, None].to(tl.int64) * (2 * WIDTH) + columns[None, :]
    g = tl.load(at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(at + WIDTH, mask=live, other=0.0).to(tl.float32)
    TYPE: tl.constexpr = both.dtype.element_ty
    g = with_adapter(
        g, entries, inner, n_rows, width, slot, 0, rows, columns, live_columns, STRIDE, TYPE, ENTRY, PIECES, ALIGNED
    )
    u = with_adapter(
        u, entries, inner, n_rows, width, slot, 1, rows, columns, live_columns, STRIDE, TYPE, ENTRY, PIECES, ALIGNED
    )
    return g, u


@kernel("both", "out", "inner")
def gate_and_up(
    both, out, tiles, n_tiles, entries, inner, n_rows, width,
    WIDTH: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Fill out [T, I] = gate(both [T, :I]) · both [T, I:], the gate rounded first; one tile of rows a program."""
    tile = tl.program_id(0)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (rows >= 0)[:, None] & (columns < WIDTH)[None, :]
    row = rows[:, None].to(tl.int64)
    g, u = _read(both, entries, inner, n_rows, width, slot, rows, columns, WIDTH, STRIDE, ENTRY, PIECES, ALIGNED)
    gated = _gate(g, TANH).to(out.dtype.element_ty).to(tl.float32) * u
    tl.store(out + row * WIDTH + columns[None, :], gated.to(out.dtype.element_ty), mask=live)


@kernel("both", "slope", "ds", "out", "inner")
def gate_and_up_back(
    both, slope, ds, out, tiles, n_tiles, entries, inner, n_rows, width, after_entries, after_width,
    WIDTH: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, ENTRY: tl.constexpr, PIECES: tl.constexpr, ALIGNED: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Fill out [T, 2 I] with the gradient of `both` without its adapters, from that of the gate's output.

    The latter is slope [T, I], the frozen product's part, and what the next product's adapters add to it. Gate and up are
    computed again as in `gate_and_up`, with its rounding.
    """
    tile = tl.program_id(0)
    if tile >= tl.load(n_tiles):
        return
    slot, rows = rows_of(tiles, tile)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live_columns = columns < WIDTH
    live = (rows >= 0)[:, None] & live_columns[None, :]
    row = rows[:, None].to(tl.int64)
    TYPE: tl.constexpr = both.dtype.element_ty
    g, u = _read(both, entries, inner, n_rows, width, slot, rows, columns, WIDTH, STRIDE, ENTRY, PIECES, ALIGNED)
    d = tl.load(slope + row * WIDTH + columns[None, :], mask=live, other=0.0).to(tl.float32)
    d = with_adapter_back(d, after_entries, ds, after_width, slot, rows, columns, live_columns, TYPE, AFTER)
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if TANH else g
    inside = 1.5957691216057308 * (1.0 + 0.134145 * g * g) if TANH else 1.0
    share = 1.0 / (1.0 + tl.exp(-z))
    gated = _gate(g, TANH).to(TYPE).to(tl.float32)
    to = out + row * (2 * WIDTH) + columns[None, :]
    tl.store(to, (d * u * (share + g * share * (1.0 - share) * inside)).to(TYPE), mask=live)
    tl.store(to + WIDTH, (d * gated).to(TYPE), mask=live)
