"""Maps packed rows to their keys, for attention with torch's products; computed once per forward pass.

Spans with the same attention shape are grouped, so that a layer runs a few batched products instead of one per
sequence.

Legend: T packed rows, S sequences of a group, Q padded queries of a sequence, L padded keys of a sequence, B blocks of
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import LEAST_FILL, ROWS, round_up
from motet.model.attention.backend import Prefix, Span, prefix_length
from motet.model.kv_cache import KVCache, Writes

TILE = 128
"""Folded query rows summed in one product."""

NO_WINDOW = 1 << 30
"""More keys than any sequence has."""

MINUS_INFINITY = -(1 << 23)
"""The bits of −∞ in fp32, as int32."""


@dataclass(frozen=True)
class KeyRange:
    """Consecutive key blocks that all queries from `first_query` on read in one product."""

    start: int
    stop: int
    first_query: int
    """No earlier padded query in the group sees a key of these blocks."""
    hidden_from: int
    """First block that some query sees only partly, without a window; `stop` if there is none."""


@dataclass(frozen=True)
class Mask:
    """Bits that hide keys of a run. Scores are replaced, not added to, so that another tenant's Inf or NaN cannot spread."""

    block: int
    """First block of the run that the mask covers; it also covers all later blocks."""
    row: int
    """First folded query row of the group that the mask covers."""
    keep_BSRC: Tensor
    """int32 [B, S, 1, R, C]: all bits set for seen keys, none for hidden ones."""
    hide_BSRC: Tensor
    """The bits of −∞ for hidden keys, 0 for seen ones."""


@dataclass(frozen=True)
class Reach:
    """The folded query rows of a group that attend to a run of blocks."""

    stop: int
    """End of the rows that see a key of the run."""
    masks: tuple[Mask, ...]
    """Masks for rows that see only some keys of the run; rows without a mask see all of them."""

    def replace_hidden(self, states_BSKRC: Tensor, first: int, *, infinite: bool) -> None:
        """Replace hidden entries of rows from `first` on: scores by −∞, weights by 0."""
        for mask in self.masks:
            row, cut = max(mask.row - first, 0), max(first - mask.row, 0)
            keep, hide = (bits[:, :, :, cut:] for bits in (mask.keep_BSRC, mask.hide_BSRC))
            states = states_BSKRC[mask.block :, :, :, row : row + keep.shape[3]]
            bits = states.view(torch.int32).bitwise_and_(keep[:, :, :, : states.shape[3]])
            if infinite:
                bits.bitwise_or_(hide[:, :, :, : states.shape[3]])


@dataclass(frozen=True)
class SpanGroup:
    """Spans with the same attention shape."""

    query_rows_SQ: Tensor | None
    """Packed row of each padded query; None if sequence s has a single query in row s."""
    positions_SQ: Tensor
    n_blocks: int
    runs: tuple[KeyRange, ...]
    key_rows_SL: Tensor | None = None
    """Packed row of each padded key, without a cache."""
    block_table_BS: Tensor | None = None
    """Blocks in the cache."""
    padding_SQ: Tensor | None = None
    """True for queries that repeat a sequence's last one as padding; set only if gradients are needed."""


@dataclass(frozen=True)
class SharedKeys:
    """Sequences that begin with the same packed rows; gradients of those keys are summed."""

    prefix: Prefix
    places_NP: Tensor
    """Positions of the prefix's rows among the padded keys of all groups, for each of the N sequences in order."""


