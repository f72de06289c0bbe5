"""Sequences that attention by kernels is tested with, and rows of theirs that must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.model.attention import LayerCall, Prefix, Span
from motet.model.attention.triton_attention import TritonPass
from motet.model.attention.triton_metadata import TILE_KEYS, TritonMetadata, cached_metadata, packed_metadata
from motet.model.kv_cache import KVCache
from tests.support.attention_cases import BLOCK, HEADS, sequences, shared_blocks

DEVICE = tests.support.triton_on_cpu.DEVICE
LENGTHS = [70, 40, 3, 33, 9, 5]
PREFIXES = [None, Prefix(0, 70), Prefix(0, 70), None, Prefix(113, 30), Prefix(146, 4, ((113, 30),))]
"""A tile of 64 rows ends in the middle of the first; two continue it, one continues part of another, and the last both."""


def random(rows: int, *heads: int, width: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, each, width, generator=generator).to(DEVICE) for each in heads]


def attend(metadata: TritonMetadata, states: list[Tensor], window=None, softcap=None, sinks=None) -> Tensor:
    scaling = states[0].shape[-1] ** -0.5
    return TritonPass(metadata).attend(LayerCall(0, scaling, window, softcap, sinks), *states)


@torch.inference_mode()
def decoded_and_whole(dtype: torch.dtype, fold: int, window: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of sequences that are read in part and then decoded, token by token, and the same rows of whole sequences."""
    states = [[each.to(DEVICE) for each in one] for one in sequences(dtype, HEADS * fold)]
    lengths = [len(one[0]) for one in states]
    packed = [torch.cat(each) for each in zip(*states, strict=True)]
    whole = attend(packed_metadata(lengths, DEVICE), packed, window).split(lengths)
    cache = KVCache(60, BLOCK, DEVICE)
    tables = shared_blocks(cache)
    spans = [Span(0, length - 3, blocks) for length, blocks in zip(lengths, tables, strict=True)]
    first = [torch.cat([one[place][:-3] for one in states]) for place in range(3)]
    yield attend(cached_metadata(spans, cache, DEVICE), first, window), torch.cat([rows[:-3] for rows in whole])
    for back in (3, 2, 1):
        spans = [Span(length - back, 1, blocks) for length, blocks in zip(lengths, tables, strict=True)]
        row = [torch.stack([one[place][-back] for one in states]) for place in range(3)]
        decoded = attend(cached_metadata(spans, cache, DEVICE), row, window)
        yield decoded, torch.stack([rows[-back] for rows in whole])


def alone_and_in_company(
    window: int | None, width: int = 16, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Outputs and gradients of some sequences alone, and the same between others.

    Before and behind them are longer sequences that hold NaN and Inf, and have a shared prompt themselves.
    """
    heads = 3 * kv_heads, kv_heads, kv_heads
    own = random(sum(LENGTHS), *heads, width=width)
    others = [random(rows, *heads, width=width, seed=rows) for rows in (3 * TILE_KEYS + 5, 20)]
    for each in others[0]:
        each[7::50], each[9::50] = float("nan"), float("inf")
    offset = len(others[0][0])
    moved = [
        None
        if prefix is None
        else Prefix(prefix.row + offset, prefix.length, tuple((row + offset, length) for row, length in prefix.before))
        for prefix in PREFIXES
    ]
    company = packed_metadata([offset, *LENGTHS, 20], DEVICE, [None, *moved, Prefix(0, offset)])
    alone = packed_metadata(LENGTHS, DEVICE, PREFIXES)
    (slope,) = random(offset + sum(LENGTHS) + 20, heads[0], width=width, seed=1)
    found = []
    for tables, start, parts in ((alone, 0, [own]), (company, offset, [others[0], own, others[1]])):
        states = [torch.cat(each).to(dtype).requires_grad_() for each in zip(*parts, strict=True)]
        rows = slice(start, start + sum(LENGTHS))
        output = attend(tables, states, window)
        slopes = slope[offset:][: sum(LENGTHS)] if tables is alone else slope
        found.append([each[rows] for each in (output, *torch.autograd.grad(output, states, slopes.to(dtype)))])
    return found
