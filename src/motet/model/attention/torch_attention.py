"""Attention in plain torch operations, so that decoding a token equals the full forward pass bit for bit.

Three rules make a row's result independent of everything but its own sequence:

* keys are read in blocks of a fixed size, in order, and partial results are added block by block, so blocks that are
  entirely in the future add exact zeros, or are skipped;
* the query heads that share a KV head are folded into rows, and rows come in multiples of four (GEMM kernels treat
  fewer rows differently);
* masked scores are replaced, never added to, so that another tenant's Inf or NaN cannot pass through a mask.

The backward pass recomputes the weights from the saved row sums (Dao et al. 2022), so that no tensor of size
queries × keys is stored.

Legend: T packed rows, S sequences, Q padded queries of a sequence, C keys of a block, B blocks, H query heads, K KV heads,
G = H / K, R = Q·G folded rows, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from motet.model.arithmetic import ROWS, least_rows, round_up
from motet.model.attention.backend import LayerCall, Prefix, Span
from motet.model.attention.torch_metadata import (
    TILE,
    KeyRange,
    Reach,
    SpanGroup,
    TorchMetadata,
    cached_metadata,
    packed_metadata,
)
from motet.model.kv_cache import KVCache

KEPT_SCORES = 1 << 24
"""Scores of a group kept while each row's largest score is determined; scores of later blocks are computed twice."""

LEAST_EXPONENT = -87.0
"""Lower limit of a weight's exponent. Below it, results are subnormal in fp32, and `exp` is up to 30 times slower.

Such a weight is negligible compared with the row's largest weight, 1. Hidden keys get the weight 0 instead.
"""


