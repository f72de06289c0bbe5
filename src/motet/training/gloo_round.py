"""One all-reduce with gloo between processes, to test whether they reach each other."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import distributed

_MEBIBYTE = 2**18
"""In float32 numbers."""


def gloo_round(rank: int, world: int, address: str, seconds: float) -> float:
    """Sum a MiB over all `world` ranks, of which the first listens at `address`; returns the seconds that it took.

    Raises:
        RuntimeError: the ranks did not connect in `seconds`, or the sum is wrong.
    """
    limit = timedelta(seconds=seconds)
    distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=limit)
    try:
        numbers = torch.full((_MEBIBYTE,), float(rank + 1))
        begun = time.perf_counter()
        distributed.all_reduce(numbers)
        taken = time.perf_counter() - begun
    finally:
        distributed.destroy_process_group()
    if not bool((numbers == world * (world + 1) / 2).all()):
        raise RuntimeError("the result of the all-reduce is wrong")
    return taken
