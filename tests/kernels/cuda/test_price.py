"""What exactness costs: what it is timed against, rehearsed in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tests.support.triton_on_cpu

from bench.gpu import price  # isort: skip  # kernels are made for the interpreter
from motet.kernels.cuda.product_backends import Library, ProductShape, ProductWeight, Way  # isort: skip
from motet.model import accelerator  # isort: skip
from tests.support import cuda_bases  # isort: skip

DEVICE = tests.support.triton_on_cpu.DEVICE
TILES = 5.0, 1.0
"""Invented microseconds of Motet's tiles at 64 and 256 rows."""


@pytest.mark.parametrize(
    ("without_split", "microseconds", "expected"),
    [(6.0, 3.0, price.FREE), (4.0, 4.5, Library())],
    ids=["as it likes", "without split"],
)
def test_exactness_is_timed_against_the_fastest_way_of_all(
    without_split: float, microseconds: float, expected: Library
) -> None:
    """No number of rows was tried, so the base itself multiplies by Motet's tiles alone."""
    base = cuda_bases.load("llama_long")
    own = cuda_bases.own(base)
    before, ran = own.products.table, list[object]()
    shapes = set(map(ProductShape.of, own.plan.weights))
    before.speeds |= {
        (shape, rows): {before.own(shape, rows).name: tile, Library.name: without_split}
        for shape in shapes
        for rows, tile in zip(price.ROWS, TILES, strict=True)
    }

    def clock(run: Callable[[], None]) -> float:
        run()
        ran.append(run)
        same = sum(ProductShape.of(weight) == sorted(shapes)[(len(ran) - 1) // 2] for weight in own.plan.weights)
        return microseconds * same

    with price.products_by_time(base, clock) as other:
        assert other
        table = own.products.table
        faster = table.library
        assert isinstance(faster, price.FasterLibrary)
        for shape in shapes:
            chosen: list[Way] = [table.choose(shape, rows) for rows in price.ROWS]
            assert chosen == [faster, before.own(shape, 256)]
            assert faster.of(shape, 64) == expected
            assert [before.choose(shape, rows) for rows in price.ROWS] == [
                before.own(shape, rows) for rows in price.ROWS
            ]
    assert own.products.table is before
    assert len(ran) == 2 * len(shapes)


def test_a_base_that_torch_computes_has_no_other_products() -> None:
    base = cuda_bases.by_torch("llama_long")
    with price.products_by_time(base, lambda run: 1.0) as other:
        assert not other
    assert base.kernels is None


def test_the_library_multiplies_as_it_likes_and_the_settings_are_put_back() -> None:
    x_TK, weight = torch.randn(4, 32, device=DEVICE), ProductWeight(torch.randn(8, 32, device=DEVICE))
    sums, y_TN = accelerator._bfloat16_sums, x_TK.new_empty(4, 8)
    before = sums()
    library = price.FasterLibrary(frozenset({(ProductShape.of(weight), 4)}))
    with accelerator.full_precision:
        exact = sums()
        library.multiply(x_TK, weight, y_TN, None, back=False)
        assert sums() == exact
        with price.FREE.switches:
            assert sums() == (True, True)
    assert torch.allclose(y_TN, x_TK @ weight.weight_NK.t(), atol=1e-4)
    assert sums() == before
