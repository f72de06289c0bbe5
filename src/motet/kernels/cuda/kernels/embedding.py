# mypy: disable-error-code="no-untyped-def"
"""Embeddings of tokens.

Legend: T packed rows, D width.
"""

import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from motet.kernels.cuda.kernels.compiling import kernel


@kernel("table", "x")
def embed(tokens, table, x, SCALE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Fill x [T, D] = SCALE · the table's rows of tokens [T], rounded."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < D
    token = tl.load(tokens + row).to(tl.int64)
    numbers = tl.load(table + token * D + columns, mask=live, other=0.0).to(tl.float32) * SCALE
    tl.store(x + row * D + columns, numbers.to(x.dtype.element_ty), mask=live)
