"""Math of sampling and training outside a base's passes, on the card.

Draws and logprobs are by kernels, whose logprobs are equal to the last bit; the rest is torch's own.

Legend: N rows, V vocabulary, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from motet.core.types import SamplingParams
from motet.cuda import adapter_steps
from motet.cuda.draws import Drawn, Head, Rows, Truncation
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.logits import LogitChanges


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
        temperature_N = torch.tensor(temperatures, dtype=torch.float32).to(raw_NV.device, non_blocking=True)
        return Rows(raw_NV, head, temperature_N)

    # --- losses -------------------------------------------------------------------------------------------------------

    def exp(self, x: Tensor) -> Tensor:
        """e^x."""
        return torch.exp(x)

    def expm1(self, x: Tensor) -> Tensor:
        """e^x − 1."""
        return torch.expm1(x)

    def total(self, x: Tensor) -> float:
        """Sum; waits for the device."""
        return float(x.sum())

    def values(self, hidden_ND: Tensor, head: Tensor) -> Tensor:
        """Values [N] of a value head: hidden · head[:-1] + head[-1]."""
        return (hidden_ND * head[:-1]).sum(-1) + head[-1]

    # --- the optimizer ------------------------------------------------------------------------------------------------

    def step_all(self, due: Sequence[AdapterStep]) -> list[StepNorms]:
        """See `MathKernels`; waits for the device."""
        return adapter_steps.step_all(due)
