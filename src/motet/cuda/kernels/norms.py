# mypy: disable-error-code="no-untyped-def"
"""Norms beside the residual stream x. One row is one program; its sum is one machine code in every pass.

Legend: T packed rows, D width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.cuda.kernels.compiling import kernel, part


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


@kernel("x", "delta", "x_out", "weight", "y")
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
