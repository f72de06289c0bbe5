"""Attention of a base: with torch's products, or with Triton kernels. Each backend has its own metadata module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import BaseModelError
from motet.model.arithmetic import Arithmetic
from motet.model.attention.backend import AttentionBackend, AttentionPass, LayerCall, Prefix, ReplayablePass, Span
from motet.model.attention.torch_attention import TorchAttention

__all__ = ["AttentionBackend", "AttentionPass", "LayerCall", "Prefix", "ReplayablePass", "Span"]

NAME = "motet"
"""Name in transformers' `AttentionInterface`."""

INSTEAD = "take a base of another architecture"
"""Advice in messages about unsupported attention."""

_UNDERSTOOD = {"use_cache", "position_ids", "cache_position", "output_attentions", "return_dict", "is_causal"}


def attention_backend(
    arithmetic: Arithmetic, device: torch.device, dtype: torch.dtype, *, width: int, block_size: int
) -> AttentionBackend:
    """The backend of an arithmetic. Torch's reads `block_size` keys at a time; `width` is the narrowest head's."""
    if arithmetic.attention == "torch":
        return TorchAttention(device, dtype, width=width, block_size=block_size, rows=arithmetic.rows)
    # most machines without a GPU have no Triton
    from motet.model.attention.triton_attention import TritonAttention

    return TritonAttention(device)


def motet_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_pass: AttentionPass | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer; query [1, H, T, E], key and value [1, K, T, E] → [1, T, H, E].

    Raises:
        BaseModelError: the model passes an unsupported argument.
    """
    name = type(module).__name__
    strange = sorted(key for key, value in unknown.items() if value is not None and key not in _UNDERSTOOD)
    if attention_pass is None:
        raise BaseModelError(f"{name} does not pass keyword arguments to its attention function; {INSTEAD}")
    if getattr(module, "is_causal", True) is False:
        raise BaseModelError(f"{name} attends to later tokens, so it is not a causal language model; {INSTEAD}")
    if strange or attention_mask is not None:
        what = ", ".join(strange) or "an attention mask"
        raise BaseModelError(f"{name} needs attention with {what}, which Motet does not support; {INSTEAD}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(int(getattr(module, "layer_idx", -1)), scaling, sliding_window, softcap, s_aux)
    attention_pass.calls.append(call)
    return attention_pass.attend(call, *(states[0].transpose(0, 1) for states in (query, key, value)))[None], None
