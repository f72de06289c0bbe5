# mypy: disable-error-code="no-untyped-def"
"""Kernels with the faults that `tests/model/test_compiled_kernels.py` looks for. Run as a module; prints JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from tests.support import launched_kernels


@triton.jit
def forward(values, total, n):
    """n is compiled in: 1, a multiple of 16 and other numbers are three machine codes. The sum is atomic."""
    place = tl.arange(0, 64)
    tl.atomic_add(total, tl.sum(tl.load(values + place, mask=place < n, other=0.0), 0))


@triton.jit
def key_gradients(left, right, out, SIDE: tl.constexpr):
    """More registers and shared memory than a card has, and fused sums."""
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    one, other = tl.load(left + at), tl.load(right + at)
    square = tl.dot(one, other)
    tl.store(out + at, tl.dot(square.to(one.dtype), other) * square + one)


def launches() -> Iterator[Callable[[], object]]:
    for n in (1, 7, 32):
        yield partial(forward[1,], torch.zeros(64), torch.zeros(1), n)
    matrix = torch.zeros(256, 256, dtype=torch.bfloat16)
    yield partial(key_gradients[1,], matrix, matrix, matrix, SIDE=256, num_warps=8, enable_fp_fusion=True)


def main(words: Sequence[str] = ()) -> None:
    launched_kernels.print_made("sm_90", "bf16", 64, "bad", list(launches()))


if __name__ == "__main__":
    main()
