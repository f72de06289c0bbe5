"""Check that a row has the same bits with any other rows: packed, alone, decoded, and in passes of training length."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.core.model_info import EXPERTS
from motet.model.arithmetic import round_up
from motet.model.attention import LayerCall, Span
from motet.model.experts import are_computed_here, rows_agree
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears, NoAdapters, make_layout
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.simd_safe_functions import Uneven

RANK = 4
"""Rank of the tested adapters."""
_CROWD = 128
"""Rows of the largest tested pass: many libraries use another kernel from this size on."""
_CROWD_TILES = 8
"""Tiles in that pass, if the arithmetic has tiles."""
_TILE = 12
"""Rows per tile in the test of MLPs."""
_LONG_ROWS = (700, 468, 236)
"""Row counts of adapters that train together; the second is also tested alone."""
_WORK = 2 * 10**9
"""Maximum multiplications of a tested product; larger products are tested with fewer rows."""
_LONG_RANKS = (4, 8)
_tried: dict[tuple[Any, ...], bool] = {}


def check_exactness(base: LoraModel, sequences: list[Tensor]) -> None:
    """Set `inexact` on a base, with the size of the effect, if a row's bits depend on other rows."""
    uneven = Uneven(base.model)
    with uneven if base.device.type == "cpu" else contextlib.nullcontext():
        packed = packed_logits(base, sequences)[0]
    solo = [packed_logits(base, [sequence])[0][0] for sequence in sequences]
    alone = base.agreed(all(torch.equal(logits, other) for logits, other in zip(solo, packed, strict=True)))
    alone = alone and _crowd_agrees(base, sequences)
    if not _tiles_agree(base, sequences):
        base.compute_with(replace(base.arithmetic, long_rows=sys.maxsize))
    decoded, cache = _decoded_logits(base, sequences[1])
    base.revise(kv_bytes_per_token=max(1, cache.bytes_per_token), state_bytes=cache.states.bytes_per_slot)
    what = _known_to_differ(base)
    if left := sorted({*uneven.modules.values(), *uneven.elsewhere}):
        what = f"{' and '.join(left)} of a number depends on its place among others"
    if not alone:
        what = "sequences packed together differ from each alone"
    elif not base.agreed(torch.equal(decoded, packed[1])):
        what = "decoding differs from the full forward pass"
    if not what:
        return
    gap = max(_gap(solo[1], packed[1], sequences[1]), _gap(decoded, packed[1], sequences[1]))
    if gap:
        what += f" (logprobs of a short sequence by up to {gap:.1e})"
    inexact = (
        f"not bit-exact on this device in {base.info.dtype}: {what}; jobs run, but neighbours may change their bytes"
    )
    base.revise(inexact, inexact=inexact)


def _known_to_differ(base: LoraModel) -> str:
    """Why rows may depend on other rows although the tested ones did not; empty if no reason is known."""
    if base.kernels is not None:
        return ""
    if base.has_experts and not (are_computed_here(base.model) and base.device.type == "cpu"):
        return "an expert's products have as many rows as choose it"
    if base.device.type != "cuda":
        if base.shards is None and not _long_products_agree(base):
            return f"with {torch.get_num_threads()} threads products of many rows have other bits than products of few"
        return "" if _experts_agree(base) else "an expert's rows differ by how many choose it"
    if not base.attention.fixed_shapes:
        return "products of attention have other shapes in other company"
    if base.info.vocab_size % 4:
        return (
            "softmax over a vocabulary that is no multiple of four adds in an order that depends on the row's address"
        )
    return ""


def _experts_agree(base: LoraModel) -> bool:
    """Whether an expert's rows have the same bits if few or many rows choose it, with and without an adapter."""
    if not base.experts:
        return True
    layout = base.adapter_layout(EXPERTS, RANK)
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(0)) * 0.1
    adapter = AdapterWeights.from_masters(layout, 1.0, flat, base.dtype)
    gathered = None if base.shards is None else base.shards.layer_gathered
    return all(rows_agree(base.model, _CROWD, weights, gathered) for weights in (None, adapter))


def _long_products_agree(base: LoraModel) -> bool:
    """Whether products of training length, and gradients of adapters, have the same bits alone and with other rows.

    Libraries may choose another kernel for many rows. Sizes determine how a product is split among threads, so each size
    is tested once per process and number of threads.
    """
    for fused in {layer.fused.leader: layer.fused for layer in base.linears.values()}.values():
        frozen = fused.frozen
        key = (*frozen.shape, fused.sizes, type(frozen), base.dtype, base.arithmetic, torch.get_num_threads())
        if key not in _tried:
            _tried[key] = all(_product_agrees(base, fused, rank) for rank in _LONG_RANKS)
        if not _tried[key]:
            return False
    return True


