"""Tables of adapters by address: every row is in one tile, and entries name the matrices that torch multiplies."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from motet.kernels.cuda.adapters import PARTS, TILE, AdapterTables, Places, most_tiles, tiles_of
from motet.model.covered_decoder import linears_of
from tests.support import tiny_models as tiny


def at(address: int, rows: int, columns: int, stride: int) -> Tensor:
    """A matrix of fp32 numbers in memory."""
    numbers = (ctypes.c_float * (stride * (rows - 1) + columns)).from_address(address)
    return torch.frombuffer(numbers, dtype=torch.float32).as_strided((rows, columns), (stride, 1)).clone()


def test_every_row_is_in_one_tile_with_rows_of_its_slot() -> None:
    slots = np.random.default_rng(0).integers(-1, 40, 700, np.int32)
    tiles = tiles_of(slots)
    rows = tiles[:, 1:][tiles[:, 1:] >= 0]
    assert sorted(rows) == list(range(700))
    assert all((slots[tile[1:][tile[1:] >= 0]] == tile[0]).all() for tile in tiles)
    assert len(tiles) == sum(-(-int((slots == slot).sum()) // TILE) for slot in range(-1, 40)) <= most_tiles(700, 40)


def test_as_many_tiles_as_rows_are_enough() -> None:
    assert len(tiles_of(np.arange(2000, dtype=np.int32))) == most_tiles(2000, 2000) == 2000
    assert len(tiles_of(np.full(5, -1, np.int32))) == most_tiles(5, 0) == 1


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_entries_are_the_matrices_of_the_layout(name: str) -> None:
    base = tiny.base(name)
    members = [
        tiny.adapter(base, rank=3, seed=1),
        tiny.adapter(base, rank=8, targets=["o_proj", "down_proj"], seed=2),
    ]
    if name == "llama":
        members.append(tiny.adapter(base, rank=5, targets=["v_proj", "k_proj", "up_proj"], seed=3))
    places = Places.of(base)
    runs = [(weights, 2 * slot, 2 * slot + 2) for slot, weights in enumerate(members)]
    tables = AdapterTables.of(places, runs, 9, base.device)
    for layer, module in enumerate(base.decoder.layers):  # type: ignore[arg-type]
        for which, (linear, *_) in enumerate(linears_of(module)):
            group, place = tables.group(layer, which), places.place(layer, which)
            assert group.entries_SC.is_contiguous()
            for slot, weights in enumerate(members):
                address, width, rank, *parts = group.entries_SC[slot].tolist()
                matrices = weights.matrices.get(linear.fused.leader)
                if matrices is None:
                    assert [address, width, rank, *parts] == [0, 0, 0] + [-1, 0] * PARTS[which]
                    continue
                assert rank == weights.layout.rank <= width <= group.width
                assert torch.equal(at(address, place.n_inputs, width, width), matrices.a)
                adapted = dict(matrices.bs)
                columns = [index for index, _ in matrices.bs]
                for part, column, of_b in zip(place.parts, parts[::2], parts[1::2], strict=True):
                    if part.member not in adapted:
                        assert (column, of_b) == (-1, 0)
                        continue
                    assert column == columns.index(part.member) * rank
                    b = adapted[part.member][:, part.first :]
                    assert torch.equal(at(of_b, rank, b.shape[1], part.stride), b)


def test_products_share_memory_that_is_large_enough_for_each() -> None:
    base = tiny.base("llama")
    tables = AdapterTables.of(Places.of(base), [(tiny.adapter(base, rank=9), 0, 3)], 7, base.device)
    shapes = [tables.group(0, which).inner.shape for which in range(4)]
    assert shapes == [(2, 7, 32), (2, 7, 16), (2, 7, 32), (3, 7, 16)]
