"""Draws on the card: from a head's products to tokens, in launches that wait for nothing.

Legend: N rows, V vocabulary, B blocks of 256 ids, W words of 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.cuda.kernels import draws as kernels
from motet.cuda.launches import launch
from motet.model.logits import LogitChanges

_BLOCKS = 16
"""Blocks of ids of one program."""


class Head:
    """What one base's head changes in its products, as kernels read it."""

    def __init__(self, changes: LogitChanges, n_ids: int, device: torch.device) -> None:
        self.n_ids = n_ids
        self.constants = {"SCALE": changes.scale or 0.0, "DIVIDE": changes.divide or 0.0, "CAP": changes.cap or 0.0}
        self.present_W: Tensor | None = None
        """Bits of ids that have a token; None if all have one."""
        if len(changes.without):
            has_token = np.ones(n_ids, np.bool_)
            has_token[changes.without.cpu().numpy()] = False
            self.present_W = bits_of(has_token).to(device)

    @property
    def n_blocks(self) -> int:
        """Blocks of the vocabulary."""
        return -(-self.n_ids // kernels.BLOCK)


def bits_of(allowed_V: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """int32 [W]: bit i % 32 of word i // 32 stands for id i."""
    words = np.packbits(allowed_V, bitorder="little")
    return torch.from_numpy(np.pad(words, (0, -len(words) % 4)).view(np.int32))


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each row is sampled, in device memory that replays may rewrite."""

    head: Head
    temperature_N: Tensor
    """fp32; 0 takes the likeliest token, of several the first."""
    key_N: Tensor
    """int64 bits of the keys of `core.seeds`."""
    position_N: Tensor | None
    """Integers. Without them `key_N` has the uniform numbers themselves, in multiples of 2⁻⁵³."""
    allowed_NW: Tensor | None = None
    """int32 bits of the ids that a row's grammar allows; None without grammars."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a draw writes."""

    token_N: Tensor
    """int64; 0 where the row is not usable."""
    logprob_N: Tensor
    """fp32, of the whole distribution; NaN where the row is not usable."""
    usable_N: Tensor
    """bool; whether the largest logit is finite and none is NaN."""

    @classmethod
    def empty(cls, n_rows: int, device: torch.device) -> Drawn:
        """Memory for this many rows."""
        dtypes = torch.int64, torch.float32, torch.bool
        return cls(*(torch.empty(n_rows, dtype=dtype, device=device) for dtype in dtypes))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a head's products, as every kernel here reads them."""

    raw_NV: Tensor
    """Contiguous, in any floating dtype."""
    head: Head
    temperature_N: Tensor
    allowed_NW: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """First arguments of kernels that read logits."""
        return self.raw_NV, self.head.present_W, self.allowed_NW, self.temperature_N

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of these kernels."""
        sizes = {"V": self.head.n_ids, "BLOCKS": self.head.n_blocks}
        return sizes | self.head.constants | {"num_warps": 4, "enable_fp_fusion": False}

    @property
    def lanes(self) -> int:
        """Blocks of the vocabulary, padded to a power of two."""
        return int(triton.next_power_of_2(self.head.n_blocks))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Peaks and weights of blocks, [N, B]; one launch."""
        assert self.raw_NV.is_contiguous() and self.raw_NV.shape[1] == self.head.n_ids
        shape, device = (len(self.raw_NV), self.head.n_blocks), self.raw_NV.device
        sums = (torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device))
        grid = len(self.raw_NV), triton.cdiv(self.head.n_blocks, _BLOCKS)
        launch(kernels.block_sums, grid, *self.inputs, *sums, None, PER=_BLOCKS, **self.constants)
        return sums


def draw(raw_NV: Tensor, settings: RowSettings, out: Drawn) -> None:
    """Draw a token per row of a head's products, as `model.distribution.draw` defines it; two launches."""
    if not len(raw_NV):
        return
    rows = Rows(raw_NV, settings.head, settings.temperature_N, settings.allowed_NW)
    launch(
        kernels.pick, (len(raw_NV),), *rows.inputs, settings.key_N, settings.position_N, *rows.sums(),
        out.token_N, out.logprob_N, out.usable_N, LANES=rows.lanes, **rows.constants,
    )  # fmt: skip
