"""Judge whether two ways of computing the same model agree: within a small multiple of what rounding does to it.

Legend: N rows, V vocabulary or width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from motet.model.lora_model import LoraModel

MULTIPLE = 3
"""Accepted gap, as a multiple of the noise: of right bases it is at most about 1.7 times the noise."""

CAP = 0.15
"""Largest accepted gap of logits, whatever the noise."""

FLOOR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Gap that is always accepted: the noise may measure 0."""


def gap(ours_NV: Tensor, theirs_NV: Tensor) -> float:
    """Largest root mean square difference of a row or a column, relative to that of all numbers. NaN is never accepted.

    So one wrong token or one wrong id counts in full.
    """
    return spread(ours_NV - theirs_NV) / spread_of_all(theirs_NV) if not torch.equal(ours_NV, theirs_NV) else 0.0


def spread(difference_NV: Tensor) -> float:
    """Largest root mean square of a row or a column."""
    squares_NV = difference_NV.float().square()
    return math.sqrt(float(torch.stack([squares_NV.mean(0).max(), squares_NV.mean(1).max()]).max()))


def spread_of_all(x_NV: Tensor) -> float:
    """Root mean square of all numbers; never 0."""
    return max(math.sqrt(float(x_NV.float().square().mean())), 1e-30)


def accepted(noise: float, dtype: torch.dtype) -> float:
    """The largest gap of logits that rounding explains, if rounding causes `noise` in the stock model."""
    return min(max(MULTIPLE * noise, FLOOR[dtype]), CAP)


@dataclass(frozen=True)
class LogitsVerdict:
    """How far two ways of computing the same logits are apart."""

    gap: float
    """As `gap`; for a mixture whose experts are chosen anew, that of the median row."""
    accepted: float

    @property
    def close(self) -> bool:
        """Whether rounding explains the gap; False for NaN."""
        return self.gap <= self.accepted

    def __str__(self) -> str:
        return f"{self.gap:.2g} of their size (accepted: {self.accepted:.2g})"


def judge(base: LoraModel, ours_NV: Tensor, theirs_NV: Tensor, *, chosen_anew: bool = False) -> LogitsVerdict:
    """Judge logits of other kernels, or of another pass, by the noise that the proof measured (`LoraModel.noise`).

    Args:
        base: the base of the logits.
        ours_NV: its logits, as `LoraModel.logits` returns them.
        theirs_NV: the reference.
        chosen_anew: each pass chose its experts, so rounding may have sent some rows of a mixture elsewhere.
    """
    ours_NV, theirs_NV = base.changes.of_tokens(ours_NV), base.changes.of_tokens(theirs_NV)
    limit = accepted(base.noise, base.dtype)
    if chosen_anew and base.has_experts and base.dtype == torch.bfloat16:
        rows_N = (ours_NV - theirs_NV).square().mean(-1)
        return LogitsVerdict(math.sqrt(float(rows_N.median())) / spread_of_all(theirs_NV), limit)
    return LogitsVerdict(gap(ours_NV, theirs_NV), limit)
