"""Which packed row attends to which keys: made once per forward pass and handed to every layer.

Spans whose attention has the same shape are grouped, so that a layer makes a few batched products instead of one per sequence.

Legend: T packed rows, S sequences of a group, Q padded queries of a sequence, L padded keys of a sequence, B blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.kv_cache import KVCache

ROWS = 4
"""Every product and reduction gets a multiple of this many rows."""

LEAST_FILL = 0.75
"""Shortest member of a group, as a share of its longest: more groups are more calls, fewer are more padding."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence whose keys and values go to a cache."""

    start: int
    """Position of the first token in its sequence; 0 unless earlier keys are in the cache."""
    length: int
    blocks: Sequence[int] = ()
    """The sequence's KV blocks."""


@dataclass(frozen=True)
class Prefix:
    """Packed rows of a prompt that comes before a sequence's own rows and is shared with others."""

    row: int
    length: int


@dataclass(frozen=True)
class Group:
    """Spans whose attention has the same shape."""

    query_rows_SQ: Tensor | None
    """Packed row of each padded query; None where sequence s has the one query of row s."""
    positions_SQ: Tensor
    n_blocks: int
    first_query_B: tuple[int, ...]
    """Before this padded query nobody in the group sees a key of the block."""
    seen_B: tuple[bool, ...]
    """Whether every query sees every key of the block, where no window hides it."""
    key_rows_SL: Tensor | None = None
    """Packed row of each padded key, where there is no cache."""
    block_table_BS: Tensor | None = None
    """The cache's blocks otherwise."""
    padding_SQ: Tensor | None = None
    """True for queries that only repeat a sequence's last one; needed where gradients are."""


@dataclass(frozen=True)
class SharedKeys:
    """Sequences that begin with the same packed rows; the gradients of those keys add up."""

    prefix: Prefix
    places_NP: Tensor
    """Places of the prefix's rows among the padded keys of all groups, for each of the N sequences in their order."""


@dataclass
class AttentionLayout:
    """Where each packed row's keys are."""

    groups: list[Group]
    out_rows_T: Tensor | None
    """Place of each packed row among the padded queries of all groups, one after another; None where they agree already."""
    block_size: int
    key_places_T: Tensor | None = None
    """Place of each packed row among the padded keys of all groups, where there is no cache."""
    shared: list[SharedKeys] = field(default_factory=list)
    cache: KVCache | None = None
    write_blocks_T: Tensor | None = None
    write_offsets_T: Tensor | None = None
    calls: list[tuple[int, int | None]] = field(default_factory=list)
    """Layers that asked, and their sliding windows, for the proof at load."""
    _masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)
    _paddings: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def hidden_SRC(self, index: int, block: int, window: int | None, fold: int) -> Tensor | None:
        """True where a folded query row must not see a key of a block: [S, 1, R, C]; each query makes `fold` rows.

        None where every query sees every key.
        """
        if window is None and self.groups[index].seen_B[block]:
            return None
        hidden = self._hidden_SRL(index, window, fold)
        return hidden[..., block * self.block_size : (block + 1) * self.block_size]

    def padding_SR(self, index: int, fold: int) -> Tensor:
        """True for folded query rows that only repeat a sequence's last query: [S, 1, R, 1]."""
        found = self._paddings.get((index, fold))
        if found is None:
            padding_SQ = self.groups[index].padding_SQ
            assert padding_SQ is not None
            found = padding_SQ.repeat_interleave(fold, dim=1)
            found = F.pad(found, (0, -found.shape[1] % ROWS), value=True)[:, None, :, None]
            self._paddings[(index, fold)] = found
        return found

    def _hidden_SRL(self, index: int, window: int | None, fold: int) -> Tensor:
        found = self._masks.get((index, window, fold))
        if found is None:
            group = self.groups[index]
            positions = group.positions_SQ
            keys_L = torch.arange(group.n_blocks * self.block_size, device=positions.device)
            hidden = keys_L[None, None, :] > positions[:, :, None]
            if window is not None:
                hidden |= positions[:, :, None] - keys_L[None, None, :] >= window
            n_rows = positions.shape[1] * fold
            found = hidden.repeat_interleave(fold, dim=1)
            if n_rows % ROWS:
                found = torch.cat([found, found[:, -1:].expand(-1, -n_rows % ROWS, -1)], dim=1)
            found = found[:, None].contiguous()
            self._masks[(index, window, fold)] = found
        return found


