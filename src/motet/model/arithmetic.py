"""In which order a device adds: what makes a row's result independent of its company, or what is fastest.

On a CPU, products of four rows or more give each row the same bits. On a GPU the libraries choose a kernel by the number of
rows, so exact arithmetic never lets that number change: every pass is padded to whole tiles, and every product with a frozen
weight has the rows of one tile. Fast arithmetic multiplies all rows at once; how far its sampler and its trainer differ is
measured when a base is loaded.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

Numerics = Literal["exact", "fast"]

ROWS = 4
"""Every product and reduction gets a multiple of this many rows."""

_SMALL_PRODUCT = {torch.float32: 399}
"""Up to so many multiplications of a matrix torch's CPU products take a loop of their own, with other bits than the GEMM's."""
_SMALL_BATCH = 4096
"""The same for other types, where the multiplications of all matrices of a batch count: its size decides for each of them."""

LEAST_FILL = 0.75
"""Of what is padded to one length the shortest, as a share of the longest: more groups are more calls, fewer more padding."""

TILE = 256
"""Rows of a product on a GPU that is exact: multiplying so many with an 8B base takes about as long as reading it."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def least_rows(per_row: int, dtype: torch.dtype) -> int:
    """Rows that a matrix of a batched product must have at least, where a row takes so many multiplications.

    Then it takes the GEMM by itself, and its bits do not depend on how many others there are.
    """
    return round_up(_SMALL_PRODUCT.get(dtype, _SMALL_BATCH) // per_row + 1, ROWS)


@dataclass(frozen=True)
class Arithmetic:
    """How a base computes. The same for sampling and training, which is why the two agree."""

    rows: int = ROWS
    """Every pass through the decoder has a multiple of so many rows, and each adapter's rows of a training batch do."""
    tile: int = 0
    """Rows that are multiplied with a frozen weight at a time; 0 is all of them."""
    logit_rows: int = 8
    """Rows of logits that are worked on at a time; on a CPU few enough for its caches."""
    attention: Literal["torch", "triton"] = "torch"
    """The attention backend."""
    products: Literal["padded", "grouped"] = "padded"
    """The backend of products with adapters."""
    graphs: bool = False
    """Whether decoding is recorded once and replayed, as a CUDA graph."""

    @classmethod
    def of(cls, device: torch.device, numerics: Numerics) -> Arithmetic:
        """What suits a device. On a CPU the fast arithmetic is the exact one."""
        if device.type != "cuda":
            return cls()
        exact, triton = numerics == "exact", importlib.util.find_spec("triton") is not None
        return cls(
            rows=TILE if exact else 16,
            tile=TILE if exact else 0,
            logit_rows=TILE,
            attention="triton" if triton else "torch",
            products="grouped",
            graphs=triton,
        )
