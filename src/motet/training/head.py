"""Logprobs of targets from hidden states, a chunk of rows at a time, with their gradients.

Legend: T packed rows, N targets, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.model.distribution import Distribution
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


@dataclass(frozen=True)
class Targets:
    """The targets of a segment, and for each the row of the state that predicts it."""

    row_N: Tensor
    target_N: Tensor
    temperature: float


def head_logprobs(base: LoraModel, hidden_TD: Tensor, parts: Sequence[Targets]) -> Pieces[list[tuple[Tensor, Tensor]]]:
    """Logprobs and entropies [N] of the targets of each part; the frozen head gets no gradient.

    Motet's kernels compute each row by itself, so their products may hold rows of several parts. [N, V] never exists for
    all rows at once. A logprob's gradient with respect to its hidden state does not depend on later operations, so it is
    computed while the probabilities are in memory.
    """
    found, rows = list[tuple[Tensor, Tensor]](), 0
    for some in [parts] if base.math is not None and parts else [[part] for part in parts]:
        hidden_ND = hidden_TD.index_select(0, base.pad(torch.cat([part.row_N for part in some])))
        target_N = base.pad(torch.cat([part.target_N for part in some]))
        lengths = [len(part.row_N) for part in some]
        temperatures = [part.temperature for part, length in zip(some, lengths, strict=True) for _ in range(length)]
        temperatures += temperatures[-1:] * (len(hidden_ND) - len(temperatures))  # of the padding
        slope_ND = torch.empty_like(hidden_ND) if hidden_ND.requires_grad else None
        outputs = []
        for chunk in (slice(start, start + HEAD_ROWS) for start in range(0, len(hidden_ND), HEAD_ROWS)):
            if rows >= HEAD_ROWS:
                yield rows
                rows = 0
            hidden, slope = hidden_ND.detach()[chunk], None if slope_ND is None else slope_ND[chunk]
            with torch.no_grad():
                outputs.append(_chunk(base, hidden, target_N[chunk], temperatures[chunk], slope))
            rows += len(hidden)
        logprobs_N, entropy_N = map(torch.cat, zip(*outputs, strict=True))
        if slope_ND is not None:
            logprobs_N = _WithSlopes.apply(hidden_ND, logprobs_N, slope_ND)  # type: ignore[no-untyped-call]
        n_targets = sum(lengths)
        found += zip(logprobs_N[:n_targets].split(lengths), entropy_N[:n_targets].split(lengths), strict=True)
    return found


def _chunk(
    base: LoraModel, hidden_ND: Tensor, target_N: Tensor, temperatures: Sequence[float], slope_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N]; fills `slope_ND` if it is given."""
    logprobs, entropies = [], []
    raw_NV = base.raw_logits(hidden_ND)
    if base.math is not None:
        slopes = slope_ND is not None
        logprobs_N, entropies_N, slope_NV = base.math.head_logprobs(
            raw_NV, base.changes, target_N, temperatures, slope=slopes
        )
        if slope_ND is not None and slope_NV is not None:
            slope_ND.copy_(base.through_head(slope_NV))
        return logprobs_N, entropies_N
    temperature, at_a_time = temperatures[0], base.arithmetic.logit_rows
    for raw, target in zip(raw_NV.split(at_a_time), target_N.split(at_a_time), strict=True):
        distribution = Distribution.of(base.finish_logits(raw), [temperature])
        logprobs.append(distribution.logprobs(target))
        entropies.append(distribution.entropy())
        if slope_ND is not None:
            raw.copy_(base.logits_slope(raw, distribution.slope(target, temperature)))
    if slope_ND is not None:
        slope_ND.copy_(base.through_head(raw_NV))
    return torch.cat(logprobs), torch.cat(entropies)


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
