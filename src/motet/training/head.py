"""Logprobs of targets from hidden states, a chunk of rows at a time, with their gradients.

Legend: T packed rows, N targets, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from motet.model.distribution import Distribution, MathKernels
from motet.model.lora_model import LoraModel
from motet.protocols import Pieces, Result

HEAD_ROWS = 256
"""Rows of logits that are in memory at a time."""


def whole(pieces: Pieces[Result]) -> Result:
    """Run all pieces without a pause."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


def head_logprobs(
    base: LoraModel, hidden_TD: Tensor, row_N: Tensor, target_N: Tensor, temperature: float
) -> Pieces[tuple[Tensor, Tensor]]:
    """Logprobs and entropies [N] of targets at rows of the hidden states; the frozen head gets no gradient.

    [N, V] never exists for all rows at once. A logprob's gradient with respect to its hidden state does not depend on
    later operations, so it is computed while the probabilities are in memory.
    """
    n_targets = len(row_N)
    hidden_ND = hidden_TD.index_select(0, base.pad(row_N))
    slope_ND = torch.empty_like(hidden_ND) if hidden_ND.requires_grad else None
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    chunks, targets = hidden_ND.detach().split(HEAD_ROWS), base.pad(target_N).split(HEAD_ROWS)
    slopes = (None,) * len(chunks) if slope_ND is None else slope_ND.detach().split(HEAD_ROWS)
    for hidden, target, slope in zip(chunks, targets, slopes, strict=True):
        if logprobs:
            yield HEAD_ROWS
        with torch.no_grad():
            some, entropy = _chunk(base, hidden, target, temperature, slope)
        logprobs.append(some)
        entropies.append(entropy)
    logprobs_N, entropy_N = torch.cat(logprobs), torch.cat(entropies)
    if slope_ND is not None:
        logprobs_N = _WithSlopes.apply(hidden_ND, logprobs_N, slope_ND)  # type: ignore[no-untyped-call]
    return logprobs_N[:n_targets], entropy_N[:n_targets]


def _chunk(
    base: LoraModel, hidden_ND: Tensor, target_N: Tensor, temperature: float, slope_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N]; fills `slope_ND` if it is given."""
    logprobs, entropies = [], []
    raw_NV = base.raw_logits(hidden_ND)
    if base.math is not None:
        return _own_chunk(base, base.math, raw_NV, target_N, temperature, slope_ND)
    at_a_time = base.arithmetic.logit_rows
    for raw, target in zip(raw_NV.split(at_a_time), target_N.split(at_a_time), strict=True):
        distribution = Distribution.of(base.finish_logits(raw), [temperature])
        logprobs.append(distribution.logprobs(target))
        entropies.append(distribution.entropy())
        if slope_ND is not None:
            raw.copy_(base.logits_slope(raw, distribution.slope(target, temperature)))
    if slope_ND is not None:
        slope_ND.copy_(base.through_head(raw_NV))
    return torch.cat(logprobs), torch.cat(entropies)


def _own_chunk(
    base: LoraModel, own: MathKernels, raw_NV: Tensor, target_N: Tensor, temperature: float, slope_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_chunk` with Motet's kernels, which overwrite the logits with slopes."""
    logits_NV = base.finish_logits(raw_NV)
    if slope_ND is None:
        return own.logprobs(logits_NV, target_N, temperature)
    logprobs_N, entropies_N = own.logprobs(logits_NV, target_N, temperature, slope=True)
    slope_ND.copy_(base.through_head(base.logits_slope(raw_NV, logits_NV)))
    return logprobs_N, entropies_N


class _WithSlopes(torch.autograd.Function):
    """Logprobs [N] with precomputed gradients, which the backward pass only scales."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, logprobs_N: Tensor, slope_ND: Tensor) -> Tensor:
        ctx.save_for_backward(slope_ND)
        return logprobs_N.clone()

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (slope_ND,) = ctx.saved_tensors
        grad_ND = torch.empty_like(slope_ND)
        for grad, slope, scale in zip(*(each.split(HEAD_ROWS) for each in (grad_ND, slope_ND, grad_N)), strict=True):
            grad.copy_(slope.float() * scale[:, None])
        return grad_ND, None, None
