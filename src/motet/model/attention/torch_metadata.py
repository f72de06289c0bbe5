"""Which packed row attends to which keys, for attention by torch's products; made once per forward pass.

Spans whose attention has the same shape are grouped, so that a layer makes a few batched products instead of one per sequence.

Legend: T packed rows, S sequences of a group, Q padded queries of a sequence, L padded keys of a sequence, B blocks of keys.
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

MINUS_INFINITY = -(1 << 23)
"""The bits of −∞ in fp32, as int32."""


@dataclass(frozen=True)
class KeyRange:
    """Consecutive blocks of keys that are read in one product, by all queries from some row on."""

    start: int
    stop: int
    first_query: int
    """Before this padded query nobody in the group sees a key of these blocks."""
    hidden_from: int
    """First block of which some query does not see every key, where no window hides more; `stop` if there is none."""
    hidden_until: int
    """From this padded query on everybody sees all of these blocks."""


@dataclass(frozen=True)
class Mask:
    """Bits that hide keys of a run. Scores are replaced, not added to, so that another tenant's Inf or NaN stays out."""

    block: int
    """First block of the run that it covers, to the last."""
    keep_BSRC: Tensor
    """int32 [B, S, 1, R, C]: all bits where the key is seen, none where it is hidden; R rows from the first on."""
    hide_BSRC: Tensor
    """The bits of −∞ where it is hidden, none where it is seen."""


@dataclass(frozen=True)
class Group:
    """Spans whose attention has the same shape."""

    query_rows_SQ: Tensor | None
    """Packed row of each padded query; None where sequence s has the one query of row s."""
    positions_SQ: Tensor
    n_blocks: int
    runs: tuple[KeyRange, ...]
    key_rows_SL: Tensor | None = None
    """Packed row of each padded key, where there is no cache."""
    block_table_BS: Tensor | None = None
    """The cache's blocks otherwise."""
    padding_SQ: Tensor | None = None
    """True for queries that only repeat a sequence's last one, where gradients are needed and there are any."""


@dataclass(frozen=True)
class SharedKeys:
    """Sequences that begin with the same packed rows; the gradients of those keys add up."""

    prefix: Prefix
    places_NP: Tensor
    """Places of the prefix's rows among the padded keys of all groups, for each of the N sequences in their order."""


@dataclass
class TorchMetadata:
    """Where each packed row's keys are."""

    groups: list[Group]
    out_rows_T: Tensor | None
    """Place of each packed row among the padded queries of all groups, one after another; None where they agree already."""
    block_size: int
    key_places_T: Tensor | None = None
    """Place of each packed row among the padded keys of all groups, where there is no cache."""
    shared: list[SharedKeys] = field(default_factory=list)
    cache: KVCache | None = None
    rows: int = ROWS
    """Queries of a sequence, and rows of its query heads, are padded to a multiple."""
    writes: Writes | None = None
    _masks: dict[tuple[int, int, int | None, int], Mask | None] = field(default_factory=dict)
    _paddings: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, index: int, run: KeyRange, window: int | None, fold: int) -> Mask | None:
        """What a group's folded query rows must not see of a run; each query makes `fold` rows. None if all is seen."""
        key = (index, run.start, window, fold)
        if key not in self._masks:
            self._masks[key] = self._mask(self.groups[index].positions_SQ, run, window, fold)
        return self._masks[key]

    def _mask(self, positions_SQ: Tensor, run: KeyRange, window: int | None, fold: int) -> Mask | None:
        start, n_queries = (run.hidden_from, run.hidden_until) if window is None else (run.start, positions_SQ.shape[1])
        if start == run.stop or not n_queries:
            return None
        positions_SQ1 = positions_SQ[:, :n_queries, None]
        keys_L = torch.arange(start * self.block_size, run.stop * self.block_size, device=positions_SQ.device)
        hidden_SQL = keys_L > positions_SQ1
        if window is not None:
            hidden_SQL |= positions_SQ1 - keys_L >= window
        hidden_SRL = hidden_SQL.repeat_interleave(fold, dim=1)
        if n_queries == 1:
            hidden_SRL = F.pad(hidden_SRL, (0, 0, 0, -fold % self.rows))
        hidden_BSRC = hidden_SRL.unflatten(-1, (-1, self.block_size)).permute(2, 0, 1, 3)[:, :, None].int().contiguous()
        return Mask(start - run.start, hidden_BSRC - 1, -hidden_BSRC & MINUS_INFINITY)

    def padding_SR(self, index: int, fold: int) -> Tensor | None:
        """True for folded query rows that only repeat a sequence's last query: [S, 1, R, 1]; None if there are none."""
        padding_SQ = self.groups[index].padding_SQ
        if padding_SQ is None:
            return None
        padding_SR1 = self._paddings.get((index, fold))
        if padding_SR1 is None:
            padding_SR1 = self._paddings[(index, fold)] = padding_SQ.repeat_interleave(fold, dim=1)[:, None, :, None]
        return padding_SR1


