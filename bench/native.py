"""Products of Motet's own CPU kernels beside torch's: `python -m bench.native`, on one core, by CPU time, best of several."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from motet.kernels.cpu import library

SHAPES = [(8, 576, 3072), (64, 576, 3072), (64, 1536, 576), (256, 576, 3072), (64, 576, 16), (64, 16, 576)]
"""Rows, inputs and outputs: SmolLM2's gate and up, down, and an adapter's A and B."""

COLD = 96 << 20
"""Bytes of weights that are used in turn, so that each comes from memory."""


def best(work: Callable[[int], None], flops: float, copies: int) -> float:
    """GFLOP/s of CPU time."""
    repeats, seconds = max(copies, int(5e8 / flops) + 1), []
    for _ in range(6):
        started = time.thread_time()
        for index in range(repeats):
            work(index % copies)
        seconds.append((time.thread_time() - started) / repeats)
    return flops / min(seconds) * 1e-9


def rates(native: library.Native, m: int, k: int, n: int, *, cold: bool) -> list[float]:
    """Of torch, `exact` and `exact-dpbf16`."""
    copies = max(1, COLD // (2 * k * n)) if cold else 1
    x, output = torch.randn(m, k).bfloat16(), torch.empty(m, n)
    weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
    shown = [best(lambda i: _linear(x, weights[i]), 2.0 * m * k * n, copies)]
    packed = [torch.empty(native.calls.motet_packed_bytes(1, k, n), dtype=torch.uint8) for _ in weights]
    for weight, memory in zip(weights, packed, strict=True):
        native.calls.motet_pack(1, weight.data_ptr(), 1, k, k, n, 1, memory.data_ptr())
    for arithmetic in library.ARITHMETICS.values():
        calls = [
            library.Product(x.data_ptr(), 1, k, each.data_ptr(), 1, k, output.data_ptr(), n, m, k, n, False, arithmetic)
            for each in packed
        ]

        def work(index: int, calls: list[library.Product] = calls) -> None:
            native.calls.motet_product(ctypes.byref(calls[index]), 1)

        shown.append(best(work, 2.0 * m * k * n, copies))
    return shown


def _linear(x: torch.Tensor, weight: torch.Tensor) -> None:
    F.linear(x, weight)


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    native = library.load()
    print("| bf16 product, GFLOP/s of one core | torch | `exact` | `exact-dpbf16` |\n|---|---|---|---|")
    ceilings = [f"{native.ceiling(name):.0f}" for name in library.ARITHMETICS]
    print(f"| the most there is ({native.form}) | | {' | '.join(ceilings)} |")
    for m, k, n in SHAPES:
        for cold in (False, True):
            shown = " | ".join(f"{rate:.0f}" for rate in rates(native, m, k, n, cold=cold))
            print(f"| {m} rows, {k} → {n}, weights {'from memory' if cold else 'in the cache'} | {shown} |")


if __name__ == "__main__":
    main()
