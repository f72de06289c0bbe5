"""A pass through a base whose layers keep states: its attention, and the rows that continue each state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet.model.attention.backend import AttentionBackend, AttentionPass, LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache
from motet.model.mixers.stretches import Stretches, cached_stretches, packed_stretches


@dataclass
class StatefulPass:
    """An `AttentionPass` that mixers also read."""

    attention: AttentionPass
    stretches: Stretches
    calls: list[LayerCall] = field(init=False)

    def __post_init__(self) -> None:
        self.calls = self.attention.calls

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Causal attention [T, H, E] of one layer."""
        return self.attention.attend(call, query_THE, key_TKE, value_TKE)


class StatefulBackend:
    """The `AttentionBackend` of a base whose layers keep states; wraps the backend of its attention layers."""

    def __init__(self, attention: AttentionBackend, device: torch.device, *, kernels: bool) -> None:
        """`kernels` computes recurrences in Triton."""
        self._attention, self._device, self._kernels = attention, device, kernels
        self.fixed_shapes = attention.fixed_shapes and kernels
        self.reads_past_end = attention.reads_past_end

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> StatefulPass:
        """A pass over whole sequences."""
        return StatefulPass(
            self._attention.packed(lengths, prefixes),
            packed_stretches(lengths, self._device, prefixes, kernels=self._kernels),
        )

    def cached(self, spans: Sequence[Span], cache: KVCache) -> StatefulPass:
        """A pass over spans whose keys and values go to a cache, and whose states are in their slots."""
        return StatefulPass(
            self._attention.cached(spans, cache),
            cached_stretches(spans, cache.states, self._device, kernels=self._kernels),
        )

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> None:
        """None: recording a pass would also advance its states."""
