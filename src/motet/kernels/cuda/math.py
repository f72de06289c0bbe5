"""Math of sampling and training outside a base's passes, on the card.

Draws and logprobs are by kernels, whose logprobs are equal to the last bit; the rest is torch's own.

Legend: N rows, V vocabulary, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet.core.batch import AdamW, Optimizer
from motet.core.types import SamplingParams
from motet.kernels.cuda import adapter_steps
from motet.kernels.cuda.sampling import Drawn, Head, Rows, Truncation
from motet.model.accelerator import send
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.distribution import LogitChanges

_UNITS = 2.0**32
"""Whole numbers in 1, of which fp64 adds up to 2²¹ without rounding."""
_ROWS = 1024
"""Rows whose values are computed at a time."""


class CudaMath:
    """Implements `model.distribution.MathKernels`."""

    def __init__(self) -> None:
        self._head = functools.lru_cache(8)(Head)

    # --- logits -------------------------------------------------------------------------------------------------------

    def finish(self, raw_NV: Tensor, changes: LogitChanges) -> Tensor:
        """fp32 logits of a head's products."""
        return self._rows(raw_NV, changes, [1.0] * len(raw_NV)).finish()

    def draw(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], uniforms_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `model.distribution.draw`; ids without probability have logits of −∞ already."""
        out = Drawn.empty(len(logits_NV), logits_NV.device)
        numbers_N = (uniforms_N.double() * 2.0**53).long()
        rows = self._rows(logits_NV, None, [row.temperature for row in params])
        rows.draw(numbers_N, None, Truncation.of(params, logits_NV.device), out)
        return out.token_N, out.logprob_N, out.usable_N

    def logprobs(
        self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, *, slope: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of one token per row, and entropies [N]; `slope` replaces logits by gradients of the logprobs."""
        rows = self._rows(logits_NV, None, [temperature] * len(logits_NV))
        return rows.score(tokens_N, logits_NV if slope else None)

    def head_logprobs(
        self, raw_NV: Tensor, changes: LogitChanges, tokens_N: Tensor, temperatures: Sequence[float], *, slope: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `MathKernels`; the gradients replace the products."""
        rows = self._rows(raw_NV, changes, temperatures)
        return *rows.score(tokens_N, raw_NV if slope else None), raw_NV if slope else None

    def _rows(self, raw_NV: Tensor, changes: LogitChanges | None, temperatures: Sequence[float]) -> Rows:
        head = self._head(changes, raw_NV.shape[1], raw_NV.device)
        (temperature_N,) = send(raw_NV.device, np.array(temperatures, np.float32))
        return Rows(raw_NV, head, temperature_N)

    # --- losses -------------------------------------------------------------------------------------------------------

    def exp(self, x: Tensor) -> Tensor:
        """e^x."""
        return torch.exp(x)

    def expm1(self, x: Tensor) -> Tensor:
        """e^x − 1."""
        return torch.expm1(x)

    def total(self, x: Tensor) -> Tensor:
        """Sum."""
        return x.sum()

    def values(self, hidden_ND: Tensor, head: Tensor) -> Tensor:
        """Values [N] of a value head: hidden · head[:-1] + head[-1]."""
        values: Tensor = _Values.apply(hidden_ND, head)  # type: ignore[no-untyped-call]
        return values

    # --- the optimizer ------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Mapping[type[Optimizer], Callable[[Sequence[AdapterStep]], list[StepNorms]]]:
        """See `MathKernels`; they wait for the device."""
        return {AdamW: adapter_steps.step_all}

    def norm(self, x: Tensor) -> float:
        """The Euclidean norm of an fp32 vector; waits for the device."""
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))


class _Values(torch.autograd.Function):
    """Adds products as multiples of 2⁻³², so that no order and no number of rows changes a bit of a value below 2²¹."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, head)
        parts = [(rows_ND * head[:-1]).double().mul_(_UNITS).round_().sum(-1) for rows_ND in hidden_ND.split(_ROWS)]
        return torch.cat(parts).mul_(1 / _UNITS).add_(head[-1]).float()

    @staticmethod
    def backward(ctx: Any, slope_N: Tensor) -> tuple[Tensor, Tensor]:
        hidden_ND, head = ctx.saved_tensors
        slopes_N1 = slope_N[:, None]
        return slopes_N1 * head[:-1], torch.cat([(slopes_N1 * hidden_ND).sum(0), slopes_N1.sum(0)])