def packed_layout(
    lengths: Sequence[int], block_size: int, device: torch.device, prefixes: Sequence[Prefix | None] = ()
) -> AttentionLayout:
    """Layout of whole sequences, one after another, without a cache (training, scoring).

    Args:
        lengths: packed rows of each sequence, in order.
        block_size: keys that attention reads at a time.
        device: where the index tensors go.
        prefixes: for each sequence the rows of an earlier one that it continues, if any.
    """
    before = list(prefixes) or [None] * len(lengths)
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    reach = [-(-(length + _length(prefix)) // block_size) for length, prefix in zip(lengths, before, strict=True)]
    out_rows, key_places = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    groups: list[Group] = []
    first_keys = [0] * len(lengths)
    queries = keys = 0
    for n_blocks, members in _alike(lengths, reach):
        n_queries, n_keys = round_up(max(lengths[index] for index in members), ROWS), n_blocks * block_size
        first_S = torch.tensor([_length(before[index]) for index in members])[:, None]
        last_S = torch.tensor([lengths[index] - 1 for index in members])[:, None]
        starts_S = torch.tensor([starts[index] for index in members])[:, None]
        query_Q, key_L = torch.arange(n_queries)[None], torch.arange(n_keys)[None]
        own_SQ = torch.minimum(query_Q, last_S)
        key_rows_SL = torch.minimum(key_L, first_S + last_S) - first_S + starts_S
        for place, index in enumerate(members):
            start, length, prefix = starts[index], lengths[index], before[index]
            rows = torch.arange(length)
            first_keys[index] = keys + place * n_keys
            out_rows[start : start + length] = queries + place * n_queries + rows
            key_places[start : start + length] = keys + place * n_keys + _length(prefix) + rows
            if prefix is not None:
                key_rows_SL[place, : prefix.length] = torch.arange(prefix.row, prefix.row + prefix.length)
        groups.append(
            Group(
                (own_SQ + starts_S).to(device),
                (own_SQ + first_S).to(device),
                n_blocks,
                _first_queries(int(first_S.max()), n_queries, n_blocks, block_size),
                _seen(int(first_S.min()), n_blocks, block_size),
                key_rows_SL=key_rows_SL.to(device),
                padding_SQ=(query_Q > last_S).to(device),
            )
        )
        queries += len(members) * n_queries
        keys += len(members) * n_keys
    shared = _shared_keys(before, first_keys, device)
    return AttentionLayout(groups, out_rows.to(device), block_size, key_places.to(device), shared)


def _length(prefix: Prefix | None) -> int:
    return 0 if prefix is None else prefix.length


def _alike(lengths: Sequence[int], reach: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Sequences to be padded to one shape: equal numbers of key blocks, and none much shorter than the longest."""
    found: list[tuple[int, list[int]]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (reach[index], -lengths[index])):
        if found and found[-1][0] == reach[index] and lengths[index] >= LEAST_FILL * longest:
            found[-1][1].append(index)
        else:
            found.append((reach[index], [index]))
            longest = lengths[index]
    return [(n_blocks, sorted(members)) for n_blocks, members in found]


def _seen(first_position: int, n_blocks: int, block_size: int) -> tuple[bool, ...]:
    return tuple(first_position >= (block + 1) * block_size - 1 for block in range(n_blocks))


def _first_queries(first_position: int, n_queries: int, n_blocks: int, block_size: int) -> tuple[int, ...]:
    """Multiples of four, so that what is left of the queries is one too."""
    firsts = [max(0, block * block_size - first_position) // ROWS * ROWS for block in range(n_blocks)]
    return tuple(min(first, n_queries - ROWS) for first in firsts)


def _shared_keys(prefixes: list[Prefix | None], first_keys: list[int], device: torch.device) -> list[SharedKeys]:
    """By prefix; sequences in their own order, whichever groups company has put them in."""
    members: dict[Prefix, list[int]] = {}
    for prefix, first in zip(prefixes, first_keys, strict=True):
        if prefix is not None:
            members.setdefault(prefix, []).append(first)
    return [
        SharedKeys(prefix, (torch.tensor(firsts)[:, None] + torch.arange(prefix.length)).to(device))
        for prefix, firsts in members.items()
    ]


def cached_layout(spans: Sequence[Span], cache: KVCache, device: torch.device) -> AttentionLayout:
    """Layout of spans whose keys and values go to a cache (prefill and decode); rows are padded to a multiple of four."""
    block = cache.block_size
    blocks_T: list[int] = []
    offsets_T: list[int] = []
    for span in spans:
        positions = range(span.start, span.start + span.length)
        blocks_T.extend(span.blocks[position // block] for position in positions)
        offsets_T.extend(position % block for position in positions)
    make = _decode_groups if all(span.length == 1 for span in spans) else _prefill_groups
    groups, out_rows_T = make(spans, cache, device)
    return AttentionLayout(
        groups,
        out_rows_T,
        block,
        cache=cache,
        write_blocks_T=torch.tensor(blocks_T, device=device),
        write_offsets_T=torch.tensor(offsets_T, device=device),
    )


def _decode_groups(spans: Sequence[Span], cache: KVCache, device: torch.device) -> tuple[list[Group], None]:
    """One query per sequence, in the order of the rows; rows of padding look at the block of zeros."""
    reach = [-(-(span.start + 1) // cache.block_size) for span in spans]
    n_blocks = max(reach)
    tables = [
        [*span.blocks[:own], *([cache.zero_block] * (n_blocks - own))] for span, own in zip(spans, reach, strict=True)
    ]
    pad = -len(spans) % ROWS
    tables.extend([[cache.zero_block] * n_blocks] * pad)
    positions = torch.tensor([[span.start] for span in spans] + [[0]] * pad, device=device)
    table_BS = torch.tensor(tables, device=device).t().contiguous()
    first = 0 if pad else min(span.start for span in spans)
    seen_B = _seen(first, n_blocks, cache.block_size)
    return [Group(None, positions, n_blocks, (0,) * n_blocks, seen_B, block_table_BS=table_BS)], None


def _prefill_groups(spans: Sequence[Span], cache: KVCache, device: torch.device) -> tuple[list[Group], Tensor]:
    starts, total = [], 0
    for span in spans:
        starts.append(total)
        total += span.length
    reach = [-(-(span.start + span.length) // cache.block_size) for span in spans]
    groups: list[Group] = []
    order = [0] * round_up(total, ROWS)
    offset = 0
    for n_blocks, members in _alike([span.length for span in spans], reach):
        n_queries = round_up(max(spans[index].length for index in members), ROWS)
        rows, positions = [], []
        for place, index in enumerate(members):
            span = spans[index]
            own = [min(query, span.length - 1) for query in range(n_queries)]
            rows.append([starts[index] + query for query in own])
            positions.append([span.start + query for query in own])
            first = offset + place * n_queries
            order[starts[index] : starts[index] + span.length] = range(first, first + span.length)
        tables = [list(spans[index].blocks[:n_blocks]) for index in members]
        groups.append(
            Group(
                torch.tensor(rows, device=device),
                torch.tensor(positions, device=device),
                n_blocks,
                _first_queries(max(spans[index].start for index in members), n_queries, n_blocks, cache.block_size),
                _seen(min(spans[index].start for index in members), n_blocks, cache.block_size),
                block_table_BS=torch.tensor(tables, device=device).t().contiguous(),
            )
        )
        offset += len(members) * n_queries
    return groups, torch.tensor(order, device=device)
