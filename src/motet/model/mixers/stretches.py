"""The order of packed rows within their sequences, for mixers that process a sequence token by token.

A sequence is split into stretches of consecutive rows at each point where another sequence branches off (the end of a
shared prefix). A stretch starts from the end state of another stretch, the state of a slot, or zeros. Stretches of one
wave depend only on earlier waves, so they are processed together.

Legend: T packed rows, S stretches of a wave, R rows of a wave, W taps of a convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from motet.model.attention.backend import AttentionBackend, AttentionPass, LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache
from motet.model.state_cache import StateCache

KEPT = 32
"""Steps between the states that are saved for the backward pass."""


@dataclass(frozen=True)
class Wave:
    """Stretches that are processed together, longest first."""

    rows_R: Tensor
    """Packed rows by step: the first row of every stretch, then all second rows, and so on."""
    counts: tuple[int, ...]
    """Number of stretches with at least 1, 2, … rows."""
    before_S: Tensor | None
    """The state before each stretch: its slot, or its index among the ends of earlier waves; None for zeros."""
    ends_S: Tensor
    """Last packed row of each stretch."""

    @functools.cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels: first row of each step, index of its first kept state, length of each stretch; int32."""
        starts, kept = accumulate(self.counts, initial=0), accumulate(self.counts[::KEPT], initial=0)
        lengths = (torch.tensor(self.counts)[:, None] > torch.arange(self.counts[0])).sum(0)
        device = self.rows_R.device
        starts_T, kept_T = (torch.tensor(list(each), dtype=torch.int32, device=device) for each in (starts, kept))
        return starts_T, kept_T, lengths.to(device, torch.int32)


@dataclass(frozen=True)
class _Stretch:
    first: int
    length: int
    parent: int | None
    """Index of the preceding stretch."""
    wave: int


@dataclass
class Stretches:
    """The waves of one pass, and the slots of states kept between passes."""

    waves: tuple[Wave, ...]
    n_rows: int
    """Rows of sequences; later padding rows belong to no stretch if there is a cache."""
    previous_T: Tensor
    """Preceding row in the sequence; −1 if there is none in this pass."""
    states: StateCache | None = None
    kernels: bool = False
    """Whether kernels compute the recurrence."""
    _taps: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def taps(self, width: int, n_rows: int) -> Tensor:
        """Rows that a causal convolution of this width reads at each row, oldest first: [T, W].

        Indices refer to the rows of the pass, followed by a row of zeros, and by the last W − 1 rows of each slot.
        """
        key = (width, n_rows)
        if key not in self._taps:
            device = self.previous_T.device
            zero, n_kept = n_rows, 0 if self.states is None else len(self.waves[0].ends_S) * (width - 1)
            previous = torch.full((n_rows + 1 + n_kept,), zero, device=device)
            previous[: self.n_rows] = torch.where(self.previous_T < 0, zero, self.previous_T)
            if n_kept:
                kept = torch.arange(zero + 1, zero + 1 + n_kept, device=device).view(-1, width - 1)
                previous[kept[:, 1:]] = kept[:, :-1]
                previous[self._firsts()] = kept[:, -1]
            columns = [torch.arange(n_rows, device=device)]
            for _ in range(width - 1):
                columns.append(previous[columns[-1]])
            self._taps[key] = torch.stack(columns[::-1], dim=1)
        return self._taps[key]

    @property
    def slots_S(self) -> Tensor:
        """Slot of each stretch's states."""
        slots_S = self.waves[0].before_S
        assert slots_S is not None
        return slots_S

    def _firsts(self) -> Tensor:
        wave = self.waves[0]
        return wave.rows_R[: wave.counts[0]]


def packed_stretches(
    lengths: Sequence[int],
    device: torch.device,
    prefixes: Sequence[Prefix | None] = (),
    *,
    kernels: bool = False,
) -> Stretches:
    """Stretches of whole sequences that together form all rows; a sequence may continue an earlier one, its prefix.

    Raises:
        ValueError: a prefix does not end in an earlier sequence.
    """
    before = list(prefixes) or [None] * len(lengths)
    *starts, total = accumulate(lengths, initial=0)
    cuts: dict[int, set[int]] = {}
    for prefix in before:
        if prefix is not None:
            cuts.setdefault(prefix.row, set()).add(prefix.length)
    stretches: list[_Stretch] = []
    ends: dict[tuple[int, int], int] = {}
    for start, length, prefix in zip(starts, lengths, before, strict=True):
        parent = None if prefix is None else ends.get((prefix.row, prefix.length))
        if prefix is not None and parent is None:
            raise ValueError(f"the prefix that ends at row {prefix.row} does not lie in earlier sequences")
        for first, last in pairwise(sorted({0, length} | {cut for cut in cuts.get(start, ()) if cut < length})):
            wave = 0 if parent is None else stretches[parent].wave + 1
            ends[start, last] = len(stretches)
            stretches.append(_Stretch(start + first, last - first, parent, wave))
            parent = ends[start, last]
    previous = torch.arange(-1, total - 1)
    waves: list[Wave] = []
    place: dict[int, int] = {}
    for depth in range(1 + max(stretch.wave for stretch in stretches)):
        members = sorted(
            (index for index, stretch in enumerate(stretches) if stretch.wave == depth),
            key=lambda index: -stretches[index].length,
        )
        parents = [stretches[index].parent for index in members]
        known = [place[parent] for parent in parents if parent is not None]
        waves.append(
            _wave([(stretches[index].first, stretches[index].length) for index in members], known or None, device)
        )
        for index, parent in zip(members, parents, strict=True):
            place[index] = len(place)
            stretch = None if parent is None else stretches[parent]
            previous[stretches[index].first] = -1 if stretch is None else stretch.first + stretch.length - 1
    return Stretches(tuple(waves), total, previous.to(device), kernels=kernels)


def cached_stretches(
    spans: Sequence[Span], states: StateCache, device: torch.device, *, kernels: bool = False
) -> Stretches:
    """Stretches of spans, which start from the states of their slots and write their end states back.

    Raises:
        ValueError: a span has no slot.
    """
    if any(span.slot == states.no_slot for span in spans):
        raise ValueError("a span of a base whose layers have states needs a slot (see StateCache.take)")
    *starts, total = accumulate((span.length for span in spans), initial=0)
    order = sorted(range(len(spans)), key=lambda index: -spans[index].length)
    wave = _wave(
        [(starts[index], spans[index].length) for index in order], [spans[index].slot for index in order], device
    )
    previous = torch.arange(-1, total - 1, device=device)
    previous[torch.tensor(starts, device=device)] = -1
    return Stretches((wave,), total, previous, states, kernels)


def _wave(stretches: Sequence[tuple[int, int]], before: Sequence[int] | None, device: torch.device) -> Wave:
    """A wave of stretches given by first row and length, longest first."""
    firsts, lengths = (torch.tensor(part) for part in zip(*stretches, strict=True))
    steps = torch.arange(int(lengths[0]))
    counts = (lengths[None] > steps[:, None]).sum(1)
    rows_R = torch.cat([firsts[:count] + step for step, count in enumerate(counts.tolist())])
    before_S = None if before is None else torch.tensor(before, device=device)
    return Wave(rows_R.to(device), tuple(counts.tolist()), before_S, (firsts + lengths - 1).to(device))


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