def _product_agrees(base: LoraModel, fused: FusedLinears, rank: int) -> bool:
    n_out, n_in = fused.frozen.shape
    share = min(1.0, _WORK / (sum(_LONG_ROWS) * n_in * n_out))
    lengths = [round_up(max(1, int(rows * share)), base.arithmetic.rows) for rows in _LONG_ROWS]
    linears = {path: (n_in, size) for path, size in zip(fused.paths, fused.sizes, strict=True)}
    layout = make_layout(linears, rank, [fused.paths])
    generator = torch.Generator().manual_seed(0)
    x_TK, slope_TN = (torch.randn(sum(lengths), width, generator=generator).to(base.dtype) for width in (n_in, n_out))
    masters = [torch.randn(layout.size, generator=generator) for _ in lengths]
    adapters = [AdapterWeights.from_masters(layout, 1.0, each, base.dtype) for each in masters]
    mine = slice(lengths[0], lengths[0] + lengths[1])
    together = _train(base, fused, layout, list(zip(adapters, lengths, strict=True)), x_TK, slope_TN)
    alone = _train(base, fused, layout, [(adapters[1], lengths[1])], x_TK[mine], slope_TN[mine])
    rows = zip(together[:2], alone[:2], strict=True)
    return all(torch.equal(both[mine], result) for both, result in rows) and torch.equal(together[2][1], alone[2][0])


def _train(
    base: LoraModel,
    fused: FusedLinears,
    layout: AdapterLayout,
    members: Sequence[tuple[AdapterWeights, int]],
    x_TK: Tensor,
    slope_TN: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The layers' outputs [T, N], the gradient of their input [T, K], and the flat gradients of the adapters."""
    segments, arenas, start = list[TrainSegment](), list[Tensor](), 0
    for weights, length in members:
        arenas.append(torch.zeros(layout.size))
        segments.append(TrainSegment(start, start + length, weights, layout.matrices(arenas[-1])))
        start += length
    with torch.enable_grad():
        x = x_TK[None].clone().requires_grad_()
        y = torch.cat(TrainerRouting(segments, base.device, base.products, backward=True).linear(fused, x), dim=-1)
        y.backward(slope_TN[None])
    assert x.grad is not None
    return y[0].detach(), x.grad[0], arenas


@torch.no_grad()
def _crowd_agrees(base: LoraModel, sequences: list[Tensor]) -> bool:
    """Whether hidden states stay the same in a pass of many rows, and of several tiles."""
    rows = max(_CROWD, _CROWD_TILES * base.arithmetic.tile)
    crowd = sequences * -(-rows // sum(map(len, sequences)))
    few, many = packed_hidden(base, sequences)[0], packed_hidden(base, crowd)[0]
    return base.agreed(all(torch.equal(few[place % len(few)], states) for place, states in enumerate(many)))


@torch.no_grad()
def _tiles_agree(base: LoraModel, sequences: list[Tensor]) -> bool:
    """Whether hidden states stay the same if MLPs run a few rows at a time."""
    whole, rows = base.arithmetic, max(_TILE, base.arithmetic.rows)
    crowd = sequences * -(-2 * rows // sum(map(len, sequences)))
    together = packed_hidden(base, crowd)[0]
    base.arithmetic = replace(whole, long_rows=rows, mlp_rows=rows)
    base.context.routing = TrainerRouting([], base.device, base.products, backward=False)
    try:
        in_tiles = packed_hidden(base, crowd)[0]
    finally:
        base.arithmetic, base.context.routing = whole, NoAdapters()
    return base.agreed(all(torch.equal(output, other) for output, other in zip(together, in_tiles, strict=True)))


def _gap(left_TV: Tensor, right_TV: Tensor, token_ids_T: Tensor) -> float:
    """Largest difference of the tokens' logprobs."""
    left, right = (logits[:-1].log_softmax(-1).gather(-1, token_ids_T[1:, None]) for logits in (left_TV, right_TV))
    return float(torch.where(left == right, 0.0, (left - right).abs()).max())  # ids without a token have −∞


def _decoded_logits(base: LoraModel, sequence: Tensor) -> tuple[Tensor, KVCache]:
    """Logits [T, V] of a sequence, and the cache: a prompt of 12 tokens, then token by token."""
    block_size = base.block_size
    n_blocks = -(-len(sequence) // block_size)
    cache = KVCache(n_blocks, block_size, base.device)
    blocks, slot = cache.take(n_blocks), cache.states.take()
    logits, start = [], 0
    for length in [12] + [1] * (len(sequence) - 12):
        attention = base.attention.cached([Span(start, length, blocks, slot)], cache)
        tokens = base.pad(sequence[start : start + length])
        positions = base.pad(torch.arange(start, start + length, device=base.device))
        logits.append(base.logits(base.hidden(tokens, positions, attention))[:length])
        start += length
    return torch.cat(logits), cache


def packed_logits(base: LoraModel, sequences: list[Tensor]) -> tuple[list[Tensor], list[LayerCall]]:
    """Logits [T, V] of each sequence, all in one pass, and the attention calls of its layers."""
    hidden, calls = packed_hidden(base, sequences)
    logits = base.logits(base.pad(torch.cat(hidden)))
    lengths = [len(states) for states in hidden]
    return list(logits[: sum(lengths)].split(lengths)), calls


def packed_hidden(base: LoraModel, sequences: list[Tensor]) -> tuple[list[Tensor], list[LayerCall]]:
    """Hidden states [T, D] of each sequence, all in one pass, and the attention calls of its layers."""
    lengths = [len(sequence) for sequence in sequences]
    pad = -sum(lengths) % base.arithmetic.rows
    tokens = torch.cat([*sequences, torch.zeros(pad, dtype=torch.long, device=base.device)])
    spans = [*lengths, pad] if pad else lengths
    positions = torch.cat([torch.arange(length, device=base.device) for length in spans])
    attention = base.attention.packed(spans)
    hidden = base.hidden(tokens, positions, attention)
    return list(hidden.split(spans))[: len(lengths)], attention.calls
