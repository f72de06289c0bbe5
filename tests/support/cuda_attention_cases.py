"""Passes of a GPU's attention that tests run or compile.

Legend: T packed rows, H query heads, K KV heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from motet.kernels.cuda.attention import CudaAttention, CudaPass
from motet.model.attention import LayerCall, Prefix, Span
from motet.model.kv_cache import KVCache

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH = 530
"""Three pieces, of which the last is a part of a page."""
SPLIT = 300
"""Where the sequence is cut: not at the border of a page or of a piece."""
BORDERS = [0, 63, 64, 255, 256, 299, 300, 511, 512, 529]


def random(rows: int, *heads: int, width: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """States [rows, heads, width]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, each, width, generator=generator).to(DEVICE, dtype) for each in heads]


def run(
    attention: CudaPass,
    states: list[Tensor],
    *,
    window: int | None = None,
    softcap: float | None = None,
    layer: int = 0,
) -> Tensor:
    """Queries, keys and values [T, heads, E] → [T, H, E], as a layer does it. Temporary blocks hold NaN at first."""
    query_THE, *own = states
    pools = attention.pools(layer, *own)
    places = attention.places_T // pools[0].shape[2], attention.places_T % pools[0].shape[2]
    for pool, states_TKE in zip(pools, own, strict=True):
        if attention.cache is None:
            pool.fill_(torch.nan)
        pool[places[0], :, places[1]] = states_TKE
    out_THE = torch.full_like(query_THE, torch.nan)
    call = LayerCall(layer, query_THE.shape[-1] ** -0.5, window, softcap)
    attention.attend_into(call, query_THE, *pools, out_THE)
    return out_THE


def cache_of_nan(n_blocks: int, block_size: int, states: list[Tensor]) -> KVCache:
    """A cache whose blocks, free ones too, hold NaN."""
    cache = KVCache(n_blocks, block_size, DEVICE, clean=False)
    for pool in cache.layer(0, *states[1:]):
        pool.fill_(torch.nan)
    return cache


def computed_otherwise(
    backend: CudaAttention, states: list[Tensor], *, window: int | None, softcap: float | None
) -> Iterator[Tensor]:
    """Rows of one sequence [T, H, E] by every kind of pass but a packed one of its own; NaN where not computed.

    Neighbours and free blocks hold NaN.
    """
    other = [x.fill_(torch.nan) for x in random(70, *(x.shape[1] for x in states), width=states[0].shape[2])]

    def attended(attention: CudaPass, *parts: list[Tensor]) -> Tensor:
        packed = [torch.cat(each).to(states[0].dtype) for each in zip(*parts, strict=True)]
        return run(attention, packed, window=window, softcap=softcap)

    yield attended(backend.packed([70, LENGTH, 70]), other, states, other)[70:-70]
    chain = [None, Prefix(0, 100), Prefix(100, 200, ((0, 100),))]
    yield attended(backend.packed([100, 200, LENGTH - 300], chain), states)

    size = backend.block_size
    cache = cache_of_nan(2 * LENGTH // size + 30, size, states)
    own, others = cache.take(-(-SPLIT // size)), cache.take(-(-400 // size))
    read = attended(backend.cached([Span(0, SPLIT, own)], cache), [x[:SPLIT] for x in states])
    fork = [*own[: SPLIT // size], *([cache.copy(own[-1])] if SPLIT % size else [])]
    fork += cache.take(-(-LENGTH // size) - len(fork))
    spans = [Span(330, 70, others), Span(SPLIT, LENGTH - SPLIT, fork)]
    yield torch.cat([read, attended(backend.cached(spans, cache), other, [x[SPLIT:] for x in states])[70:]])

    alone, together = torch.full_like(states[0], torch.nan), torch.full_like(states[0], torch.nan)
    for position in BORDERS:
        row = [x[position, None] for x in states]
        alone[position] = attended(backend.cached([Span(position, 1, fork)], cache), row)
    yield alone
    decoded = [Span(position, 1, fork) for position in BORDERS]
    rows = [x[BORDERS] for x in states]
    attention = backend.replayable([Span(400, 1, others), *decoded, Span(70, 1, others)], cache, 20)
    assert attention is not None
    together[BORDERS] = attended(attention, [x[:1] for x in other], rows, [x[:1] for x in other])[1:-1]
    yield together


def launches(
    heads: int, kv_heads: int, width: int, *, backend: CudaAttention, softcap: float | None = None
) -> Iterator[Callable[[], object]]:
    """Decoding, prompts in chunks, and packed sequences with a prefix, of a bfloat16 base with such heads."""
    cache = KVCache(256, 64, CPU)
    decode = [Span(position, 1, range(1, 33)) for position in range(100, 164)]
    chunks = [Span(0, 500, range(1, 9)), Span(2000, 524, range(1, 41))]
    attentions = [
        *(backend.replayable(decode[:rows], cache, least_blocks) for rows, least_blocks in ((64, 32), (3, 64), (1, 1))),
        backend.cached(chunks, cache),
        backend.packed([1024]),
        backend.packed([70, 900, 54], [None, Prefix(0, 70), Prefix(0, 70)]),
    ]
    for attention in attentions:
        assert attention is not None
        rows = len(attention.positions_T)
        states = [torch.zeros(rows, n, width, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
        yield partial(run, attention, states, softcap=softcap)
        yield partial(run, attention, states, softcap=softcap, window=1000)
        if attention.single:
            yield attention.place_rows
