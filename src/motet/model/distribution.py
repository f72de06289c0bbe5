"""From logits to logprobs and drawn tokens: one definition for sampler, trainer, reference and metrics.

Logprobs are `log_softmax(fp32 logits / temperature)` over the whole vocabulary. Tokens are drawn by inverting the cumulative
distribution at a counter-based uniform number, row by row, so that a draw depends on its own row alone.

Legend: N rows (a multiple of four for exactness), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from motet.types import SamplingParams


def row_logprobs(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """fp32 logprobs [N, V] at a temperature per row."""
    return torch.log_softmax(logits_NV / temperature_N[:, None], dim=-1)


def draw(logits_NV: Tensor, params: Sequence[SamplingParams], uniforms_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_NV: fp32 logits.
        params: how each row is sampled; temperature 0 takes the most likely token.
        uniforms_N: fp64 numbers in [0, 1).

    Returns:
        Tokens [N], their logprobs [N] (before top-p, top-k and min-p), and whether each row's logits were usable [N].
    """
    greedy = torch.tensor([row.temperature == 0 for row in params], device=logits_NV.device)
    temperature = torch.tensor([row.temperature or 1.0 for row in params], dtype=torch.float32, device=logits_NV.device)
    logprobs_NV = row_logprobs(logits_NV, temperature)
    weights_NV = torch.exp(logprobs_NV)
    for row, param in enumerate(params):
        if param.truncates and param.temperature:
            weights_NV[row] = _truncate(weights_NV[row], param)
    total_NV = torch.cumsum(weights_NV, dim=-1)
    total_N = total_NV[:, -1]
    usable_N = torch.isfinite(total_N) & (total_N > 0)
    total_NV = torch.where(usable_N[:, None], total_NV, torch.ones_like(total_NV))
    below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    target_N = torch.minimum((uniforms_N * total_N.double()).float(), below_N)
    target_N = torch.where(usable_N, target_N, torch.zeros_like(target_N))
    tokens_N = torch.searchsorted(total_NV, target_N[:, None], right=True)[:, 0].clamp_(max=logits_NV.shape[-1] - 1)
    if bool(greedy.any()):
        tokens_N = torch.where(greedy, logprobs_NV.argmax(-1), tokens_N)
    return tokens_N, logprobs_NV.gather(-1, tokens_N[:, None])[:, 0], usable_N


def _truncate(weights_V: Tensor, param: SamplingParams) -> Tensor:
    """Drop tokens by min-p (relative to the best), top-k, then top-p (Holtzman et al. 2020), in that order."""
    kept = weights_V
    if param.min_p > 0:
        kept = kept.masked_fill(kept < param.min_p * kept.max(), 0)
    order = torch.argsort(kept, descending=True, stable=True)
    ranked = kept[order]
    if param.top_k > 0:
        ranked[param.top_k :] = 0
    if param.top_p < 1:
        before = torch.cumsum(ranked, 0) - ranked
        ranked = ranked.masked_fill(before >= param.top_p * ranked.sum(), 0)
    return torch.zeros_like(kept).scatter_(0, order, ranked)
