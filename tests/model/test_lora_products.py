"""Grouped products and tiles of rows, which a GPU computes with, tried on a CPU: bits as in `test_lora`, shapes that stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.model import lora_products
from motet.model.arithmetic import Arithmetic
from motet.model.lora import AdapterLayout, AdapterWeights, LoraMatrices, make_layout
from motet.model.lora_model import LoraModel
from motet.model.lora_products import (
    Grouped,
    GroupedProducts,
    Padded,
    RowProducts,
    Tiled,
    ends,
)
from motet.model.routing import AdapterStacks, TrainerRouting, TrainSegment
from tests.support import tiny_models as tiny
from tests.support.lora_cases import DTYPES, EXACT, FAST, NAMES, TILE, Seen, company, exact, mixed, products, random

pytestmark = pytest.mark.tier1

# --- the forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forms_agree(dtype: torch.dtype) -> None:
    rows, weights, sums = (random(*shape, dtype=dtype) for shape in ((48, 64), (3, 64, 24), (48, 24)))
    forms: list[RowProducts] = [
        Padded(3),
        Grouped(ends([16] * 3, rows.device)),
        Tiled.of([16] * 3, 0),
        Tiled.of([16] * 3, 8),
    ]
    wanted = torch.cat([part.float() @ weight.float() for part, weight in zip(rows.split(16), weights, strict=True)])
    for form in forms:
        torch.testing.assert_close(form.multiply(rows, weights).float(), wanted, rtol=1e-2, atol=2e-2)
        added = sums.clone()
        form.add(added, rows, weights)
        torch.testing.assert_close(added.float(), wanted + sums.float(), rtol=1e-2, atol=4e-2)


def test_groups_of_any_length_meet_their_own_weights() -> None:
    rooms = [5, 0, 30, 1]
    rows, weights = random(36, 64), random(4, 64, 8)
    found = Grouped(ends(rooms, rows.device)).multiply(rows, weights)
    for part, own, weight in zip(found.split(rooms), rows.split(rooms), weights, strict=True):
        torch.testing.assert_close(part.float(), own.float() @ weight.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("n_adapters", [1024, 1025, 2100])
def test_no_product_has_more_groups_than_torch_takes(n_adapters: int) -> None:
    """torch 2.11's kernel for CUDA refuses 1,025. Cut into calls, every row keeps its bits; its neighbour's NaN stays away."""
    rooms = [place % 3 for place in range(n_adapters)]
    rows, weights = random(sum(rooms), 16), random(n_adapters, 16, 8)
    rows[sum(rooms[:1022])] = math.nan
    weights[1024:1025] = math.nan
    with Seen() as seen:
        found = Grouped(ends(rooms, rows.device)).multiply(rows, weights)
    groups = [shapes[1][0] for name, shapes in seen.calls if name == "aten::_grouped_mm"]
    assert (max(groups), sum(groups)) == (1024, n_adapters)
    parts = zip(rows.split(rooms), weights, strict=True)
    alone = [Grouped(ends([len(own)], rows.device)).multiply(own, weight[None]) for own, weight in parts]
    assert torch.equal(found.nan_to_num(nan=99.0), torch.cat(alone).nan_to_num(nan=99.0))
    assert not {"aten::_local_scalar_dense", "aten::nonzero"} & {name for name, _ in seen.calls}, "a graph records it"


@pytest.mark.parametrize(("first", "stop"), [(8, 40), (3, 35), (4, 36)])
def test_columns_that_begin_anywhere_are_multiplied(first: int, stop: int) -> None:
    """Slices of fused layers' outputs need not begin at a multiple of 16 bytes."""
    wide, weights, form = random(20, 52), random(2, 32, 16), Grouped(ends([12, 8], torch.device("cpu")))
    assert torch.equal(
        form.multiply(wide[:, first:stop], weights), form.multiply(wide[:, first:stop].contiguous(), weights)
    )
    same = random(1, 32).expand(20, 32)
    assert torch.equal(form.multiply(same, weights), form.multiply(same.contiguous(), weights))


# --- where they can be used -------------------------------------------------------------------------------------------------


def fits(layout: AdapterLayout, dtype: torch.dtype, arithmetic: Arithmetic) -> bool:
    return GroupedProducts(torch.device("cpu"), dtype, arithmetic.tile).fits_table(layout)


def layout_of(n_in: int, n_out: int, rank: int) -> AdapterLayout:
    return make_layout({"q": (n_in, n_out)}, rank)


