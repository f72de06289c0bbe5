"""All launches of this room's kernels, so that they can be counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from motet.model.accelerator import device_of

_counters: list[Counter[str]] = []


def launch(kernel: Any, grid: Sequence[int], first: Tensor, /, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of its first argument, which need not be the current one.

    No product is fused with a sum, which is the default of some versions of Triton and not of others.
    """
    if _counters:
        called(kernel.__name__)
    with device_of(first):
        kernel[tuple(grid)](first, *arguments, enable_fp_fusion=False, **options)


def called(name: str) -> None:
    """Count a launch that a library makes."""
    for counter in _counters:
        counter[name] += 1


@contextlib.contextmanager
def count() -> Iterator[Counter[str]]:
    """The number of launches meanwhile, by the name of the kernel; of every thread."""
    counter = Counter[str]()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]
