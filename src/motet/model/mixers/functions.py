"""Replacements for transformers' mixer kernels: a causal convolution, and a recurrence token by token.

transformers' own functions process prompts in chunks and decoded tokens one by one, with different bits. They ignore
the boundaries of packed sequences, and are silently replaced if `fla`, `causal_conv1d` or `mamba_ssm` is installed.
The functions here replace them by name.

Legend: T packed rows, C channels, W taps, H heads, K key width, V value width, G groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.core.errors import BaseModelError
from motet.model.mixers.recurrence import RecurrentRows, recur
from motet.model.mixers.stretches import StatefulPass, Stretches

_LANES = 32
"""fp32 numbers that a CPU processes at a time; `softplus` of a remainder has other bits."""


class MixerFunctions:
    """The functions of one layer's mixer; they take the arguments of the functions that they replace."""

    def __init__(self, layer: int, mixer: str) -> None:
        self._layer, self._mixer = layer, mixer

    @property
    def by_name(self) -> dict[str, Callable[..., Any]]:
        """The functions by their names in transformers' mixers."""
        return {
            "causal_conv1d_fn": self.convolve,
            "torch_chunk_gated_delta_rule": self.delta_rule,
            "mamba2_chunk_scan": self.chunk_scan,
            "mamba2_split_conv1d_scan_combined": self.no_shortcut,
            "causal_conv1d_update": self.no_cache,
            "torch_recurrent_gated_delta_rule": self.no_cache,
            "mamba2_selective_state_update": self.no_cache,
        }

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        attention_pass: StatefulPass | None = None,
        **_: Any,
    ) -> Tensor:
        """A causal convolution of each channel [1, C, T] as a fixed sum of products, oldest first, in fp32."""
        stretches, width = self._stretches(attention_pass), weight.shape[-1]
        rows_TC = hidden_states[0].t().float()
        taps_TW = stretches.taps(width, len(rows_TC))
        states, source = stretches.states, [rows_TC, rows_TC.new_zeros(1, rows_TC.shape[1])]
        if states is not None:
            kept = states.read(self._layer, "convolution", stretches.slots_S, (width - 1, rows_TC.shape[1]))
            source.append(kept.flatten(0, 1))
        source_TC = torch.cat(source)
        total_TC = None
        for tap_T, weight_C in zip(taps_TW.unbind(1), weight.float().unbind(-1), strict=True):
            product_TC = source_TC.index_select(0, tap_T) * weight_C
            total_TC = product_TC if total_TC is None else total_TC + product_TC
        assert total_TC is not None
        if states is not None:
            last_SW = taps_TW.index_select(0, stretches.waves[0].ends_S)[:, 1:]
            states.write(self._layer, "convolution", stretches.slots_S, source_TC[last_SW])
        if bias is not None:
            total_TC = total_TC + bias.float()
        output_TC = total_TC.to(hidden_states.dtype)
        if activation is not None:
            output_TC = _activation(activation)(output_TC)
        return output_TC.t()[None]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        attention_pass: StatefulPass | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The gated delta rule: queries, keys [1, T, G, K], values [1, T, H, V], log decay, beta [1, T, H] → [1, T, H, V]."""
        query_TGK, key_TGK, value_THV, decay_TH, beta_TH = (part[0].float() for part in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query_TGK, key_TGK = _normal(query_TGK), _normal(key_TGK)
        query_TGK = query_TGK * query_TGK.shape[-1] ** -0.5
        n_heads = value_THV.shape[1]
        rows = RecurrentRows(_for_heads(query_TGK, n_heads), _for_heads(key_TGK, n_heads), value_THV, decay_TH, beta_TH)
        return recur(rows, self._stretches(attention_pass), self._layer).to(query.dtype)[None], None

    def chunk_scan(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        attention_pass: StatefulPass | None = None,
        **_: Any,
    ) -> Tensor:
        """Mamba2's scan: inputs [1, T, H, V], steps [1, T, H], A and D [H], B and C [1, T, G, K] → [1, T, H, V]."""
        x_THV, step_TH = hidden_states[0].float(), dt[0].float()
        n_heads = x_THV.shape[1]
        if dt_bias is not None:
            step_TH = step_TH + dt_bias.float()
        if dt_softplus:
            step_TH = F.softplus(F.pad(step_TH, (0, -n_heads % _LANES)))[:, :n_heads]
        step_TH = step_TH.clamp(*dt_limit)
        rows = RecurrentRows(
            _for_heads(C[0].float(), n_heads),
            _for_heads(B[0].float(), n_heads),
            x_THV * step_TH[..., None],
            A.float() * step_TH,
            None,
        )
        output_THV = recur(rows, self._stretches(attention_pass), self._layer)
        if D is not None:
            output_THV = output_THV + D.float()[:, None] * x_THV
        return output_THV[None]

    def no_shortcut(self, *_: Any, **__: Any) -> None:
        """Return None, as transformers does without kernels: the mixer then uses its default path."""

    def no_cache(self, *_: Any, **__: Any) -> None:
        """Raise BaseModelError, because the mixer was run with transformers' own cache."""
        raise BaseModelError(f"{self._mixer} was run with a cache of transformers; use Motet's passes")

    def _stretches(self, attention_pass: StatefulPass | None) -> Stretches:
        if attention_pass is None:
            raise BaseModelError(f"{self._mixer} does not pass keyword arguments to its functions")
        return attention_pass.stretches


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


def _normal(rows_TGK: Tensor) -> Tensor:
    """Normalise to length one, with an epsilon against division by zero."""
    return rows_TGK * torch.rsqrt(rows_TGK.square().sum(-1, keepdim=True) + 1e-6)


def _for_heads(rows_TGK: Tensor, n_heads: int) -> Tensor:
    """Repeat each group for the heads that share it: [T, G, K] → [T, H, K]."""
    return rows_TGK.repeat_interleave(n_heads // rows_TGK.shape[1], dim=1)
