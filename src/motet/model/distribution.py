"""From a head's products to logits, logprobs and sampled tokens: one definition for sampler, trainer, reference and metrics.

Logprobs are `log_softmax(fp32 logits / temperature)` over the whole vocabulary. Tokens are drawn by inverting the
cumulative distribution at a counter-based uniform number. A draw depends on its own row only.

Legend: N rows (a multiple of four for exactness), V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.core.batch import LossFunctions, Optimizer
from motet.core.types import SamplingParams
from motet.model.adapter_step import AdapterStep, StepNorms

_BLOCK = 256
"""Tokens summed in one block before the cumulative sum; a scan of the whole vocabulary is slow."""


class LogitChanges:
    """What one base changes in the products of its head."""

    def __init__(self, config: Any, without_token: tuple[int, ...]) -> None:
        """`without_token`: see `ModelInfo`."""
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        self.scale, self.divide, self.cap = (getattr(config, name, None) for name in names)
        self.without = torch.tensor(without_token, dtype=torch.long)

    def finish(self, raw_NV: Tensor) -> Tensor:
        """fp32 logits, with the model's scale and soft-cap; −∞ for ids without a token. May overwrite `raw_NV`."""
        logits_NV = raw_NV.float()
        if self.scale is not None:
            logits_NV = logits_NV * self.scale
        if self.divide is not None:
            logits_NV = logits_NV / self.divide
        if self.cap is not None:
            logits_NV = torch.tanh(logits_NV / self.cap) * self.cap
        return logits_NV.index_fill_(-1, self._absent(logits_NV), -torch.inf) if len(self.without) else logits_NV

    def slope(self, raw_NV: Tensor, slope_NV: Tensor) -> Tensor:
        """Gradient with respect to raw [N, V] from that of `finish(raw)`; may be in fp32."""
        if (self.scale, self.divide, self.cap) == (None, None, None):
            return slope_NV  # it is 0 for ids without a token, as their probability is
        with torch.enable_grad():
            leaf = raw_NV.detach().requires_grad_()
            (slope_raw_NV,) = torch.autograd.grad(self.finish(leaf), leaf, slope_NV)
        return slope_raw_NV

    def of_tokens(self, logits_NV: Tensor) -> Tensor:
        """Logits to compare with others: 0 for ids without a token."""
        return logits_NV.index_fill(-1, self._absent(logits_NV), 0.0)

    def _absent(self, logits_NV: Tensor) -> Tensor:
        if self.without.device != logits_NV.device:
            self.without = self.without.to(logits_NV.device)
        return self.without


