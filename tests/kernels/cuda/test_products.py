"""Products give a row the same bits whatever the tile, the other rows and the other rows' adapters.

Triton's interpreter adds over K in order, as a tensor core does, so here all tiles must agree; what a card does is tried
when a base is loaded (`motet.kernels.cuda.bit_trial`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.kernels.cuda import launches
from motet.kernels.cuda.decoder_shape import piece_of
from motet.kernels.cuda.product_backends import OwnTile, ProductShape, ProductWeight, shrink, table_for
from motet.kernels.cuda.products import Products
from tests.support.adapted_rows import Adapted, adapted

DEVICE = tests.support.triton_on_cpu.DEVICE
TILES = [
    OwnTile(16, 32, 32, 4, 2),
    OwnTile(64, 16, 64, 4, 2),
    OwnTile(32, 64, 128, 4, 2, True),
    OwnTile(16, 16, 16, 4, 2, True),
]
RANKS = [1, 256, 16, 5, 48]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def product(
    tile: OwnTile, x: Tensor, weight: ProductWeight, *, back: bool = False, rows: Adapted | None = None
) -> Tensor:
    y = x.new_full((len(x), weight.weight_NK.shape[1 if back else 0]), torch.nan)
    tile.multiply(x, weight, y, None if rows is None else (rows.tables, rows.group), back=back)
    return y


def with_inner(tile: OwnTile, x: Tensor, rows: Adapted) -> Tensor:
    product(tile, x, ProductWeight(random(32, x.shape[1], dtype=x.dtype)), rows=rows)
    return rows.pieces()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(21, 50, 70), (65, 16, 200)])
def test_every_tile_gives_the_bits_of_a_sum_in_order(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n_rows, n_outputs, n_inputs = shape
    x, weight = random(n_rows, n_inputs, dtype=dtype), random(n_outputs, n_inputs, dtype=dtype, seed=1)
    bias = random(n_outputs, dtype=dtype, seed=2)
    for of_bias in (None, bias):
        tiles = TILES if n_inputs * dtype.itemsize % 16 == 0 else [tile for tile in TILES if not tile.by_descriptors]
        found = [product(tile, x, ProductWeight(weight, of_bias)) for tile in tiles]
        want = x.double() @ weight.double().t() + (0.0 if of_bias is None else of_bias.double())
        of_sums = n_inputs * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().t())
        rounding = torch.finfo(dtype).eps * want.abs() + of_sums
        assert ((found[0].double() - want).abs() <= rounding).all()
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_product_for_gradients_multiplies_the_weight_itself() -> None:
    slope, weight = random(37, 40), random(40, 72, seed=1)
    found = [product(tile, slope, ProductWeight(weight, random(40)), back=True) for tile in TILES]
    torch.testing.assert_close(found[0], slope @ weight)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = random(70, 96), ProductWeight(random(40, 96, seed=1), random(40))
    whole = product(TILES[0], x, weight)
    for rows in (slice(0, 1), slice(3, 70), slice(69, 70)):
        assert torch.equal(product(TILES[1], x[rows].contiguous(), weight), whole[rows])
    x[::2] = torch.nan
    for tile in TILES:
        assert torch.equal(product(tile, x, weight)[1::2], whole[1::2])


@pytest.mark.parametrize("n_inputs", [40, 300, 2049])
def test_a_row_is_multiplied_with_its_own_a_in_pieces_of_k_alone(n_inputs: int) -> None:
    slots = [4, 1, -1, 0, 2, 3, 3, -1, *[2] * 19]
    x = random(len(slots), n_inputs)
    rows = adapted(slots, RANKS, n_inputs, torch.float32, DEVICE)
    product(TILES[0], x, ProductWeight(random(20, n_inputs)), rows=rows)
    piece = piece_of(n_inputs)
    for row, slot in enumerate(slots):
        found = rows.group.inner[:, row]
        width = rows.a[slot].shape[1] if slot >= 0 else 0
        assert found[:, width:].isnan().all()  # nothing is written beyond an adapter's columns
        for place, of_piece in enumerate(found[:, :width] if width else ()):
            part = slice(place * piece, (place + 1) * piece)
            torch.testing.assert_close(of_piece, x[row, part] @ rows.a[slot][part])


def test_pieces_do_not_depend_on_tile_company_place_or_launch() -> None:
    x = random(40, 80, dtype=torch.float16)
    slots = [*[0] * 20, *[1] * 20]
    want = with_inner(TILES[0], x, adapted(slots, RANKS, 80, torch.float16, DEVICE))
    assert torch.equal(
        with_inner(TILES[3], x, adapted(slots, RANKS, 80, torch.float16, DEVICE, width=320, spare=3)), want
    )
    alone = adapted(slots, RANKS, 80, torch.float16, DEVICE)
    shrink(x, (alone.tables, alone.group))
    assert torch.equal(alone.pieces(), want)
    order = np.random.default_rng(0).permutation(40)
    moved = adapted([slots[row] for row in order], RANKS, 80, torch.float16, DEVICE)
    with_inner(TILES[0], x[order], moved)
    for row, slot in enumerate(slots):
        columns = alone.a[slot].shape[1]
        found = moved.group.inner[:, int(np.argsort(order)[row]), :columns]
        assert torch.equal(found, alone.group.inner[:, row, :columns])


def test_nan_and_inf_of_a_neighbour_stay_with_it() -> None:
    x, slots = random(20, 64), [0, 1] * 9 + [-1, 0]
    want, bad = (adapted(slots, [4, 16], 64, torch.float32, DEVICE) for _ in range(2))
    bad.a[1].fill_(torch.nan)
    bad.a[1][::2] = torch.inf
    y, other = product(TILES[0], x, ProductWeight(random(20, 64)), rows=want), x.clone()
    other[1] = torch.nan
    assert torch.equal(product(TILES[1], other, ProductWeight(random(20, 64)), rows=bad)[0], y[0])
    for row, slot in enumerate(slots):
        if slot == 0:
            assert torch.equal(bad.group.inner[:, row, :4], want.group.inner[:, row, :4])


def test_a_product_with_adapters_is_one_launch() -> None:
    products = Products(table_for(DEVICE, torch.float32))
    x, weight = random(5, 32), ProductWeight(random(16, 32))
    rows = adapted([0] * 5, [4], 32, torch.float32, DEVICE)
    y = x.new_empty(5, 16)
    with launches.count() as counted:
        products.multiply(x, weight, y, (rows.tables, rows.group))
        slope = products.back(y, weight)
    assert counted == {"multiply": 2}
    torch.testing.assert_close((y, slope), (x @ weight.weight_NK.t(), x @ weight.weight_NK.t() @ weight.weight_NK))
    assert not rows.pieces().isnan().any()
    assert ProductShape.of(weight) == ProductShape(16, 32)