@dataclass
class TorchMetadata:
    """Positions of the keys of each packed row."""

    groups: list[SpanGroup]
    out_rows_T: Tensor | None
    """Position of each packed row among the padded queries of all groups; None if they are equal."""
    block_size: int
    key_places_T: Tensor | None = None
    """Position of each packed row among the padded keys of all groups, without a cache."""
    shared: list[SharedKeys] = field(default_factory=list)
    cache: KVCache | None = None
    rows: int = ROWS
    """Queries of a sequence, and rows of its query heads, are padded to a multiple of this."""
    writes: Writes | None = None
    _reaches: dict[tuple[int, int, int | None, int], Reach] = field(default_factory=dict)
    _paddings: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def reach(self, index: int, run: KeyRange, window: int | None, fold: int) -> Reach:
        """The part of a run that a group's folded query rows see; each query makes `fold` rows."""
        key = (index, run.start, window, fold)
        if key not in self._reaches:
            self._reaches[key] = self._reach(self.groups[index].positions_SQ, run, window, fold)
        return self._reaches[key]

    def _reach(self, positions_SQ: Tensor, run: KeyRange, window: int | None, fold: int) -> Reach:
        first, n_rows = run.first_query * fold // TILE * TILE, round_up(positions_SQ.shape[1] * fold, self.rows)
        positions_SR = positions_SQ.repeat_interleave(fold, dim=1)
        pad = positions_SR[:, -1:].expand(-1, n_rows - positions_SR.shape[1])
        positions_SR = torch.cat([positions_SR, pad], dim=1)[:, first:]
        stop, block, last_key = n_rows, run.hidden_from, run.stop * self.block_size - 1
        if window is not None:
            block = run.start
            stop = first + _after_last((positions_SR - last_key < window).any(0))
        if block == run.stop:
            return Reach(stop, ())
        key_L = torch.arange(block * self.block_size, last_key + 1, device=positions_SR.device)
        window = window or NO_WINDOW
        partial_R = ((positions_SR < last_key) | (positions_SR - key_L[0] >= window)).any(0)
        masks = []
        # the most rows that a product may have
        covered = round_up(max(stop, run.first_query * fold + 1), TILE) + self.rows
        for start, end in _stretches(partial_R[: covered - first]):
            distance_SRL = positions_SR[:, start:end, None] - key_L
            hidden_SRL = (distance_SRL < 0) | (distance_SRL >= window)
            hidden = hidden_SRL.unflatten(-1, (-1, self.block_size)).permute(2, 0, 1, 3)[:, :, None].int().contiguous()
            masks.append(Mask(block - run.start, first + start, hidden - 1, -hidden & MINUS_INFINITY))
        return Reach(stop, tuple(masks))

    def padding_SR(self, index: int, fold: int) -> Tensor | None:
        """True for folded query rows that repeat a sequence's last query as padding: [S, 1, R, 1]; None without padding."""
        padding_SQ = self.groups[index].padding_SQ
        if padding_SQ is None:
            return None
        padding_SR1 = self._paddings.get((index, fold))
        if padding_SR1 is None:
            padding_SR1 = self._paddings[(index, fold)] = padding_SQ.repeat_interleave(fold, dim=1)[:, None, :, None]
        return padding_SR1


def _after_last(true_R: Tensor) -> int:
    """The index after the last true element; 0 if there is none."""
    places = true_R.nonzero()
    return int(places[-1]) + 1 if len(places) else 0


