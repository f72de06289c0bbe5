"""Adapters at fixed places in memory, for decoding that is recorded once and replayed while they change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.model.cuda_graph import AdapterTable, TableRouting
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import AdapterStacks, SamplerRouting
from tests.support import tiny_models as tiny
from tests.support.lora_cases import DTYPES, FAST, NAMES, Seen, exact, products, random

pytestmark = pytest.mark.tier1


def table_of(base: LoraModel, slots: int = 4, rank: int = 8) -> AdapterTable:
    return AdapterTable(
        base.adapter_layout("all-linear", rank),
        slots,
        base.device,
        base.dtype,
        products(base, FAST),
    )


def tell(routing: TableRouting, slots: Sequence[int]) -> None:
    """Say which slot each row belongs to."""
    for tensor, value in zip(routing.tensors, routing.values(slots), strict=True):
        tensor.copy_(value)


def through(base: LoraModel, routing: Any, x: dict[str, Tensor]) -> list[Tensor]:
    """What the linear layers make of rows."""
    whole = SamplerRouting(lambda: [routing]) if isinstance(routing, TableRouting) else routing
    found: list[Tensor] = []
    with torch.no_grad():
        for layer in {id(layer.fused): layer for layer in base.linears.values()}.values():
            found.extend(whole.linear(layer.fused, x[layer.fused.leader]))
    return found


def inputs(base: LoraModel, rows: int, seed: int = 0) -> dict[str, Tensor]:
    return {
        layer.fused.leader: random(1, rows, layer.in_features, dtype=base.dtype, seed=seed)
        for layer in base.linears.values()
    }


def sorted_rows(slots: Sequence[int]) -> list[int]:
    return sorted(range(len(slots)), key=lambda row: slots[row])


def as_sampled(
    base: LoraModel, placed: dict[int, AdapterWeights], slots: Sequence[int], x: dict[str, Tensor]
) -> list[Tensor]:
    """The same by a routing whose rows lie adapter by adapter."""
    order = sorted_rows(slots)
    runs, start = [], 0
    for slot in sorted(set(slots)):
        runs.append((placed.get(slot), start, slots.count(slot)))
        start += slots.count(slot)
    routing = AdapterStacks(products(base, FAST)).routing(runs, base.device)
    found = through(base, routing, {leader: rows[:, order] for leader, rows in x.items()})
    back = torch.tensor(order).argsort()
    return [y[:, back] for y in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_the_bits_of_the_samplers_routing(name: str, dtype: str) -> None:
    """Also after its adapters were replaced in place and rows went to others, with the routing that was there before."""
    base = tiny.base(name, dtype)
    table, x = table_of(base), inputs(base, 20)
    routing = table.routing(20)
    adapters = [tiny.adapter(base, seed=seed) for seed in range(5)]
    plan = [
        (adapters[:3], [1, 0, 2, 1, 3, 0, 2, 2, 1, 3, 1, 2, 3, 3, 1, 2, 0, 0, 0, 0]),
        (adapters[1:4], [3, 0, 2, 2, 3, 2, 2, 3, 3, 2, 1, 1, 1, 1, 2, 0, 0, 0, 0, 0]),
        (adapters[3:], [2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3]),
    ]
    for chosen, slots in plan:
        placed = dict(zip(table.place(chosen), chosen, strict=True))
        slots = [slot if slot in placed else 0 for slot in slots]
        assert len(set(slots)) > 1
        tell(routing, slots)
        for ours, theirs in zip(through(base, routing, x), as_sampled(base, placed, slots, x), strict=True):
            assert torch.equal(ours, theirs)


def test_an_adapter_stays_where_it_is() -> None:
    base = tiny.base("llama")
    table, adapters = table_of(base), [tiny.adapter(base, seed=seed) for seed in range(5)]
    flat = table._flat
    one, two = table.place(adapters[:2])
    assert {one, two} == {1, 2}
    version = flat._version
    assert table.place([adapters[1], adapters[0], adapters[1]]) == (two, one, two)
    assert flat._version == version, "nothing is copied again"
    assert table.place([adapters[1], adapters[2]]) == (two, 3)
    assert table.place([adapters[0]]) == (one,)
    assert table.place([adapters[3]]) == (two,), "the one longest unused makes room"
    assert table.place([adapters[2], adapters[4]]) == (3, one), "who is asked for stays, however long unused"
    assert table._flat is flat
    for slot, weights in ((one, adapters[4]), (two, adapters[3]), (3, adapters[2])):
        assert torch.equal(flat[slot], weights.flat)
    assert not flat[0].any()


def test_an_adapter_that_was_let_go_is_not_taken_for_a_new_one() -> None:
    """Its memory may be handed to a new version under the same identity."""
    base = tiny.base("llama")
    table = table_of(base, slots=3)
    stays = tiny.adapter(base, seed=100)
    (home,) = table.place([stays])
    for seed in range(20):
        weights = tiny.adapter(base, seed=seed)
        slot, again = table.place([weights, stays])
        assert again == home != slot
        assert torch.equal(table._flat[slot], weights.flat)
        del weights
    left = table._placed[slot]
    assert left is not None
    assert left() is None, "the table keeps no adapter alive"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_slot_changes_no_other_row(dtype: str) -> None:
    """Rows of padding and of the base stay finite, and are the base's."""
    base = tiny.base("llama", dtype)
    table, x = table_of(base, slots=3), inputs(base, 16)
    good, broken = tiny.adapter(base, seed=1), tiny.adapter(base, seed=2, scale=math.nan)
    slots = [1] * 4 + [2] * 4 + [0] * 8
    routing = table.routing(16)
    table.place([good, tiny.adapter(base, seed=3)])
    tell(routing, slots)
    before = through(base, routing, x)
    assert table.place([good, broken]) == (1, 2)
    plain = through(base, AdapterStacks(base.products).routing([], base.device), x)
    for now, was, alone in zip(through(base, routing, x), before, plain, strict=True):
        assert not torch.isfinite(now[:, 4:8]).any()
        assert torch.equal(now[:, :4], was[:, :4])
        assert torch.equal(now[:, 8:], alone[:, 8:])


def test_what_is_recorded_never_changes() -> None:
    """The same operations with the same shapes at the same addresses, whatever the rows belong to, and none that waits."""
    records, homes = [], []
    with exact("llama") as base:
        table, x = table_of(base), inputs(base, 16)
        routing = table.routing(16)
        for seed, slots in enumerate(([0] * 16, [3, 1, 2, 1] * 4, [2] * 16)):
            table.place([tiny.adapter(base, seed=3 * seed + place) for place in range(3)])
            tell(routing, slots)
            with Seen() as seen:
                through(base, routing, x)
            records.append(seen.calls)
            tensors = [routing._order_T, routing._inverse_T, routing._ends_S]
            for matrices in table.matrices.values():
                tensors.extend([matrices.a, *(b for _, b in matrices.bs)])
            homes.append([each.data_ptr() for each in tensors])
    called = {name for name, _ in records[0]}
    assert "aten::_grouped_mm" in called
    assert not called & {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::_to_copy"}
    assert records[0] == records[1] == records[2]
    assert homes[0] == homes[1] == homes[2]


def test_rows_of_a_table_are_the_bases_until_told() -> None:
    base = tiny.base("llama")
    table, x = table_of(base), inputs(base, 8)
    table.place([tiny.adapter(base, seed=1)])
    plain = through(base, AdapterStacks(base.products).routing([], base.device), x)
    assert all(map(torch.equal, through(base, table.routing(8), x), plain))
