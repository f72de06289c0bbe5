"""In which order a device adds: what makes a row's result independent of its company, or what is fastest.

On a CPU, products of four rows or more give each row the same bits, but for long bfloat16 sums where the processor has units
for matrices (AMX): how oneDNN cuts those depends on the number of rows. On a GPU the libraries choose a kernel by it. So exact
arithmetic never lets that number change: such products have the rows of one tile, and on a GPU every pass is padded to whole
tiles. Fast arithmetic multiplies all rows at once; how far its sampler and its trainer differ is measured when a base is
loaded.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

Numerics = Literal["exact", "fast"]

ROWS = 4
"""Every product and reduction gets a multiple of this many rows."""

_SMALL_PRODUCT = 399
"""Up to so many multiplications of a float32 matrix torch's CPU products take a loop of their own, with other bits."""
_SMALL_BATCH = 4096
"""The same for other types, where the multiplications of all matrices of a batch count: its size decides for each of them."""
_SMALL_TILE = 64
"""Of fewer numbers, rows times numbers summed, oneDNN makes no use of units for matrices, which round otherwise."""

LEAST_FILL = 0.75
"""Of what is padded to one length the shortest, as a share of the longest: more groups are more calls, fewer more padding."""

TILE = 256
"""Rows of a product on a GPU that is exact: multiplying so many with an 8B base takes about as long as reading it."""

_CPU_TILE = 64
"""Rows of a product with long sums on a CPU: with fewer it takes more time for each row, with more a step of decoding does."""
_CPU_LONG_SUM = 256
"""Up to 448 numbers oneDNN was never seen to cut a sum."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def least_rows(n_inputs: int, n_outputs: int, dtype: torch.dtype) -> int:
    """Rows that a product with a weight [N, K] must have at least, forth and back, and each matrix of a batched one.

    Then it takes the GEMM by itself, and its bits do not depend on how many other rows or matrices there are.
    """
    if dtype == torch.float32:
        least = _SMALL_PRODUCT // (n_inputs * n_outputs) + 1
    else:
        least = max(_SMALL_BATCH // (n_inputs * n_outputs) + 1, -(-_SMALL_TILE // min(n_inputs, n_outputs)))
    return round_up(least, ROWS)


@dataclass(frozen=True)
class Arithmetic:
    """How a base computes. The same for sampling and training, which is why the two agree."""

    rows: int = ROWS
    """Every pass through the decoder has a multiple of so many rows, and each adapter's rows of a training batch do."""
    tile: int = 0
    """Rows that are multiplied at a time; 0 is all of them."""
    long_sum: int = 0
    """Sums of fewer numbers take all rows at once."""
    logit_rows: int = 8
    """Rows of logits that are worked on at a time; on a CPU few enough for its caches."""
    long_rows: int = 8192
    """Segments of more rows go through MLPs in tiles, and gradients of adapters there are added up tile by tile."""
    mlp_rows: int = 1024
    """Rows of such a tile, counted from the segment's first."""
    attention: Literal["torch", "triton"] = "torch"
    """The attention backend."""
    products: str = "padded"
    """The backend of products with adapters: a name of `lora_products.PRODUCTS`."""
    graphs: bool = False
    """Whether decoding is recorded once and replayed, as a CUDA graph."""
    chunked: bool = False
    """Whether layers with states take whole sequences in chunks of tokens, where they have no kernels."""

    def tile_of(self, n_summed: int) -> int:
        """Rows that are multiplied at a time where each number of the product is a sum of so many; 0 is all of them."""
        return self.tile if n_summed >= self.long_sum else 0

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, numerics: Numerics) -> Arithmetic:
        """What suits a device. On a CPU the fast arithmetic is the exact one, but where that takes tiles or single tokens."""
        if device.type != "cuda":
            cut = dtype == torch.bfloat16 and _has_matrix_units() and numerics == "exact"
            return cls(tile=_CPU_TILE, long_sum=_CPU_LONG_SUM) if cut else cls(chunked=numerics == "fast")
        exact, triton = numerics == "exact", importlib.util.find_spec("triton") is not None
        return cls(
            rows=TILE if exact else 16,
            tile=TILE if exact else 0,
            logit_rows=TILE,
            attention="triton" if triton else "torch",
            products="grouped",
            graphs=triton,
        )


def _has_matrix_units() -> bool:
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, and there since torch 2.6
    return bool(asked and asked())
