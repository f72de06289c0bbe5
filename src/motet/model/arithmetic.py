"""The order in which a device adds, independent of other rows in the batch.

On a CPU, products of four rows or more give each row the same bits. Long bfloat16 sums on matrix units (AMX) are an
exception: oneDNN cuts them depending on the number of rows. GPU libraries choose a kernel by that number. So this number
is fixed: such products have the rows of one tile, and on a GPU every pass is padded to whole tiles. Mixtures of experts
on a GPU are never exact, so they multiply all rows at once. Covered bases on a GPU do neither (see `motet.kernels.cuda`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

ROWS = 4
"""Every product and reduction has a multiple of this many rows."""

_SMALL_PRODUCT = 399
"""Up to this many multiplications, torch's CPU products of float32 matrices use a separate loop, with other bits."""
_SMALL_BATCH = 4096
"""The same limit for other types, which counts the multiplications of all matrices in a batch."""
_SMALL_TILE = 64
"""Below this many numbers (rows times summed numbers), oneDNN does not use matrix units, which round differently."""

LEAST_FILL = 0.75
"""Smallest allowed length in a padded group, as a share of the longest: a trade-off between calls and padding."""

TILE = 256
"""Rows of an exact product on a GPU: with an 8B base, multiplying them takes about as long as reading the weights."""

_CPU_TILE = 64
"""Rows of a product with long sums on a CPU: fewer rows take more time per row, more rows slow down decoding."""
_CPU_LONG_SUM = 256
"""Minimum length of sums that oneDNN may split; it was never observed to split sums of up to 448 numbers."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def least_rows(n_inputs: int, n_outputs: int, dtype: torch.dtype) -> int:
    """Least rows of a product with a weight [N, K], forward and backward, and of each matrix in a batched product.

    With at least as many rows, products use the GEMM, and their bits do not depend on the number of rows or matrices.
    """
    if dtype == torch.float32:
        least = _SMALL_PRODUCT // (n_inputs * n_outputs) + 1
    else:
        least = max(_SMALL_BATCH // (n_inputs * n_outputs) + 1, -(-_SMALL_TILE // min(n_inputs, n_outputs)))
    return round_up(least, ROWS)


@dataclass(frozen=True)
class Arithmetic:
    """How a base computes; the same for sampling and training, so both agree."""

    rows: int = ROWS
    """Every pass through the decoder, and each adapter's rows in a training batch, are a multiple of this."""
    tile: int = 0
    """Rows multiplied at a time; 0 multiplies all rows at once."""
    long_sum: int = 0
    """Products with shorter sums multiply all rows at once."""
    logit_rows: int = 8
    """Rows of logits in memory at a time; few enough for a CPU's caches."""
    long_rows: int = 8192
    """MLPs of longer segments run in tiles, and their adapter gradients are summed tile by tile."""
    mlp_rows: int = 1024
    """Rows of such a tile, counted from the segment's first row."""
    attention: Literal["torch", "triton"] = "torch"
    """The attention backend."""
    products: str = "padded"
    """The backend of products with adapters: a name of `lora_products.PRODUCTS`."""
    graphs: bool = False
    """Whether decoding is recorded and replayed as a CUDA graph."""

    def tile_of(self, n_summed: int) -> int:
        """Rows multiplied at a time in a product with sums of `n_summed` numbers; 0 for all."""
        return self.tile if n_summed >= self.long_sum else 0

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, *, experts: bool) -> Arithmetic:
        """The arithmetic for a device, and a base with or without experts."""
        if device.type != "cuda":
            cut = dtype == torch.bfloat16 and _has_matrix_units()
            return cls(tile=_CPU_TILE, long_sum=_CPU_LONG_SUM) if cut else cls()
        triton = importlib.util.find_spec("triton") is not None
        return cls(
            rows=16 if experts else TILE,
            tile=0 if experts else TILE,
            logit_rows=TILE,
            attention="triton" if triton else "torch",
            products="grouped",
            graphs=triton,
        )


def _has_matrix_units() -> bool:
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, available since torch 2.6
    return bool(asked and asked())