@pytest.mark.parametrize("shape", [(64, 64, 4), (64, 64, 12), (60, 64, 8), (64, 36, 8)])
def test_shapes_that_are_no_multiples_of_eight_are_left_out(shape: tuple[int, int, int]) -> None:
    for arithmetic in (EXACT, FAST):
        assert not fits(layout_of(*shape), torch.bfloat16, arithmetic)
        assert not fits(layout_of(*shape), torch.float32, arithmetic)
    assert not fits(layout_of(64, 64, 8), torch.float16, FAST)


def test_grouped_products_are_used_where_they_are_there() -> None:
    """Otherwise the tests below would compare one form with itself."""
    assert fits(layout_of(64, 64, 8), torch.float32, FAST)
    assert fits(layout_of(64, 64, 8), torch.bfloat16, FAST)


@pytest.mark.parametrize(
    ("where", "change", "good"),
    [
        ((), 0.0, (True, True)),
        ((308, 7, 300, 4, 1), math.nan, (False, False)),
        ((308,), 1.0, (False, False)),
        ((300,), 0.01, (False, True)),
        ((4,), 0.01, (False, True)),
        ((1,), 0.01, (False, True)),
    ],
)
def test_a_grouped_product_has_to_pass_its_trial(
    monkeypatch: pytest.MonkeyPatch, where: Sequence[int], change: float, good: tuple[bool, bool]
) -> None:
    """A wrong number is never let through; bits that depend on the rows beside are, where the arithmetic is not exact."""

    def spoilt(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        first = [0, *offs.tolist()]
        parts = zip(first, first[1:], weights, strict=False)
        found = torch.cat([(rows[a:b].float() @ weight.float()).to(rows.dtype) for a, b, weight in parts])
        found[-1] += (change * 20 if len(rows) in where else 0.0) if change > 0.1 or math.isnan(change) else 0.0
        if len(rows) in where:
            found[-1] = found[-1] * (1 + change)
        return found

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spoilt)
    for exactly, wanted in zip((True, False), good, strict=True):
        for transposed in (False, True):
            found = lora_products._agrees(torch.device("cpu"), torch.bfloat16, exactly, 64, 24, transposed)
            assert found == wanted


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_a_grouped_product_there_are_tiles(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def missing(*_: Any, **__: Any) -> Tensor:
        raise error("no such operator")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", missing)
    assert not lora_products._tried.__wrapped__(torch.device("cpu"), torch.bfloat16, False, 64, 24, False)


# --- sampling and training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", [EXACT, FAST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_company_equal_each_adapter_alone_bitwise(name: str, dtype: str, arithmetic: Arithmetic) -> None:
    with exact(name, dtype, arithmetic) as base:
        packed = [*company(base), (tiny.adapter(base, rank=4, seed=5), tiny.tokens(21))]
        together = tiny.packed_logits(base, packed)
        plain = tiny.packed_logits(base, [(None, ids) for _, ids in packed])
        for (weights, ids), logits, without in zip(packed, together, plain, strict=True):
            alone = tiny.packed_logits(base, [(weights, ids)])[0]
            if arithmetic.tile:
                assert torch.equal(alone, logits)
            else:  # a product of one to three rows may have other bits
                assert float((alone - logits).abs().max()) <= 0.1 * float(alone.abs().max())
            assert torch.equal(logits, without) == (weights is None), "base rows stay, adapted rows change"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_padded_products(name: str, dtype: str) -> None:
    with exact(name, dtype, Arithmetic(rows=TILE)) as base:
        packed = company(base)
        wanted = tiny.packed_logits(base, packed)
    with exact(name, dtype) as base:
        for ours, theirs in zip(tiny.packed_logits(base, packed), wanted, strict=True):
            gap, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
            assert gap <= (1e-4 if dtype == "float32" else 0.1) * largest


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflowing_neighbours_change_nothing(dtype: str) -> None:
    with exact("llama", dtype) as base:
        good = tiny.adapter(base, seed=1)
        broken = [tiny.adapter(base, seed=2, scale=math.inf), tiny.adapter(base, seed=3, rank=4, scale=math.nan)]
        mine = [(good, tiny.tokens(37)), (None, tiny.tokens(22))]
        alone = tiny.packed_logits(base, mine)
        together = tiny.packed_logits(base, [(broken[0], tiny.tokens(9)), *mine, (broken[1], tiny.tokens(18))])
        assert not torch.isfinite(together[0]).any()
        assert not torch.isfinite(together[3]).any()
        assert torch.equal(together[1], alone[0])
        assert torch.equal(together[2], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_trainer_and_sampler_routings_agree_bitwise(name: str, dtype: str) -> None:
    ids = tiny.tokens(37)
    with exact(name, dtype) as base:
        for weights in [*mixed(base), tiny.adapter(base, rank=4, seed=5)]:
            sampled = tiny.packed_logits(base, [(weights, ids)])[0]
            segments = [TrainSegment(0, 48, weights, None)]
            routing = TrainerRouting(segments, base.device, products(base, EXACT), backward=False)
            assert torch.equal(tiny.packed_logits(base, [(weights, ids)], routing)[0], sampled)


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_equal_prefill_rows_bitwise(dtype: str, rank: int) -> None:
    """One row per adapter, as in decoding, against many rows, as in prefill."""
    with exact("llama", dtype) as base:
        layer = base.linears["model.layers.0.mlp.down_proj"]
        adapters = [tiny.adapter(base, rank=rank, seed=seed) for seed in range(5)]
        x = random(1, 32, layer.in_features, dtype=base.dtype)
        many = [(each, 4 * place, 4) for place, each in enumerate(adapters)]
        few = [(each, place, 1) for place, each in enumerate(adapters)]
        with base.routed(AdapterStacks(products(base, EXACT)).routing(many, base.device)):
            wanted = layer(x)[0, :20:4]
        with base.routed(AdapterStacks(products(base, EXACT)).routing(few, base.device)):
            assert torch.equal(layer(torch.cat([x[:, :20:4], x[:, :11]], 1))[0, :5], wanted)


def test_adapters_of_one_layout_share_a_grouped_product() -> None:
    """Two for a layer, with A and with B; the adapter of rank 4 has none."""
    with exact("llama", "bfloat16", FAST) as base:
        layer = base.linears["model.layers.0.mlp.down_proj"]
        adapters = [tiny.adapter(base, rank=rank, seed=seed) for seed, rank in enumerate((8, 8, 8, 4))]
        runs = [(each, 16 * place, 16) for place, each in enumerate(adapters)]
        segments = [TrainSegment(first, first + rows, weights, None) for weights, first, rows in runs]
        for routing in (
            AdapterStacks(products(base, FAST)).routing(runs, base.device),
            TrainerRouting(segments, base.device, products(base, FAST), backward=False),
        ):
            with Seen() as seen, base.routed(routing):
                layer(random(1, 64, layer.in_features))
            rows = [shapes[0] for name, shapes in seen.calls if name == "aten::_grouped_mm"]
            assert rows == [(48, 96), (48, 8)]
            assert (16, 96) in seen.products()


def test_every_product_has_the_rows_of_a_tile() -> None:
    """However many rows an adapter has, with a rank that has no grouped product."""
    with exact("llama", "float32") as base:
        layer = base.linears["model.layers.0.mlp.down_proj"]
        one, two = (tiny.adapter(base, rank=4, seed=seed) for seed in range(2))
        x = random(1, 64, layer.in_features, dtype=base.dtype)
        for runs in ([(one, 0, 1)], [(one, 0, 37), (None, 37, 3), (two, 40, 17)], [(one, 0, 32), (two, 32, 32)]):
            with (
                Seen() as seen,
                base.routed(AdapterStacks(products(base, EXACT)).routing(runs, base.device)),
            ):
                layer(x)
            assert len(seen.products()) >= 6
            assert {shape[0] for shape in seen.products()} == {TILE}


# --- gradients ------------------------------------------------------------------------------------------------------------

Trained = dict[str, tuple[AdapterWeights, int]]
"""Adapters by name and how many rows each has."""


def gradients(base: LoraModel, trained: Trained, arithmetic: Arithmetic) -> dict[str, Tensor]:
    """Of a fixed slope of each adapter's final hidden states, all adapters in one pass."""
    segments, start, sums = [], 0, {}
    for name, (weights, length) in trained.items():
        sums[name] = torch.zeros(weights.layout.size)
        segments.append(TrainSegment(start, start + length, weights, weights.layout.matrices(sums[name])))
        start += length
    lengths = [length for _, length in trained.values()]
    tokens = torch.cat([tiny.tokens(length, seed=7) for length in lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    slopes = torch.cat([random(length, 64, dtype=base.dtype, seed=length) for length in lengths])
    routing = TrainerRouting(segments, base.device, products(base, arithmetic), backward=True)
    with base.routed(routing), torch.enable_grad():
        hidden = base.hidden(tokens, positions, base.attention.packed(lengths))
        torch.autograd.backward(hidden, slopes)
    return sums


def trained_together(base: LoraModel) -> Trained:
    lengths = {"a": 48, "b": 16, "c": 48, "d": 32, "e": 16}
    ranks = {"a": 8, "b": 8, "c": 4, "d": 16, "e": 4}
    return {
        name: (tiny.adapter(base, rank=ranks[name], seed=len(name) + length), length)
        for name, length in lengths.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_gradients_in_company_equal_each_adapters_alone_bitwise(name: str, dtype: str) -> None:
    with exact(name, dtype) as base:
        trained = trained_together(base)
        together = gradients(base, trained, EXACT)
        for own, (weights, length) in trained.items():
            alone = gradients(base, {own: (weights, length)}, EXACT)[own]
            assert alone.abs().max() > 0
            assert torch.equal(alone, together[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_padded_products(dtype: str) -> None:
    with exact("llama", dtype) as base:
        trained = trained_together(base)
        ours = gradients(base, trained, EXACT)
    with exact("llama", dtype, Arithmetic(rows=TILE)) as base:
        theirs = gradients(base, trained, Arithmetic(rows=TILE))
    for name, gradient in ours.items():
        gap = float((gradient - theirs[name]).norm() / theirs[name].norm())
        assert gap <= (1e-4 if dtype == "float32" else 0.1), name


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_overflowing_neighbours_change_no_gradient(broken: float) -> None:
    with exact("llama") as base:
        mine = (tiny.adapter(base, seed=1), 32)
        alone = gradients(base, {"mine": mine}, EXACT)["mine"]
        other = (tiny.adapter(base, seed=2, scale=broken), 16)
        assert torch.equal(gradients(base, {"other": other, "mine": mine}, EXACT)["mine"], alone)


def test_segments_of_one_adapter_are_added_up() -> None:
    """In two segments with another's between them: each has its own sums, and its own row of the batch."""
    with exact("llama", "float32") as base:
        layer = base.linears["model.layers.0.mlp.down_proj"]
        weights, between = tiny.adapter(base, seed=1), tiny.adapter(base, seed=2)
        x, slope = random(1, 64, 96, dtype=base.dtype), random(1, 64, 64, dtype=base.dtype, seed=1)
        found = []
        for parts in (
            [(0, 16, weights), (16, 32, between), (32, 64, weights)],
            [(0, 16, weights)],
            [(32, 64, weights)],
        ):
            flat = torch.zeros(weights.layout.size)
            sums: LoraMatrices = weights.layout.matrices(flat)[layer.path]
            segments = [
                TrainSegment(first, stop, each, {layer.path: sums} if each is weights else None)
                for first, stop, each in parts
            ]
            with base.routed(TrainerRouting(segments, base.device, products(base, EXACT), backward=True)):
                layer(x).backward(slope)
            found.append(flat)
        assert torch.equal(found[0], found[1] + found[2])


def test_every_segment_is_summed_in_a_product_of_its_own() -> None:
    """Also where segments are equally long: a joint product would have a shape that depends on the neighbours."""
    with exact("llama", "float32") as base:
        layer = base.linears["model.layers.0.mlp.down_proj"]
        segments = []
        for place in range(2):
            weights = tiny.adapter(base, rank=4, seed=place)
            sums = weights.layout.matrices(torch.zeros(weights.layout.size))
            segments.append(TrainSegment(32 * place, 32 * place + 32, weights, sums))
        x, slope = random(1, 64, 96, dtype=base.dtype), random(1, 64, 64, dtype=base.dtype, seed=1)
        x.requires_grad_()
        with base.routed(TrainerRouting(segments, base.device, products(base, EXACT), backward=True)):
            y = layer(x)
            with Seen() as seen:
                y.backward(slope)
        sums_made = [shapes for name, shapes in seen.calls if name == "aten::mm" and shapes[0][1] == 32]
        assert sums_made == [[(4, 32), (32, 64)]] * 2 + [[(96, 32), (32, 4)]] * 2
        others = [shapes for name, shapes in seen.calls if name.startswith("aten::mm") and shapes[0][1] != 32]
        assert len(others) == 8
        assert {shapes[0][0] for shapes in others} == {TILE}, "the way back through base and B"
        assert not [name for name, _ in seen.calls if name == "aten::bmm"]
