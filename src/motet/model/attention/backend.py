"""The seam between a base and its attention: a backend is chosen once, when a base is loaded, and makes what each pass needs.

Legend: T packed rows, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from motet.model.kv_cache import KVCache
from motet.types import IntArray


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence whose keys and values go to a cache."""

    start: int
    """Position of the first token in its sequence; 0 unless earlier keys are in the cache."""
    length: int
    blocks: Sequence[int] = ()
    """The sequence's KV blocks."""
    slot: int = 0
    """Where its states are, on a base whose layers have some (see `StateCache`)."""


@dataclass(frozen=True)
class Prefix:
    """Packed rows of what comes before a sequence's own rows and is shared with others: a prompt, or more."""

    row: int
    length: int
    before: tuple[tuple[int, int], ...] = ()
    """First row and length of each stretch of rows before those, where it goes through several sequences."""

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """First row and length of all, in the order of the tokens."""
        return *self.before, (self.row, self.length)

    @property
    def rows(self) -> IntArray:
        """Of each token."""
        return np.concatenate([np.arange(row, row + length, dtype=np.int32) for row, length in self.stretches])


@dataclass(frozen=True)
class LayerCall:
    """What one layer asks of its attention."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None = None
    """For each query head a score that takes its share of the softmax and has no value (gpt-oss)."""


def prefix_length(prefix: Prefix | None) -> int:
    """Keys that come before a sequence's own."""
    return 0 if prefix is None else sum(length for _, length in prefix.stretches)


class AttentionPass(Protocol):
    """Which row attends to which keys in one pass through the decoder; handed to every layer."""

    calls: list[LayerCall]
    """Those of a pass so far, for the proof at load."""

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Causal attention [T, H, E] of one layer, with gradients where there is no cache.

        With a cache the new keys and values are written to it first.
        """
        ...


class ReplayablePass(AttentionPass, Protocol):
    """A pass whose shapes stay while sequences grow: it can be recorded, and replayed with other values."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Device memory that a replay reads; `values` are copied into it first."""
        ...

    def values(self, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """What the tensors have to hold, on the host, for as many other spans."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention, the same for sampling and training."""

    fixed_shapes: bool
    """Whether its products have the same shapes in any company; on a GPU nothing is exact otherwise."""
    reads_past_end: bool
    """Whether it reads keys after a sequence's end, and hides them: blocks of a cache have to be zeroed for it."""

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> AttentionPass:
        """A pass over whole sequences that together are all rows (training, scoring).

        Each may continue the rows of an earlier one, its prefix.
        """
        ...

    def cached(self, spans: Sequence[Span], cache: KVCache) -> AttentionPass:
        """A pass over spans whose keys and values go to a cache (prefill and decode); rows of padding belong to no span."""
        ...

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> ReplayablePass | None:
        """The same for sequences that may grow to so many blocks; None where shapes depend on the sequences."""
        ...
