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

TILE = 256
"""Rows of a product on a GPU that is exact: multiplying so many with an 8B base takes about as long as reading it."""


@dataclass(frozen=True)
class Arithmetic:
    """How a base computes. The same for sampling and training, which is why the two agree."""

    rows: int = 4
    """Every pass through the decoder has a multiple of so many rows, and each adapter's rows of a training batch do."""
    tile: int = 0
    """Rows that are multiplied with a frozen weight at a time; 0 is all of them."""
    grouped: bool = False
    """Adapters of a batch in one grouped product, each with as many rows as it has; otherwise padded to equally many."""
    kernels: bool = False
    """Attention by kernels in Triton instead of torch's products."""
    logit_rows: int = 8
    """Rows of logits that are worked on at a time; on a CPU few enough for its caches."""
    graphs: bool = False
    """Whether decoding is recorded once and replayed, as a CUDA graph."""

    @classmethod
    def of(cls, device: torch.device, numerics: Numerics) -> Arithmetic:
        """What suits a device. On a CPU the fast arithmetic is the exact one."""
        if device.type != "cuda":
            return cls()
        kernels = importlib.util.find_spec("triton") is not None
        if numerics == "fast":
            return cls(rows=16, grouped=True, kernels=kernels, logit_rows=TILE, graphs=kernels)
        return cls(rows=TILE, tile=TILE, grouped=True, kernels=kernels, logit_rows=TILE, graphs=kernels)
