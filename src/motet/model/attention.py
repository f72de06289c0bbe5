"""Attention written out in torch, so that decoding a token equals the full forward pass bit for bit.

Three rules make a row's result independent of everything but its own sequence:

* keys are read in blocks of a fixed size, in order, and partial results are added block by block, so blocks that lie
  wholly in the future add exact zeros;
* the query heads that share a KV head are folded into rows, and rows come in multiples of four (GEMM kernels treat
  fewer rows differently);
* masked scores are replaced, never added to, so that another tenant's Inf or NaN cannot pass through a mask.

Legend: T packed rows, S sequences, Q padded queries of a sequence, L padded keys of a sequence, H query heads, K KV heads,
G = H / K, R = Q·G folded rows, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from motet.errors import BaseModelError
from motet.model.kv_cache import KVCache

ROWS = 4
"""Every product and reduction gets a multiple of this many rows."""

NAME = "motet"
"""Under which the function is registered with transformers' `AttentionInterface`."""

_UNDERSTOOD = {"use_cache", "position_ids", "cache_position", "output_attentions", "return_dict", "is_causal"}


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a forward pass."""

    start: int
    """Position of the first token in its sequence; 0 unless earlier keys are in the cache."""
    length: int
    blocks: Sequence[int] = ()
    """The sequence's KV blocks, where a cache is used."""


@dataclass(frozen=True)
class _Group:
    """Spans whose attention has the same shape, which is a function of each span alone."""

    query_rows_SQ: Tensor
    query_positions_SQ: Tensor
    key_rows_SL: Tensor | None
    block_table_SB: Tensor | None
    n_blocks: int


@dataclass
class AttentionLayout:
    """Where each packed row's keys are; made once per forward pass and handed to every layer."""

    groups: list[_Group]
    out_rows_T: Tensor | None
    """Row of the concatenated groups that belongs to each packed row; None where they agree already."""
    block_size: int
    cache: KVCache | None = None
    write_blocks_T: Tensor | None = None
    write_offsets_T: Tensor | None = None
    calls: list[tuple[int, int | None]] = field(default_factory=list)
    """Layers that asked, and their sliding windows, for the proof at load."""
    _masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    def hidden_SRL(self, index: int, window: int | None, fold: int) -> Tensor:
        """True where a folded query row must not see a key: [S, 1, R, L]."""
        found = self._masks.get((index, window, fold))
        if found is None:
            group = self.groups[index]
            positions = group.query_positions_SQ
            keys_L = torch.arange(group.n_blocks * self.block_size, device=positions.device)
            hidden = keys_L[None, None, :] > positions[:, :, None]
            if window is not None:
                hidden |= positions[:, :, None] - keys_L[None, None, :] >= window
            n_rows = positions.shape[1] * fold
            found = hidden.repeat_interleave(fold, dim=1)
            if n_rows % ROWS:
                found = torch.cat([found, found[:, -1:].expand(-1, -n_rows % ROWS, -1)], dim=1)
            found = found[:, None]
            self._masks[(index, window, fold)] = found
        return found


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def _query_bucket(length: int) -> int:
    """Padded number of queries of a span: a function of its own length only."""
    bucket = ROWS
    while bucket < length:
        bucket *= 2
    return bucket