def _stretches(true_R: Tensor) -> list[tuple[int, int]]:
    """Start and end of each stretch of true elements."""
    edges = torch.diff(F.pad(true_R.int(), (1, 1))).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def packed_metadata(
    lengths: Sequence[int],
    block_size: int,
    device: torch.device,
    prefixes: Sequence[Prefix | None] = (),
    rows: int = ROWS,
) -> TorchMetadata:
    """Metadata of whole sequences in order; a sequence's queries are padded to a multiple of `rows`."""
    before = list(prefixes) or [None] * len(lengths)
    *starts, total = accumulate(lengths, initial=0)
    reach = [-(-(length + prefix_length(prefix)) // block_size) for length, prefix in zip(lengths, before, strict=True)]
    out_rows, key_places = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    groups: list[SpanGroup] = []
    first_keys = [0] * len(lengths)
    queries = keys = 0
    for n_blocks, members in _alike(lengths, reach):
        n_queries, n_keys = round_up(max(lengths[index] for index in members), rows), n_blocks * block_size
        first_S = torch.tensor([prefix_length(before[index]) for index in members])[:, None]
        last_S = torch.tensor([lengths[index] - 1 for index in members])[:, None]
        starts_S = torch.tensor([starts[index] for index in members])[:, None]
        query_Q, key_L = torch.arange(n_queries)[None], torch.arange(n_keys)[None]
        own_SQ = torch.minimum(query_Q, last_S)
        key_rows_SL = torch.minimum(key_L, first_S + last_S) - first_S + starts_S
        for place, index in enumerate(members):
            start, length, prefix = starts[index], lengths[index], before[index]
            own = torch.arange(length)
            first_keys[index] = keys + place * n_keys
            out_rows[start : start + length] = queries + place * n_queries + own
            key_places[start : start + length] = keys + place * n_keys + prefix_length(prefix) + own
            if prefix is not None:
                key_rows_SL[place, : prefix_length(prefix)] = torch.from_numpy(prefix.rows).long()
        groups.append(
            SpanGroup(
                (own_SQ + starts_S).to(device),
                (own_SQ + first_S).to(device),
                n_blocks,
                _runs(int(first_S.min()), int(first_S.max()), n_queries, n_blocks, block_size, rows),
                key_rows_SL=key_rows_SL.to(device),
                padding_SQ=(query_Q > last_S).to(device) if n_queries > int(last_S.min()) + 1 else None,
            )
        )
        queries += len(members) * n_queries
        keys += len(members) * n_keys
    shared = _shared_keys(before, first_keys, device)
    return TorchMetadata(groups, out_rows.to(device), block_size, key_places.to(device), shared, rows=rows)


def _alike(lengths: Sequence[int], reach: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Sequences to pad to one shape: equal numbers of key blocks, and similar lengths."""
    alike: list[tuple[int, list[int]]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (reach[index], -lengths[index])):
        if alike and alike[-1][0] == reach[index] and lengths[index] >= LEAST_FILL * longest:
            alike[-1][1].append(index)
        else:
            alike.append((reach[index], [index]))
            longest = lengths[index]
    return [(n_blocks, sorted(members)) for n_blocks, members in alike]


def _runs(
    least_first: int, most_first: int, n_queries: int, n_blocks: int, block_size: int, rows: int
) -> tuple[KeyRange, ...]:
    """One run per block, for a group whose first positions range from `least_first` to `most_first`.

    The first query of a block is a multiple of `rows`, so that the number of remaining queries is a multiple too.
    """
    runs = []
    for block in range(n_blocks):
        first = min(max(0, block * block_size - most_first) // rows * rows, n_queries - rows)
        hidden_from = block if least_first < (block + 1) * block_size - 1 else block + 1
        runs.append(KeyRange(block, block + 1, first, hidden_from))
    return tuple(runs)


def _shared_keys(prefixes: list[Prefix | None], first_keys: list[int], device: torch.device) -> list[SharedKeys]:
    """Group sequences by prefix, in batch order, independent of the span groups."""
    members: dict[Prefix, list[int]] = {}
    for prefix, first in zip(prefixes, first_keys, strict=True):
        if prefix is not None:
            members.setdefault(prefix, []).append(first)
    return [
        SharedKeys(prefix, (torch.tensor(firsts)[:, None] + torch.arange(prefix_length(prefix))).to(device))
        for prefix, firsts in members.items()
    ]


def cached_metadata(
    spans: Sequence[Span], cache: KVCache, device: torch.device, multiple: int = ROWS, rows: int = ROWS
) -> TorchMetadata:
    """Metadata of spans whose keys and values go to a cache (prefill and decode).

    All rows together are padded to a multiple, a sequence's queries to a multiple of `rows`.
    """
    block = cache.block_size
    blocks_T: list[int] = []
    offsets_T: list[int] = []
    for span in spans:
        positions = range(span.start, span.start + span.length)
        blocks_T.extend(span.blocks[position // block] for position in positions)
        offsets_T.extend(position % block for position in positions)
    make = _decode_groups if all(span.length == 1 for span in spans) else _prefill_groups
    groups, out_rows_T = make(spans, cache, device, multiple, rows)
    return TorchMetadata(
        groups,
        out_rows_T,
        block,
        cache=cache,
        rows=rows,
        writes=Writes(torch.tensor(blocks_T, device=device), torch.tensor(offsets_T, device=device)),
    )


def _decode_groups(
    spans: Sequence[Span], cache: KVCache, device: torch.device, multiple: int, _: int
) -> tuple[list[SpanGroup], None]:
    """One query per sequence, in row order; padding rows read the zero block."""
    reach = [-(-(span.start + 1) // cache.block_size) for span in spans]
    n_blocks = max(reach)
    tables = [
        [*span.blocks[:own], *([cache.zero_block] * (n_blocks - own))] for span, own in zip(spans, reach, strict=True)
    ]
    pad = -len(spans) % multiple
    tables.extend([[cache.zero_block] * n_blocks] * pad)
    positions = torch.tensor([[span.start] for span in spans] + [[0]] * pad, device=device)
    table_BS = torch.tensor(tables, device=device).t().contiguous()
    first = 0 if pad else min(span.start for span in spans)
    hidden_from = min((first + 1) // cache.block_size, n_blocks)
    run = KeyRange(0, n_blocks, 0, hidden_from)
    return [SpanGroup(None, positions, n_blocks, (run,), block_table_BS=table_BS)], None


def _prefill_groups(
    spans: Sequence[Span], cache: KVCache, device: torch.device, multiple: int, least: int
) -> tuple[list[SpanGroup], Tensor]:
    *starts, total = accumulate((span.length for span in spans), initial=0)
    reach = [-(-(span.start + span.length) // cache.block_size) for span in spans]
    groups: list[SpanGroup] = []
    order = [0] * round_up(total, multiple)
    offset = 0
    for n_blocks, members in _alike([span.length for span in spans], reach):
        n_queries = round_up(max(spans[index].length for index in members), least)
        rows, positions = [], []
        for place, index in enumerate(members):
            span = spans[index]
            own = [min(query, span.length - 1) for query in range(n_queries)]
            rows.append([starts[index] + query for query in own])
            positions.append([span.start + query for query in own])
            first = offset + place * n_queries
            order[starts[index] : starts[index] + span.length] = range(first, first + span.length)
        tables = [list(spans[index].blocks[:n_blocks]) for index in members]
        firsts = [spans[index].start for index in members]
        groups.append(
            SpanGroup(
                torch.tensor(rows, device=device),
                torch.tensor(positions, device=device),
                n_blocks,
                _runs(min(firsts), max(firsts), n_queries, n_blocks, cache.block_size, least),
                block_table_BS=torch.tensor(tables, device=device).t().contiguous(),
            )
        )
        offset += len(members) * n_queries
    return groups, torch.tensor(order, device=device)