@dataclass(frozen=True)
class _FoldedCall:
    """A layer's call, with its query heads folded into rows."""

    metadata: TorchMetadata
    window: int | None
    scaling: float
    softcap: float | None
    n_kv: int
    fold: int
    sinks_H: Tensor | None = None

    def sinks(self, n_rows: int) -> Tensor | None:
        """Sinks of folded rows, fp32 [K, R, 1]; None without sinks."""
        if self.sinks_H is None:
            return None
        return self.sinks_H.float().view(self.n_kv, -1).repeat(1, -(-n_rows // self.fold))[:, :n_rows, None]


@dataclass
class TorchPass:
    """An `AttentionPass` of torch's products."""

    metadata: TorchMetadata
    calls: list[LayerCall] = field(default_factory=list)

    def attend(self, call: LayerCall, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Causal attention [T, H, E] of one layer, with gradients if there is no cache."""
        scaling, n_kv, fold = call.scaling, key_TKE.shape[1], query_THE.shape[1] // key_TKE.shape[1]
        # a power of two: scaling the query is exact, and cheaper than scaling the scores
        if math.frexp(scaling)[0] == 0.5:
            query_THE, scaling = query_THE * scaling, 1.0
        folded = _FoldedCall(self.metadata, call.window, scaling, call.softcap, n_kv, fold, call.sinks_H)
        if self.metadata.cache is not None:
            return _through_cache(query_THE, key_TKE, value_TKE, folded, call.layer)
        output: Tensor = _PackedAttention.apply(query_THE, key_TKE, value_TKE, folded)  # type: ignore[no-untyped-call]
        return output


class TorchAttention:
    """An `AttentionBackend` of torch's products: exact on a CPU."""

    fixed_shapes = False
    reads_past_end = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, width: int, block_size: int, rows: int = ROWS
    ) -> None:
        """`width` is that of the narrowest head; it determines the minimum queries in a product with a key block."""
        self._device, self._block_size, self._rows = device, block_size, rows
        self._queries = least_rows(width, block_size, dtype)

    def packed(self, lengths: Sequence[int], prefixes: Sequence[Prefix | None] = ()) -> TorchPass:
        """A pass over whole sequences."""
        return TorchPass(packed_metadata(lengths, self._block_size, self._device, prefixes, self._queries))

    def cached(self, spans: Sequence[Span], cache: KVCache) -> TorchPass:
        """A pass over spans whose keys and values go to a cache."""
        return TorchPass(cached_metadata(spans, cache, self._device, self._rows, self._queries))

    def replayable(self, spans: Sequence[Span], cache: KVCache, least_blocks: int) -> None:
        """None: shapes depend on the sequences."""


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def _scores(query_SKRE: Tensor, keys_BSKCE: Tensor, call: _FoldedCall) -> Tensor:
    """fp32 scores [B, S, K, R, C] of a group's rows and a run of blocks, before masking."""
    score = torch.matmul(query_SKRE, keys_BSKCE.transpose(-1, -2)).float()
    if call.scaling != 1.0:
        score.mul_(call.scaling)
    if call.softcap is not None:
        score.div_(call.softcap).tanh_().mul_(call.softcap)
    return score


@dataclass(frozen=True)
class _Part:
    """A run of blocks, and the folded query rows that attend to it."""

    run: KeyRange
    first: int
    stop: int
    reach: Reach

    def scores(self, query_SKRE: Tensor, keys_BSKCE: Tensor, call: _FoldedCall) -> Tensor:
        """Scores of the part's rows, −∞ for hidden keys; recomputing them gives the same bits."""
        score = _scores(query_SKRE[:, :, self.first : self.stop], keys_BSKCE[self.run.start : self.run.stop], call)
        self.reach.replace_hidden(score, self.first, infinite=True)
        return score


def _parts(index: int, call: _FoldedCall, n_rows: int, multiple: int, begin: int = 1) -> list[_Part]:
    """A group's parts in order; each begins at a multiple of `begin` and has a multiple of `multiple` rows."""
    parts = []
    for run in call.metadata.groups[index].runs:
        first = run.first_query * call.fold // begin * begin
        reach = call.metadata.reach(index, run, call.window, call.fold)
        n_own = round_up(max(reach.stop - first, 1), multiple)
        parts.append(_Part(run, first, min(first + n_own, n_rows), reach))
    return parts


def _attend(
    query_SKRE: Tensor, keys_BSKCE: Tensor, values_BSKCE: Tensor, index: int, call: _FoldedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of a group over blocks of keys, added in order.

    Returns:
        Output [S, K, R, E]; each row's largest score or sink [S, K, R, 1]; the sum of weights relative to it [S, K, R, 1].
    """
    parts = _parts(index, call, query_SKRE.shape[2], call.metadata.rows)
    peak, kept = _largest(parts, query_SKRE, keys_BSKCE, call)
    sinks = call.sinks(query_SKRE.shape[2])
    if sinks is not None:
        peak = peak.maximum(sinks)
    output = total = None
    for part in parts:
        score, rows = kept.pop(part.run.start, None), slice(part.first, part.stop)
        if score is None:
            score = part.scores(query_SKRE, keys_BSKCE, call)
        weights = score.sub_(peak[:, :, rows]).clamp_(LEAST_EXPONENT).exp_()
        part.reach.replace_hidden(weights, part.first, infinite=False)
        values = values_BSKCE[part.run.start : part.run.stop]
        sums, shares = torch.matmul(weights.to(values.dtype), values).float(), weights.sum(-1, keepdim=True)
        for own, share in zip(sums, shares, strict=True):
            if output is None or total is None:
                output, total = (_to_all_rows(each, peak.shape[2]) for each in (own, share))
            else:
                output[:, :, rows].add_(own)
                total[:, :, rows].add_(share)
    assert output is not None and total is not None
    if sinks is not None:
        total.add_(sinks.sub(peak).clamp_(LEAST_EXPONENT).exp_())
    return output.div_(total).to(query_SKRE.dtype), peak, total


def _largest(
    parts: list[_Part], query_SKRE: Tensor, keys_BSKCE: Tensor, call: _FoldedCall
) -> tuple[Tensor, dict[int, Tensor]]:
    """The largest score of each row [S, K, R, 1], and the kept scores by first block."""
    peak, kept, n_kept = None, {}, 0
    for part in parts:
        score = part.scores(query_SKRE, keys_BSKCE, call)
        each = score.amax(-1, keepdim=True)
        largest = each.amax(0) if len(each) > 1 else each[0]
        if peak is None:
            peak = _to_all_rows(largest, query_SKRE.shape[2], -math.inf)
        else:
            own = peak[:, :, part.first : part.stop]
            torch.maximum(own, largest, out=own)
        n_kept += score.numel()
        if n_kept <= KEPT_SCORES:
            kept[part.run.start] = score
    assert peak is not None
    return peak, kept


def _to_all_rows(first_SKRE: Tensor, n_rows: int, value: float = 0.0) -> Tensor:
    """Extend the first rows to `n_rows` with a value."""
    more = n_rows - first_SKRE.shape[2]
    return F.pad(first_SKRE, (0, 0, 0, more), value=value) if more else first_SKRE


def _fold(states_THE: Tensor, group: SpanGroup, call: _FoldedCall, multiple: int) -> Tensor:
    """Fold query heads into rows: [S, K, R, E], with R padded with zeros to a multiple."""
    rows_SQ = group.query_rows_SQ
    width = states_THE.shape[-1]
    if rows_SQ is None:
        folded = states_THE.reshape(-1, call.n_kv, call.fold, width)
    else:
        states = states_THE.index_select(0, rows_SQ.reshape(-1)).view(*rows_SQ.shape, call.n_kv, call.fold, width)
        folded = states.permute(0, 2, 1, 3, 4).reshape(rows_SQ.shape[0], call.n_kv, -1, width)
    return _pad(folded, multiple)


def _pad(folded_SKRE: Tensor, multiple: int) -> Tensor:
    return _to_all_rows(folded_SKRE, round_up(folded_SKRE.shape[2], multiple))


def _unfold(folded_SKRE: Tensor, group: SpanGroup, call: _FoldedCall) -> Tensor:
    """Undo `_fold`: padded queries [S·Q, H, E]."""
    n_seqs, n_queries = group.positions_SQ.shape
    states = folded_SKRE[:, :, : n_queries * call.fold].view(n_seqs, call.n_kv, n_queries, call.fold, -1)
    return states.transpose(1, 2).reshape(n_seqs * n_queries, call.n_kv * call.fold, -1)


def _rows(per_group: list[Tensor], places_T: Tensor | None) -> Tensor:
    """Packed rows from padded ones."""
    padded = torch.cat(per_group) if len(per_group) > 1 else per_group[0]
    return padded if places_T is None else padded.index_select(0, places_T)


# --- sampling: keys and values in the cache ----------------------------------------------------------------------------


def _through_cache(query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, call: _FoldedCall, layer: int) -> Tensor:
    """Write the new keys and values, then attend to all cached keys of each sequence: [T, H, E]."""
    metadata = call.metadata
    assert metadata.cache is not None and metadata.writes is not None
    key_pool, value_pool = metadata.cache.write(layer, metadata.writes, key_TKE, value_TKE)
    outputs = []
    for index, group in enumerate(metadata.groups):
        assert group.block_table_BS is not None
        table = group.block_table_BS.reshape(-1)
        keys, values = (
            pool.index_select(0, table).view(*group.block_table_BS.shape, *pool.shape[1:])
            for pool in (key_pool, value_pool)
        )
        output, _, _ = _attend(_fold(query_THE, group, call, metadata.rows), keys, values, index, call)
        outputs.append(_unfold(output, group, call))
    return _rows(outputs, metadata.out_rows_T)


# --- training and scoring: keys and values of the pass itself ------------------------------------------------------------


def _blocks(states_TKE: Tensor, group: SpanGroup, block: int) -> Tensor:
    """Keys or values of a group as [B, S, K, C, E]."""
    assert group.key_rows_SL is not None
    n_seqs = group.key_rows_SL.shape[0]
    states = states_TKE.index_select(0, group.key_rows_SL.reshape(-1))
    states = states.view(n_seqs, group.n_blocks, block, *states_TKE.shape[1:])
    return states.permute(1, 0, 3, 2, 4).contiguous()


def _keys_back(grads: list[Tensor], like_TKE: Tensor, metadata: TorchMetadata) -> Tensor:
    """Gradients of padded keys [B, S, K, C, E] per group, as packed rows; gradients of a shared prefix are summed."""
    padded = torch.cat([grad.permute(1, 0, 3, 2, 4).reshape(-1, *like_TKE.shape[1:]) for grad in grads])
    rows_TKE = _rows([padded], metadata.key_places_T)
    for shared in metadata.shared:
        members = padded.index_select(0, shared.places_NP.flatten()).unflatten(0, shared.places_NP.shape)
        stretches = shared.prefix.stretches
        for (row, length), sums in zip(
            stretches, members.sum(0).split([length for _, length in stretches]), strict=True
        ):
            rows_TKE[row : row + length].add_(sums)
    return rows_TKE


def _over_queries(left_SKRC: Tensor, right_SKRE: Tensor) -> Tensor:
    """leftᵀ · right, summed over the rows of each sequence, R a multiple of TILE: fp32 [S, K, C, E].

    A product's length changes its bits, even if the extra rows are zeros, and other sequences determine the padding.
    So the rows are summed in order, in tiles that begin at the sequence's first row.
    """
    left, right = left_SKRC.unflatten(2, (-1, TILE)), right_SKRE.unflatten(2, (-1, TILE))
    first, *others = torch.matmul(left.transpose(-1, -2), right).unbind(2)
    total = first.float()
    for part in others:
        total.add_(part)
    return total


class _PackedAttention(torch.autograd.Function):
    """Attention among the rows of one packed batch: [T, H, E], [T, K, E], [T, K, E] → [T, H, E]."""

    @staticmethod
    def forward(ctx: Any, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, call: _FoldedCall) -> Tensor:
        metadata = call.metadata
        outputs, log_sums = [], []
        for index, group in enumerate(metadata.groups):
            keys, values = (_blocks(states, group, metadata.block_size) for states in (key_TKE, value_TKE))
            output, peak, total = _attend(_fold(query_THE, group, call, metadata.rows), keys, values, index, call)
            outputs.append(_unfold(output, group, call))
            log_sums.append(peak.add_(total.log_()))
        output_THE = _rows(outputs, metadata.out_rows_T)
        ctx.call = call
        ctx.save_for_backward(query_THE, key_TKE, value_TKE, output_THE, *log_sums)
        return output_THE

    @staticmethod
    def backward(ctx: Any, grad_THE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _FoldedCall = ctx.call
        query_THE, key_TKE, value_TKE, output_THE, *log_sums = ctx.saved_tensors
        metadata = call.metadata
        # the part of the softmax gradient that all scores of a row share
        common_TH1 = (grad_THE.float() * output_THE.float()).sum(-1, keepdim=True)
        queries, keys, values = [], [], []
        for index, group in enumerate(metadata.groups):
            query, grad, common = (_fold(states, group, call, TILE) for states in (query_THE, grad_THE, common_TH1))
            padding = metadata.padding_SR(index, call.fold)
            if padding is not None:
                for states in (grad, common):
                    states[:, :, : padding.shape[2]].masked_fill_(padding, 0)
            key, value = (_blocks(states, group, metadata.block_size) for states in (key_TKE, value_TKE))
            grad_query, grad_keys, grad_values = _attend_backward(
                query, grad, common, _pad(log_sums[index], TILE), key, value, index, call
            )
            queries.append(_unfold(grad_query, group, call))
            keys.append(grad_keys)
            values.append(grad_values)
        return (
            _rows(queries, metadata.out_rows_T),
            _keys_back(keys, key_TKE, metadata),
            _keys_back(values, value_TKE, metadata),
            None,
        )


def _attend_backward(
    query_SKRE: Tensor,
    grad_SKRE: Tensor,
    common_SKR1: Tensor,
    log_sum_SKR1: Tensor,
    keys_BSKCE: Tensor,
    values_BSKCE: Tensor,
    index: int,
    call: _FoldedCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [S, K, R, E], keys and values [B, S, K, C, E] of a group; R is a multiple of TILE.

    With gradients, every run is one block.
    """
    dtype = query_SKRE.dtype
    grad_query: Tensor | None = None
    grad_keys, grad_values = torch.empty_like(keys_BSKCE), torch.empty_like(values_BSKCE)
    for part in _parts(index, call, query_SKRE.shape[2], TILE, TILE):
        block, rows = part.run.start, slice(part.first, part.stop)
        query, grad = query_SKRE[:, :, rows].contiguous(), grad_SKRE[:, :, rows].contiguous()
        keys, values = keys_BSKCE[block], values_BSKCE[block]
        score = _scores(query, keys[None], call)
        slope = None if call.softcap is None else 1 - (score / call.softcap).square_()
        weights = score.sub_(log_sum_SKR1[:, :, rows]).clamp_(LEAST_EXPONENT, -LEAST_EXPONENT).exp_()
        part.reach.replace_hidden(weights, part.first, infinite=False)
        grad_values[block] = _over_queries(weights[0].to(dtype), grad)
        grad_score = torch.matmul(grad, values.transpose(-1, -2)).float().sub_(common_SKR1[:, :, rows])
        grad_score.mul_(weights[0])
        if call.scaling != 1.0:
            grad_score.mul_(call.scaling)
        if slope is not None:
            grad_score.mul_(slope[0])
        grad_score = grad_score.to(dtype)
        own = torch.matmul(grad_score, keys)
        if grad_query is None:
            grad_query = _to_all_rows(own.float(), query_SKRE.shape[2])
        else:
            grad_query[:, :, rows].add_(own)
        grad_keys[block] = _over_queries(grad_score, query)
    assert grad_query is not None
    return grad_query.to(dtype), grad_keys, grad_values
