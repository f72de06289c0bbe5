"""How long attention of a decoding step takes, beside a copy of its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from bench.gpu.figures import Figure, say
from torch import Tensor

from motet.kernels.cuda.attention import CudaAttention
from motet.model.accelerator import Recorder, microseconds
from motet.model.attention import LayerCall, Span
from motet.model.kv_cache import KVCache

ROWS, KEYS, BLOCK = 256, 1024, 64
"""Rows of a step, keys of each, and tokens of a block."""
_REPEATS = 20
Clock = Callable[[Callable[[], Tensor]], float]
"""What a run takes, in any unit."""


def times_of_reading(
    shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype, clock: Clock, rows: int = ROWS, keys: int = KEYS
) -> float:
    """How many times as long attention of a layer takes as reading its keys and values at the rate of a copy.

    A copy reads and writes, so reading takes half of its time.
    """
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    width = shape["hidden_size"] // heads
    cache = KVCache(rows * -(-keys // BLOCK), BLOCK, device)
    spans = [Span(keys - 1, 1, cache.take(-(-keys // BLOCK))) for _ in range(rows)]
    step = CudaAttention(BLOCK, device).cached(spans, cache)
    states = torch.randn(rows, heads + 2 * kv_heads, width, dtype=dtype, device=device)
    query, key, value = states.split((heads, kv_heads, kv_heads), 1)
    pools = step.pools(0, key, value)
    for pool in pools:
        pool.normal_()
    out, copies = torch.empty(query.shape, dtype=dtype, device=device), [torch.empty_like(pool) for pool in pools]

    def attend(layer: int) -> Tensor:
        step.attend_into(LayerCall(layer, width**-0.5, None, None), query, *pools, out)
        return out

    def copy() -> Tensor:
        for target, pool in zip(copies, pools, strict=True):
            target.copy_(pool)
        return copies[0]

    attend(0)  # lists the pieces of all layers
    return clock(lambda: attend(1)) / (clock(copy) / 2)


def tell(name: str, shape: Mapping[str, Any], device: torch.device) -> None:
    """A figure of a base's attention on a card, replayed as a step is."""
    recorder = Recorder(device)

    def clock(run: Callable[[], Tensor]) -> float:
        return microseconds(recorder.capture(run, first=True), _REPEATS)

    found = times_of_reading(shape, device, torch.bfloat16, clock)
    row = f"{name}: attention, {ROWS} rows with {KEYS:,} keys"
    say(Figure("card", row, f"{found:.2f} times as long as reading the keys at a copy's rate"))