def packed_metadata(
    lengths: Sequence[int],
    block_size: int,
    device: torch.device,
    prefixes: Sequence[Prefix | None] = (),
    rows: int = ROWS,
) -> TorchMetadata:
    """Of whole sequences, one after another; a sequence's queries are padded to a multiple of `rows`."""
    before = list(prefixes) or [None] * len(lengths)
    *starts, total = accumulate(lengths, initial=0)
    reach = [-(-(length + prefix_length(prefix)) // block_size) for length, prefix in zip(lengths, before, strict=True)]
    out_rows, key_places = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    groups: list[Group] = []
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
                key_rows_SL[place, : prefix.length] = torch.arange(prefix.row, prefix.row + prefix.length)
        groups.append(
            Group(
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
    """Sequences to be padded to one shape: equal numbers of key blocks, and none much shorter than the longest."""
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
    """One for each block, of a group whose sequences' own first positions lie between these two."""
    runs = []
    for block, first in enumerate(_first_queries(most_first, n_queries, n_blocks, block_size, rows)):
        end = (block + 1) * block_size
        # the last queries may be padding, which repeats the last query of a sequence that ends in the last block
        until = n_queries if block + 1 == n_blocks else min(max(0, end - 1 - least_first), n_queries)
        hidden_from = block if least_first < end - 1 else block + 1
        runs.append(KeyRange(block, block + 1, first, hidden_from, until))
    return tuple(runs)


def _first_queries(first_position: int, n_queries: int, n_blocks: int, block_size: int, rows: int) -> tuple[int, ...]:
    """Multiples of `rows`, so that what is left of the queries is one too."""
    firsts = [max(0, block * block_size - first_position) // rows * rows for block in range(n_blocks)]
    return tuple(min(first, n_queries - rows) for first in firsts)


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


def cached_metadata(
    spans: Sequence[Span], cache: KVCache, device: torch.device, multiple: int = ROWS, rows: int = ROWS
) -> TorchMetadata:
    """Of spans whose keys and values go to a cache (prefill and decode).

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
) -> tuple[list[Group], None]:
    """One query per sequence, in the order of the rows; rows of padding look at the block of zeros."""
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
    run = KeyRange(0, n_blocks, 0, hidden_from, 1)
    return [Group(None, positions, n_blocks, (run,), block_table_BS=table_BS)], None


def _prefill_groups(
    spans: Sequence[Span], cache: KVCache, device: torch.device, multiple: int, least: int
) -> tuple[list[Group], Tensor]:
    *starts, total = accumulate((span.length for span in spans), initial=0)
    reach = [-(-(span.start + span.length) // cache.block_size) for span in spans]
    groups: list[Group] = []
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
            Group(
                torch.tensor(rows, device=device),
                torch.tensor(positions, device=device),
                n_blocks,
                _runs(min(firsts), max(firsts), n_queries, n_blocks, cache.block_size, least),
                block_table_BS=torch.tensor(tables, device=device).t().contiguous(),
            )
        )
        offset += len(members) * n_queries
    return groups, torch.tensor(order, device=device)
