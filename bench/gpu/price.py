"""What exactness costs: a base whose products go by time alone, whatever their bits, to be timed beside the same base as it is.

Attention, sums and draws stay as they are: they have no other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.product_backends import Adapters, Library, ProductShape, ProductWeight, WayTable
from motet.kernels.cuda.product_timings import Stopwatch, timed
from motet.model.accelerator import Switched
from motet.model.lora_model import LoraModel

ROWS = (64, 256)
"""Rows of the steps that are timed."""
MOST = 1.05
"""Times as long as a step by time alone; the goal is 1, and the rest is for the noise of two measurements."""


def _as_it_likes() -> Callable[[], None]:
    """Torch's own settings: the library may split K, and add the parts in bfloat16."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    matmul.allow_bf16_reduced_precision_reduction = (True, True)

    def put_back() -> None:
        matmul.allow_bf16_reduced_precision_reduction = before

    return put_back


FREE = Library(switches=Switched(_as_it_likes))


@dataclass(frozen=True)
class FasterLibrary:
    """A `Way`: the library as it likes where that is faster than without split-K."""

    free: frozenset[tuple[ProductShape, int]]
    """Shapes and rows at which it is."""

    name = Library.name
    any_rows = False
    alignment = Library.alignment

    def multiply(
        self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None, *, back: bool
    ) -> None:
        """See `Way`."""
        self.of(ProductShape.of(weight, back=back), len(x_TK)).multiply(x_TK, weight, y_TN, adapters, back=back)

    def of(self, shape: ProductShape, n_rows: int) -> Library:
        """Which of the two it is."""
        return FREE if (shape, n_rows) in self.free else Library()


def by_time(table: WayTable, weights: Sequence[ProductWeight], stopwatch: Stopwatch) -> WayTable:
    """A table that takes the fastest of Motet's tiles and the library's ways for `ROWS`, whatever bits it has."""
    speeds, free = {key: dict(ways) for key, ways in table.speeds.items()}, set[tuple[ProductShape, int]]()
    tried = dict(table.tried)
    for shape, same in groupby(sorted(weights, key=ProductShape.of), ProductShape.of):
        few = list(same)
        tried[shape] = tried.get(shape, frozenset()) | frozenset(ROWS)
        for key in ((shape, rows) for rows in ROWS):
            ways = speeds.setdefault(key, {})
            taken = timed(FREE, shape, few, key[1], stopwatch)
            print(f"{shape}, {key[1]} rows: {taken:.1f} µs as the library likes; {ways}")
            if taken < ways.get(Library.name, math.inf):
                ways[Library.name] = taken
                free.add(key)
    return replace(table, speeds=speeds, tried=tried, library=FasterLibrary(frozenset(free)))


@contextmanager
def products_by_time(base: LoraModel, stopwatch: Stopwatch) -> Iterator[bool]:
    """Steps that are recorded meanwhile multiply so; whether they do, as Motet's kernels for cards compute the base."""
    own = base.kernels
    if not isinstance(own, CudaBase):
        yield False
        return
    before = own.products.table
    own.products.table = by_time(before, own.plan.weights, stopwatch)
    try:
        yield True
    finally:
        own.products.table = before