def packed_layout(lengths: Sequence[int], block_size: int, device: torch.device) -> AttentionLayout:
    """Layout of whole sequences, one after another, without a cache (training, scoring)."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    shapes = [(_query_bucket(length), -(-length // block_size)) for length in lengths]
    groups, order = [], torch.empty(total, dtype=torch.long)
    offset = 0
    for shape in sorted(set(shapes)):
        members = [index for index, other in enumerate(shapes) if other == shape]
        n_queries, n_blocks = shape
        lengths_S = torch.tensor([lengths[index] for index in members])
        starts_S = torch.tensor([starts[index] for index in members])
        query_Q = torch.arange(n_queries)[None]
        last_S = lengths_S[:, None] - 1
        positions_SQ = torch.minimum(query_Q, last_S)
        key_SL = torch.minimum(torch.arange(n_blocks * block_size)[None], last_S) + starts_S[:, None]
        for place, index in enumerate(members):
            first = offset + place * n_queries
            order[starts[index] : starts[index] + lengths[index]] = torch.arange(first, first + lengths[index])
        groups.append(
            _Group(
                (positions_SQ + starts_S[:, None]).to(device),
                positions_SQ.to(device),
                key_SL.to(device),
                None,
                n_blocks,
            )
        )
        offset += len(members) * n_queries
    return AttentionLayout(groups, order.to(device), block_size)


def cached_layout(spans: Sequence[Span], cache: KVCache, device: torch.device) -> AttentionLayout:
    """Layout of spans whose keys and values go to a cache (prefill and decode); rows are padded to a multiple of four."""
    block = cache.block_size
    blocks_T: list[int] = []
    offsets_T: list[int] = []
    starts: list[int] = []
    shapes: list[tuple[int, int]] = []
    total = 0
    for span in spans:
        starts.append(total)
        total += span.length
        positions = range(span.start, span.start + span.length)
        blocks_T.extend(span.blocks[position // block] for position in positions)
        offsets_T.extend(position % block for position in positions)
        n_queries = 1 if span.length == 1 else _query_bucket(span.length)
        shapes.append((n_queries, 0 if n_queries == 1 else -(-(span.start + span.length) // block)))
    groups, order = [], [0] * round_up(total, ROWS)
    offset = 0
    for shape in sorted(set(shapes)):
        members = [index for index, other in enumerate(shapes) if other == shape]
        n_queries = shape[0]
        reach = [-(-(spans[index].start + spans[index].length) // block) for index in members]
        n_blocks = max(reach)
        rows, positions_SQ, tables = [], [], []
        for place, index in enumerate(members):
            span = spans[index]
            own = [min(query, span.length - 1) for query in range(n_queries)]
            rows.append([starts[index] + query for query in own])
            positions_SQ.append([span.start + query for query in own])
            tables.append([*span.blocks[: reach[place]], *([cache.zero_block] * (n_blocks - reach[place]))])
            first = offset + place * n_queries
            order[starts[index] : starts[index] + span.length] = range(first, first + span.length)
        groups.append(
            _Group(
                torch.tensor(rows, device=device),
                torch.tensor(positions_SQ, device=device),
                None,
                torch.tensor(tables, device=device),
                n_blocks,
            )
        )
        offset += len(members) * n_queries
    return AttentionLayout(
        groups,
        torch.tensor(order, device=device),
        block,
        cache,
        torch.tensor(blocks_T, device=device),
        torch.tensor(offsets_T, device=device),
    )


def _fold(query_THE: Tensor, rows_SQ: Tensor, n_kv: int) -> Tensor:
    """Bring queries to [S, K, R, E], R padded to a multiple of four with copies of the last row."""
    n_seqs, n_queries = rows_SQ.shape
    _, n_heads, width = query_THE.shape
    fold = n_heads // n_kv
    query = query_THE.index_select(0, rows_SQ.reshape(-1)).view(n_seqs, n_queries, n_kv, fold, width)
    folded = query.permute(0, 2, 1, 3, 4).reshape(n_seqs, n_kv, n_queries * fold, width)
    pad = -folded.shape[2] % ROWS
    if pad:
        folded = torch.cat([folded, folded[:, :, -1:].expand(-1, -1, pad, -1)], dim=2)
    return folded


def _blocks(states_TKE: Tensor, group: _Group, block: int, pool: Tensor | None) -> Tensor:
    """Keys or values of a group as [B, S, K, block, E]."""
    if pool is not None:
        assert group.block_table_SB is not None
        table_BS = group.block_table_SB.t()
        found = pool.index_select(0, table_BS.reshape(-1))
        return found.view(*table_BS.shape, *found.shape[1:])
    assert group.key_rows_SL is not None
    n_seqs = group.key_rows_SL.shape[0]
    states = states_TKE.index_select(0, group.key_rows_SL.reshape(-1))
    states = states.view(n_seqs, group.n_blocks, block, *states_TKE.shape[1:])
    return states.permute(1, 0, 3, 2, 4).contiguous()


def attend(
    query_SKRE: Tensor,
    keys_BSKCE: Tensor,
    values_BSKCE: Tensor,
    hidden_SRL: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention over blocks of keys, added in order; products in the query's type, softmax in fp32."""
    block = keys_BSKCE.shape[3]
    scores = []
    for index, keys in enumerate(keys_BSKCE.unbind(0)):
        score = torch.matmul(query_SKRE, keys.transpose(-1, -2)).float() * scaling
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        scores.append(score.masked_fill(hidden_SRL[..., index * block : (index + 1) * block], float("-inf")))
    peak = scores[0].detach().amax(-1, keepdim=True)
    for score in scores[1:]:
        peak = torch.maximum(peak, score.detach().amax(-1, keepdim=True))
    weights_sum: Tensor | None = None
    output: Tensor | None = None
    for score, values in zip(scores, values_BSKCE.unbind(0), strict=True):
        weights = torch.exp(score - peak)
        part = torch.matmul(weights.to(values.dtype), values).float()
        weights_sum = (
            weights.sum(-1, keepdim=True) if weights_sum is None else weights_sum + weights.sum(-1, keepdim=True)
        )
        output = part if output is None else output + part
    assert output is not None and weights_sum is not None
    return (output / weights_sum).to(query_SKRE.dtype)


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
    layout: AttentionLayout | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; query [1, H, T, E], key and value [1, K, T, E] → [1, T, H, E].

    Raises:
        BaseModelError: the model passes something that this function does not understand.
    """
    name = type(module).__name__
    strange = sorted(key for key, value in unknown.items() if value is not None and key not in _UNDERSTOOD)
    if layout is None:
        raise BaseModelError(
            f"{name} does not hand keyword arguments on to its attention function; Motet cannot serve it"
        )
    if strange or attention_mask is not None:
        what = ", ".join(strange) or "an attention mask"
        raise BaseModelError(
            f"{name} asks its attention for {what}, which Motet does not understand; it would be wrong"
        )
    layer = int(getattr(module, "layer_idx", -1))
    layout.calls.append((layer, sliding_window))
    query_THE, key_TKE, value_TKE = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    n_kv, fold = key_TKE.shape[1], query_THE.shape[1] // key_TKE.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key_pool = value_pool = None
    if layout.cache is not None:
        assert layout.write_blocks_T is not None and layout.write_offsets_T is not None
        key_pool, value_pool = layout.cache.layer(layer, key_TKE, value_TKE)
        n_real = len(layout.write_blocks_T)
        key_pool[layout.write_blocks_T, :, layout.write_offsets_T] = key_TKE[:n_real]
        value_pool[layout.write_blocks_T, :, layout.write_offsets_T] = value_TKE[:n_real]
    outputs = []
    for index, group in enumerate(layout.groups):
        folded = attend(
            _fold(query_THE, group.query_rows_SQ, n_kv),
            _blocks(key_TKE, group, layout.block_size, key_pool),
            _blocks(value_TKE, group, layout.block_size, value_pool),
            layout.hidden_SRL(index, sliding_window, fold),
            scale,
            softcap,
        )
        n_seqs, n_queries = group.query_rows_SQ.shape
        unfolded = folded[:, :, : n_queries * fold].view(n_seqs, n_kv, n_queries, fold, -1)
        outputs.append(unfolded.transpose(1, 2).reshape(n_seqs * n_queries, n_kv * fold, -1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if layout.out_rows_T is not None:
        output = output.index_select(0, layout.out_rows_T)
    return output[None], None
