"""One round of gloo between processes, to find out whether they reach each other."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import distributed

_MEBIBYTE = 2**18
"""In numbers of four bytes."""


def gloo_round(rank: int, world: int, address: str, seconds: float) -> float:
    """Add a MiB over all ranks; the seconds that it took.

    Args:
        rank: of this process.
        world: how many there are.
        address: HOST:PORT, where rank 0 listens.
        seconds: to wait for the others.

    Raises:
        RuntimeError: they did not find each other in time, or what came is not the sum.
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
        raise RuntimeError("what was added up is not the sum")
    return taken