class MathKernels(LossFunctions, Protocol):
    """Functions that own kernels compute besides a base's passes, with the same bits on every processor."""

    def draw(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], uniforms_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Same as the function `draw`."""
        ...

    def logprobs(
        self, logits_NV: Tensor, tokens_N: Tensor, temperature: float, *, slope: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of one token per row, and entropies [N]; `slope` replaces the logits by the gradients of the logprobs."""
        ...

    def finish(self, raw_NV: Tensor, changes: LogitChanges) -> Tensor:
        """Same as `changes.finish`."""
        ...

    def head_logprobs(
        self, raw_NV: Tensor, changes: LogitChanges, tokens_N: Tensor, temperatures: Sequence[float], *, slope: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logprobs of one token per row of a head's products, and entropies [N].

        With `slope` also the gradients [N, V] of the logprobs with respect to the products, which may overwrite them.
        """
        ...

    def values(self, hidden_ND: Tensor, head: Tensor) -> Tensor:
        """Values of hidden states, [N]."""
        ...

    @property
    def steps(self) -> Mapping[type[Optimizer], Callable[[Sequence[AdapterStep]], list[StepNorms]]]:
        """Kernels for steps of several adapters, by the class of their optimizer; others are taken by torch.

        They clip gradients by their norms, update masters and state in place, and write the new versions. An adapter whose
        gradient is not finite stays as it is. Nothing is changed if they raise an exception.
        """
        ...

    def norm(self, x: Tensor) -> float:
        """The Euclidean norm of an fp32 vector."""
        ...


@dataclass(frozen=True)
class Distribution:
    """softmax(logits / temperature) of N rows, all fp32."""

    logits_NV: Tensor
    """Divided by the temperature."""
    probs_NV: Tensor
    peak_N1: Tensor
    """Largest logit of each row."""
    log_peak_N1: Tensor
    """Logprob of that largest logit; not finite if the row's logits are not finite."""

    @classmethod
    def of(cls, logits_NV: Tensor, temperatures: Sequence[float], own: MathKernels | None = None) -> Distribution:
        """Distribution of fp32 logits, with one temperature per row or one for all.

        With `own` kernels, `probs_NV` is empty.
        """
        if any(temperature != 1 for temperature in temperatures):
            logits_NV = logits_NV / torch.tensor(temperatures, device=logits_NV.device)[:, None]
        if own is not None:
            log_peak_N, _ = own.logprobs(logits_NV, logits_NV.argmax(-1), 1.0)
            return cls(logits_NV, logits_NV.new_empty(0), logits_NV.amax(-1, keepdim=True), log_peak_N[:, None])
        probs_NV = torch.softmax(logits_NV, dim=-1)
        log_peak_N1 = torch.log(probs_NV.amax(-1, keepdim=True))
        return cls(logits_NV, probs_NV, logits_NV.amax(-1, keepdim=True), log_peak_N1)

    def logprobs(self, tokens_N: Tensor) -> Tensor:
        """Logprobs [N] of one token per row."""
        chosen_N1 = self.logits_NV.gather(-1, tokens_N[:, None])
        return ((chosen_N1 - self.peak_N1) + self.log_peak_N1)[:, 0]

    def slope(self, tokens_N: Tensor, temperature: float) -> Tensor:
        """Gradient [N, V] of one token's logprob per row: (onehot − p) / T, with respect to the logits before the temperature.

        Overwrites the probabilities.
        """
        ones_N1 = torch.ones_like(self.peak_N1)
        slope_NV = self.probs_NV.neg_().scatter_add_(1, tokens_N[:, None], ones_N1)
        return slope_NV if temperature == 1 else slope_NV.div_(temperature)

    def entropy(self) -> Tensor:
        """Entropies [N] in nats; a token of probability 0 adds nothing."""
        products_NV = (self.probs_NV * self.logits_NV).nan_to_num_(nan=0.0)  # 0 · −∞ (NaN logits show in the peak)
        return (self.peak_N1 - self.log_peak_N1)[:, 0] - products_NV.sum(-1)


def draw(logits_NV: Tensor, params: Sequence[SamplingParams], uniforms_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_NV: fp32 logits.
        params: how each row is sampled; temperature 0 takes the most likely token.
        uniforms_N: fp64 numbers in [0, 1).

    Returns:
        Tokens [N], their logprobs [N] (before top-p, top-k and min-p), and whether each row's logits were usable [N].
    """
    distribution = Distribution.of(logits_NV, [row.temperature or 1.0 for row in params])
    usable_N = torch.isfinite(distribution.log_peak_N1[:, 0])
    weights_NV = distribution.probs_NV
    truncated = [row for row, param in enumerate(params) if param.truncates and param.temperature]
    if truncated:
        weights_NV = weights_NV.clone()
        for row in truncated:
            weights_NV[row] = _truncate(weights_NV[row], params[row])
    tokens_N = _invert(weights_NV, usable_N, uniforms_N)
    greedy = [row.temperature == 0 for row in params]
    if any(greedy):
        tokens_N = torch.where(
            torch.tensor(greedy, device=tokens_N.device), distribution.logits_NV.argmax(-1), tokens_N
        )
    return tokens_N, distribution.logprobs(tokens_N), usable_N


def _invert(weights_NV: Tensor, usable_N: Tensor, uniforms_N: Tensor) -> Tensor:
    """The token of each row at which its cumulative weight passes u · total: finds the block first, then the token."""
    n_rows, n_tokens = weights_NV.shape
    pad = -n_tokens % _BLOCK
    blocks_NBC = (F.pad(weights_NV, (0, pad)) if pad else weights_NV).view(n_rows, -1, _BLOCK)
    ends_NB = blocks_NBC.sum(-1).cumsum(-1)
    ends_NB = torch.where(usable_N[:, None], ends_NB, torch.ones_like(ends_NB))
    target_N1 = _below((uniforms_N * ends_NB[:, -1].double()).float()[:, None], ends_NB[:, -1:])
    block_N1 = torch.searchsorted(ends_NB, target_N1, right=True)
    before_N1 = torch.where(block_N1 > 0, ends_NB.gather(-1, (block_N1 - 1).clamp_min(0)), 0.0)
    within_NC = blocks_NBC[torch.arange(n_rows, device=weights_NV.device), block_N1[:, 0]].cumsum(-1)
    rest_N1 = _below(target_N1 - before_N1, within_NC[:, -1:])
    place_N1 = torch.searchsorted(within_NC, rest_N1, right=True)
    return (block_N1 * _BLOCK + place_N1)[:, 0].clamp_(max=n_tokens - 1)


def _below(target_N1: Tensor, total_N1: Tensor) -> Tensor:
    """Keep a target below the total: rounding may make them equal, and no token covers the total itself."""
    return torch.minimum(target_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))


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
        # two equal rows, because a GPU adds a single row in varying block order
        before = torch.cumsum(ranked.expand(2, -1) if ranked.is_cuda else ranked, -1).view(-1, len(ranked))[0] - ranked
        dropped = before >= param.top_p * ranked.sum()
        dropped[0] = False  # also if top_p is so small that it is 0 in fp32
        ranked = ranked.masked_fill(dropped, 0)
    return torch.zeros_like(kept).scatter_(0, order, ranked)
