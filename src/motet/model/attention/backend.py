"""The interface between a base and its attention. A backend is chosen when a base is loaded, and creates the passes.

Legend: T packed rows, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from motet.core.types import IntArray
from motet.model.kv_cache import KVCache


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence whose keys and values go to a cache."""

    start: int
    """Position of the first token in its sequence; 0 unless earlier keys are in the cache."""
    length: int
    blocks: Sequence[int] = ()
    """The sequence's KV blocks."""
    slot: int = 0
    """Slot of its states, on a base whose layers have states (see `StateCache`)."""


@dataclass(frozen=True)
class Prefix:
    """Packed rows that precede a sequence's own rows and are shared with other sequences, such as a prompt."""

    row: int
    length: int
    before: tuple[tuple[int, int], ...] = ()
    """First row and length of earlier stretches, if the prefix spans several sequences."""

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """First row and length of each stretch, in token order."""
        return *self.before, (self.row, self.length)

    @property
    def rows(self) -> IntArray:
        """Row of each token."""
        return np.concatenate([np.arange(row, row + length, dtype=np.int32) for row, length in self.stretches])


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one layer's attention."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None = None
    """For each query head, a score that takes part in the softmax but has no value (gpt-oss)."""


def prefix_length(prefix: Prefix | None) -> int:
    """Number of keys before a sequence's own."""
    return 0 if prefix is None else sum(length for _, length in prefix.stretches)


class AttentionPass(Protocol):
    """The keys of each row in one pass through the decoder; passed to every layer."""

    calls: list[LayerCall]
    """Calls of the pass so far, for the proof at load."""

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Causal attention [T, H, E] of one layer, with gradients if there is no cache.

        With a cache, the new keys and values are written to it first.
        """
        ...


class ReplayablePass(AttentionPass, Protocol):
    """A pass with fixed shapes while sequences grow: it can be recorded and replayed with other values."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Device memory that a replay reads; copy `values` into it first."""
        ...

    def values(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """New contents of the tensors, on the host, for the same number of other spans."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention, the same for sampling and training."""

    fixed_shapes: bool
    """Whether its products always have the same shapes; exactness on a GPU requires it."""
    reads_past_end: bool
    """Whether it reads keys after a sequence's end and masks them; cache blocks must then be zeroed."""

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> AttentionPass:
        """A pass over whole sequences that together form all rows (training, scoring).

        A sequence may continue rows of earlier sequences, its prefix.
        """
        ...

    def cached(self, spans: Sequence[Span], cache: KVCache) -> AttentionPass:
        """A pass over spans whose keys and values go to a cache (prefill and decode); padding rows belong to no span."""
        ...

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> ReplayablePass | None:
        """`cached` for sequences that may grow to `least_blocks` blocks; None if shapes depend on the sequences."""
        ...
