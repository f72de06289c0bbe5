"""Draws on the card: from a head's products to tokens, in launches that wait for nothing.

Legend: N rows, V vocabulary, B blocks of 256 ids, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from motet.core.types import SamplingParams
from motet.kernels.cuda.kernels.draws import block_sums, pick
from motet.kernels.cuda.kernels.scores import finish, score, slopes
from motet.kernels.cuda.kernels.truncation import pick_truncated
from motet.kernels.cuda.kernels.weights import BLOCK
from motet.kernels.cuda.launches import launch
from motet.model.accelerator import send
from motet.model.distribution import LogitChanges

_BLOCKS = 8
"""Blocks of ids of one program."""
_SEARCHED = 4096
"""Ids that a search for a threshold reads or skips at once."""
_WIDTH = 1024
"""Ids of one program where each is by itself."""


class Head:
    """What one base's head changes in its products, as kernels read it."""

    def __init__(self, changes: LogitChanges | None, n_ids: int, device: torch.device) -> None:
        """Without `changes` logits are finished already."""
        self.n_ids = n_ids
        scale, divide, cap = (None, None, None) if changes is None else (changes.scale, changes.divide, changes.cap)
        self.constants = {"SCALE": scale or 0.0, "DIVIDE": divide or 0.0, "CAP": cap or 0.0}
        self.present_W: Tensor | None = None
        """Bits of ids that have a token; None if all have one."""
        if changes is not None and len(changes.without):
            has_token = np.ones(n_ids, np.bool_)
            has_token[changes.without.cpu().numpy()] = False
            self.present_W = bits_of(has_token).to(device)

    @property
    def n_blocks(self) -> int:
        """Blocks of the vocabulary."""
        return -(-self.n_ids // BLOCK)


def bits_of(allowed_V: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """int32 [W]: bit i % 32 of word i // 32 stands for id i."""
    words = np.packbits(allowed_V, bitorder="little")
    return torch.from_numpy(np.pad(words, (0, -len(words) % 4)).view(np.int32))


@dataclass(frozen=True, eq=False)
class Truncation:
    """Which ids each row may draw, in device memory."""

    top_k_N: Tensor
    """int32; 0 for all."""
    top_p_N: Tensor
    """fp32; 1 for all."""
    min_p_N: Tensor
    """fp32; 0 for all."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Truncation | None:
        """What these rows ask for; None if none does."""
        if not any(row.truncates for row in params):
            return None
        types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        values = [np.array([getattr(row, name) for row in params], dtype) for name, dtype in types.items()]
        return cls(*send(device, *values))


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
    truncation: Truncation | None = None
    """None if no row truncates, which saves a launch; it changes no other row."""


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
    """fp32."""
    allowed_NW: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.raw_NV.is_contiguous()
        assert self.raw_NV.shape[1] == self.head.n_ids

    def sums(self, products_NB: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Peaks and weights of blocks, [N, B], and their products for entropies; one launch."""
        shape, device = (len(self.raw_NV), self.head.n_blocks), self.raw_NV.device
        sums = (torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device))
        grid = len(self.raw_NV), triton.cdiv(self.head.n_blocks, _BLOCKS)
        blocks = {"BLOCKS": self.head.n_blocks, "PER": _BLOCKS}
        self._launch(block_sums, grid, self.allowed_NW, self.temperature_N, *sums, products_NB, **blocks)
        return sums

    def draw(self, key_N: Tensor, position_N: Tensor | None, truncation: Truncation | None, out: Drawn) -> None:
        """See the function `draw`."""
        grid, sums = (len(self.raw_NV),), self.sums()
        given = self.allowed_NW, self.temperature_N, key_N, position_N
        drawn = out.token_N, out.logprob_N
        self._launch(pick, grid, *given, *sums, *drawn, out.usable_N, **self._whole_rows)
        if truncation is not None:
            limits = truncation.top_k_N, truncation.top_p_N, truncation.min_p_N
            sizes = {**self._whole_rows, "WIDTH": _SEARCHED, "num_warps": 16}
            self._launch(pick_truncated, grid, *given, *limits, *sums, *drawn, **sizes)

    def score(self, token_N: Tensor, slope_NV: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logprobs of one token per row, and entropies [N]; fills `slope_NV`, which may be the logits, with gradients.

        The logprob of an id outside the vocabulary is −∞.
        """
        n_rows, device = len(self.raw_NV), self.raw_NV.device
        products_NB = torch.empty(n_rows, self.head.n_blocks, dtype=torch.int32, device=device)
        found = torch.empty(4, n_rows, device=device).unbind()
        read = self.temperature_N, token_N
        sums = *self.sums(products_NB), products_NB
        self._launch(score, (n_rows,), *read, *sums, *found, **self._whole_rows)
        if slope_NV is not None:
            self._launch(slopes, self._tiles, *read, *found[2:], slope_NV, WIDTH=_WIDTH)
        return found[0], found[1]

    def finish(self) -> Tensor:
        """fp32 logits [N, V]."""
        logits_NV = torch.empty(self.raw_NV.shape, device=self.raw_NV.device)
        self._launch(finish, self._tiles, logits_NV, WIDTH=_WIDTH)
        return logits_NV

    @property
    def _tiles(self) -> tuple[int, int]:
        return len(self.raw_NV), triton.cdiv(self.head.n_ids, _WIDTH)

    @property
    def _whole_rows(self) -> dict[str, int]:
        """Sizes for kernels that see all blocks of a row at once."""
        return {"BLOCKS": self.head.n_blocks, "LANES": triton.next_power_of_2(self.head.n_blocks)}

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Tensor | None, **sizes: int) -> None:
        constants = {"num_warps": 4} | sizes | self.head.constants | {"V": self.head.n_ids}
        if len(self.raw_NV):
            launch(kernel, grid, self.raw_NV, self.head.present_W, *arguments, **constants)


def draw(raw_NV: Tensor, settings: RowSettings, out: Drawn) -> None:
    """Draw a token per row of a head's products, as `model.distribution.draw` defines it; two launches, or three."""
    rows = Rows(raw_NV, settings.head, settings.temperature_N, settings.allowed_NW)
    rows.draw(settings.key_N, settings.position_N, settings.truncation, out)
