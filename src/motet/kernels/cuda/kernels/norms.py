# mypy: disable-error-code="no-untyped-def"
"""Norms beside the residual stream x. One row is one program; its sum is one machine code in every pass.

Legend: T packed rows, D width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel, part


@part
def _normed(v, weight, columns, live, D: tl.constexpr, EPSILON: tl.constexpr):
    """Returns v / rms(v) · weight, fp32."""
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + EPSILON)
    return v * scale * tl.load(weight + columns, mask=live, other=0.0)


@kernel("x", "delta", "x_out", "weight", "y")
def norm_after_add(
    x, delta, x_out, weight, y,
    D: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr, FACTOR: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Fill x_out = x + FACTOR · delta, rounded, and y = norm(x_out); without ADD only y = norm(x).

    All are [T, D]; weight [D] is fp32.
    """
    row = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    live = columns < D
    v = tl.load(x + row + columns, mask=live, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(delta + row + columns, mask=live, other=0.0).to(tl.float32)
        v = (v + FACTOR * added).to(x.dtype.element_ty)
        tl.store(x_out + row + columns, v, mask=live)
        v = v.to(tl.float32)
    tl.store(y + row + columns, _normed(v, weight, columns, live, D, EPSILON).to(y.dtype.element_ty), mask=live)


@kernel("x", "delta", "x_out", "weight")
def norm_before_add(
    x, delta, x_out, weight, D: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr, FACTOR: tl.constexpr
):
    """Fill x_out = x + FACTOR · norm(delta); the norm is rounded, then the sum. All [T, D]; weight [D] is fp32."""
    row = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    live = columns < D
    added = tl.load(delta + row + columns, mask=live, other=0.0).to(tl.float32)
    added = _normed(added, weight, columns, live, D, EPSILON).to(x.dtype.element_ty).to(tl.float32)
    v = tl.load(x + row + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(x_out + row + columns, (v + FACTOR * added).to(x.dtype.element_ty), mask=live)


@part
def _normed_back(h, v, D: tl.constexpr, EPSILON: tl.constexpr):
    """The gradient of v, from that of v / rms(v); fp32."""
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + EPSILON)
    return scale * (h - v * (scale * scale * (tl.sum(h * v, 0) / D)))


@kernel("slope", "x", "weight", "later", "total", "delta")
def norm_after_add_back(
    slope, x, weight, later, total, delta,
    D: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr, FACTOR: tl.constexpr, LATER: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Fill total [T, D] with the gradient of the residual stream x, from those of its norm and of the later stream.

    Also delta = FACTOR · total, unless FACTOR is 1. Without LATER nothing follows but the norm; without NORM there is none,
    and slope is added as it is.
    """
    row = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    live = columns < D
    d = tl.load(slope + row + columns, mask=live, other=0.0).to(tl.float32)
    if NORM:
        v = tl.load(x + row + columns, mask=live, other=0.0).to(tl.float32)
        d = _normed_back(d * tl.load(weight + columns, mask=live, other=0.0), v, D, EPSILON)
    if LATER:
        d += tl.load(later + row + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(total + row + columns, d.to(total.dtype.element_ty), mask=live)
    if FACTOR != 1.0:
        tl.store(delta + row + columns, (FACTOR * d).to(total.dtype.element_ty), mask=live)


@kernel("slope", "delta", "weight", "out")
def norm_before_add_back(slope, delta, weight, out, D: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr):
    """Fill out [T, D] with the gradient of delta, from that of its norm."""
    row = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    live = columns < D
    h = tl.load(slope + row + columns, mask=live, other=0.0).to(tl.float32)
    h *= tl.load(weight + columns, mask=live, other=0.0)
    v = tl.load(delta + row + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row + columns, _normed_back(h, v, D, EPSILON).to(out.dtype.element_ty), mask=live)
