"""Gradients by the kernels for GPUs: equal to autograd's, and the same bits in every company, order and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.core.batch import Batch
from motet.kernels.cuda.adapters import AdapterTables, runs_of
from motet.kernels.cuda.attention import CudaPass
from motet.kernels.cuda.base import CudaBase
from motet.kernels.cuda.forward import DOWN, DecoderForward, KeptLayer, LayerValues
from motet.kernels.cuda.kernels.gates import gate_and_up, gate_and_up_back
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.product_backends import table_for
from motet.kernels.cuda.products import Products
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums
from tests.support import cuda_bases as cuda
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.critics import critic_trainer, value_segment
from tests.support.segments import ADAMW, gradient, make_samples, make_segment, make_trainer, masters
from tests.support.triton_on_cpu import Matrix, in_order, multiplied_by

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
DEVICE = tests.support.triton_on_cpu.DEVICE
NEAR = 3.0
"""The error of a bfloat16 pass in units of that of torch's, both beside fp32: Triton's interpreter cuts bits off that a card
rounds, which doubles the error."""


@dataclass(frozen=True)
class Trained:
    """An adapter, and sequences by length and seed."""

    weights: AdapterWeights
    sequences: Sequence[tuple[int, int]]


def add(base: LoraModel, *given: tuple[Trained, UnitSums], factor: float = 1.0, zeros: int = 0) -> None:
    """One pass. Slopes of hidden states are by seed; those of the last `zeros` sequences are zeros."""
    ids, slopes, lengths, segments = list[Tensor](), list[Tensor](), list[int](), list[TrainSegment]()
    for trained, sums in given:
        start = sum(lengths)
        for length, seed in trained.sequences:
            ids.append(tiny.tokens(length, seed))
            numbers = torch.randn(length, base.info.hidden_size, generator=torch.Generator().manual_seed(seed))
            slopes.append(numbers.bfloat16().float() * factor)
            lengths.append(length)
        segments.append(TrainSegment(start, sum(lengths), trained.weights, None, sums=sums))
    for index in range(len(slopes) - zeros, len(slopes)):
        slopes[index] *= 0
    routing = TrainerRouting(segments, base.device, base.products, backward=True)
    with base.routed(routing):
        token_ids = torch.cat(ids).to(base.device)
        hidden = base.hidden(token_ids, torch.zeros_like(token_ids), base.attention.packed(lengths))
        (hidden * torch.cat(slopes).to(base.device, hidden.dtype)).sum().backward()


def sums_of(trained: Trained) -> UnitSums:
    return UnitSums.empty(trained.weights.layout.size, DEVICE)


def alone(base: LoraModel, trained: Trained) -> UnitSums:
    sums = sums_of(trained)
    add(base, (trained, sums))
    return sums


def equal(one: UnitSums, other: UnitSums) -> bool:
    return torch.equal(one.flat, other.flat) and torch.equal(one.largest, other.largest)


def two(base: LoraModel) -> tuple[Trained, Trained]:
    first = Trained(tiny.adapter(base, rank=18, seed=1), [(9, 1), (70, 2), (1, 3)])
    some = cuda.targets(base, "v_proj", "o_proj", "up_proj")
    return first, Trained(tiny.adapter(base, rank=3, targets=some, seed=2), [(5, 4)])


def by_sixteen(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    """As a tensor core multiplies, which adds 16 products before it adds them to the sum: so it matters where a sum begins."""
    for first in range(0, len(right), 16):
        step = slice(first, first + 16)
        total = total + in_order(left[:, step], right[step], np.zeros_like(total))
    return total


def test_company_order_and_cuts_change_no_bit() -> None:
    with multiplied_by(by_sixteen):
        in_company_and_alone(cuda.base("llama_long"))


def in_company_and_alone(base: LoraModel) -> None:
    first, second = two(base)
    whole, other = alone(base, first), alone(base, second)
    assert whole.flat.any()
    assert other.flat.any()
    together = sums_of(first), sums_of(second)
    again = Trained(first.weights, [first.sequences[2], first.sequences[0]])
    add(base, (second, together[1]), (again, together[0]))
    add(base, (Trained(first.weights, first.sequences[1:2]), together[0]))
    assert equal(together[0], whole)
    assert equal(together[1], other)


def test_gradients_depend_on_the_blocks_that_are_read_and_not_on_those_of_the_load() -> None:
    changed, made = (cuda.load("llama_long") for _ in range(2))
    trained = Trained(tiny.adapter(changed, rank=3), [(40, 1)])
    before = alone(changed, trained)
    changed.read_keys_in_blocks(64)
    made.kernels = None
    made.read_keys_in_blocks(64)
    made.kernels = CudaBase(made, lambda _: cuda.own(changed).products)
    made.attention = made.kernels.attention
    found = alone(changed, trained)
    assert equal(found, alone(made, trained))
    assert not equal(found, before)


def test_padding_adds_nothing() -> None:
    base = cuda.base("llama_long")
    _, second = two(base)
    padded = sums_of(second)
    add(base, (Trained(second.weights, [*second.sequences, (3, 9)]), padded), zeros=1)
    assert equal(padded, alone(base, second))


@pytest.mark.parametrize("wrong", [float("nan"), 1e30])
def test_what_does_not_fit_is_not_finite_and_stays_with_its_adapter(wrong: float) -> None:
    base = cuda.base("llama_long")
    first, second = two(base)
    short = Trained(first.weights, first.sequences[:1])
    bad, good = sums_of(short), sums_of(second)
    add(base, (short, bad), factor=wrong)
    add(base, (short, bad), (second, good))
    assert bad.total().isnan().all()
    assert equal(good, alone(base, second))
    assert good.total().isfinite().all()


def test_a_nan_of_a_neighbour_in_the_same_pass_stays_with_it() -> None:
    base = cuda.base("llama_long")
    first, second = two(base)
    first.weights.flat.fill_(float("nan"))
    bad, good = sums_of(first), sums_of(second)
    add(base, (replace(first, sequences=first.sequences[:1]), bad), (second, good))
    assert bad.total().isnan().all()
    assert equal(good, alone(base, second))


def test_sums_that_might_not_fit_are_not_finite() -> None:
    sums = UnitSums(torch.tensor([3 << 60]), torch.tensor([1 << 61]), 3)
    assert sums.total().isfinite().all()
    sums.n_units = 4
    assert sums.total().isnan().all()


def test_a_bfloat16_pass_is_as_near_to_fp32_as_that_of_torch() -> None:
    """With the same weights; sequences of unequal lengths, two adapters."""
    base, torchs = (tiny.load("llama_long", "bfloat16", DEVICE.type) for _ in range(2))
    wide = tiny.load("llama_long", "float32", DEVICE.type)
    base.kernels = kernels = CudaBase(base, lambda _: cuda.own(cuda.base("llama_long")).products)
    base.attention = kernels.attention
    for parameter in wide.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    members = two(base)
    sums = [sums_of(trained) for trained in members]
    add(base, *zip(members, sums, strict=True))
    for trained, own in zip(members, sums, strict=True):
        weights = trained.weights
        exact = by_autograd(wide, replace(trained, weights=replace(weights, flat=weights.flat.float())))
        theirs = by_autograd(torchs, trained)
        assert float((own.total() - exact).norm()) <= NEAR * float((theirs - exact).norm())


@pytest.mark.parametrize("name", few(cuda.DENSE))
def test_an_fp16_pass_is_as_near_to_fp32_as_that_of_torch(name: str) -> None:
    """Of each family; beside fp32 with the same numbers."""
    base, torchs, wide = (tiny.load(name, device=DEVICE.type) for _ in range(3))
    for one in (base, torchs):
        one.model.half()
        one.dtype = torch.float16
    wide.model.half().float()
    base.compute_with(replace(base.arithmetic, rows=1))
    base.kernels = kernels = CudaBase(base, lambda _: Products(table_for(DEVICE, torch.float16)))
    base.attention = kernels.attention
    trained = Trained(tiny.adapter(base, rank=18, seed=1), [(12, 0), (20, 1)])
    exact = by_autograd(wide, replace(trained, weights=replace(trained.weights, flat=trained.weights.flat.float())))
    ours, theirs = (
        float((found.cpu() - exact.cpu()).norm() / exact.norm())
        for found in (alone(base, trained).total(), by_autograd(torchs, trained))
    )
    print(f"{name}: relative error {ours:.4f}, of torch {theirs:.4f}")
    assert ours <= min(1.25 * theirs, 0.01)


def by_autograd(base: LoraModel, trained: Trained) -> Tensor:
    """The gradient by torch's layers."""
    flat = torch.zeros(trained.weights.layout.size, device=base.device)
    for length, seed in trained.sequences:
        segment = TrainSegment(0, length, trained.weights, trained.weights.layout.matrices(flat))
        with base.routed(TrainerRouting([segment], base.device, base.products, backward=True)):
            ids = tiny.tokens(length, seed).to(base.device)
            hidden = base.hidden(ids, torch.arange(length, device=base.device), base.attention.packed([length]))
            numbers = torch.randn(length, base.info.hidden_size, generator=torch.Generator().manual_seed(seed))
            (hidden * numbers.to(base.device).bfloat16().to(hidden.dtype)).sum().backward()
    return flat


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_layer_is_computed_again_with_the_same_bits(name: str) -> None:
    """From its input alone, or from the products that were kept; in families with four norms too."""
    base = cuda.base(name)
    own, ids = cuda.own(base), tiny.tokens(20).to(DEVICE)
    segment = TrainSegment(0, 12, tiny.adapter(base, rank=3), None)
    routing = TrainerRouting([segment], base.device, base.products, backward=False)
    attention = own.attention.packed([12, 8])
    assert isinstance(attention, CudaPass)
    kept: list[KeptLayer] = []
    tables = AdapterTables.of(own.places, runs_of(routing), 20, base.device)
    own.decode(ids, attention, tables, kept)
    again = DecoderForward(own.plan, own.products, attention, tables, [])
    for index, layer in enumerate(own.plan.layers[:-1]):
        whole, done = again.again(index, kept[index])
        few, done_again = again.again(index, KeptLayer(kept[index].x_TD))
        for field in fields(LayerValues):
            if field.name in ("keys", "values"):
                continue  # parts of blocks are memory that nobody wrote
            assert same(getattr(whole, field.name), getattr(few, field.name)), field.name
        assert same(done, done_again)
        again._add(index, DOWN, again._product(index, layer, DOWN, few.gated_TI), layer.norm_done)
        again._normed(own.plan.layers[index + 1].norm_in)
        assert torch.equal(again.x, kept[index + 1].x_TD)


@pytest.mark.parametrize(
    ("name", "again"), few([("llama_long", 7), ("llama", 7), ("gemma2", 9), ("olmo2", 9)], ("llama_long", 7))
)
def test_a_pass_over_the_limit_alone_computes_its_layers_again_with_the_same_bits(name: str, again: int) -> None:
    """42 launches a layer in place of 35, or 48 in place of 39; a pass within the limit takes what it took."""
    base, launches, found = cuda.base(name), list[int](), list[Tensor]()
    n_layers = len(cuda.own(base).plan.layers)
    for kept_tokens in (None, 12):
        trainer = make_trainer(base, "a", kept_tokens=kept_tokens)
        for length in (12, 13):
            segment = replace(make_segment("a"), samples=make_samples([(4, length - 4)], seed=1))
            with count() as made:
                trainer.forward_backward(Batch((segment,)))
            launches.append(made.total())
        found.append(gradient(trainer, "a"))
    assert torch.equal(*found)
    assert found[0].any()
    assert [more - less for less, more in zip(launches[:2], launches[2:], strict=True)] == [0, again * n_layers]


@pytest.mark.parametrize("tanh", [False, True])
def test_the_gate_is_rounded_again_as_in_the_forward_pass(tanh: bool) -> None:
    """So the gradient of its factor is exactly that of what the pass computed."""
    both = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    tiles = torch.cat([torch.tensor([-1]), torch.arange(16)])[None].int().to(DEVICE)
    n_tiles = torch.ones(1, dtype=torch.int32, device=DEVICE)
    nothing = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    inner = torch.zeros(16, device=DEVICE)
    tables = tiles, n_tiles, nothing, inner, 16, 0
    shape = {"WIDTH": 20, "TANH": tanh, "BLOCK": 32, "STRIDE": 20, "ENTRY": 7, "PIECES": 1, "ALIGNED": False}
    ones = torch.cat([both[:, :20], torch.ones_like(both[:, :20])], 1)
    gate, out = torch.empty(16, 20, device=DEVICE).half(), torch.empty_like(both)
    gate_and_up[(1, 1)](ones, gate, *tables, **shape)
    slope = torch.randn(16, 20, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    gate_and_up_back[(1, 1)](both, slope, slope, out, *tables, nothing, 0, AFTER=5, **shape)
    assert torch.equal(out[:, 20:], (slope.float() * gate.float()).half())
    x = both[:, :20].float().requires_grad_()
    function = torch.nn.functional.gelu(x, approximate="tanh") if tanh else torch.nn.functional.silu(x)
    (function * both[:, 20:] * slope).sum().backward()
    assert x.grad is not None
    assert torch.allclose(out[:, :20].float(), x.grad, rtol=2e-3, atol=1e-4)


def test_a_trainer_has_the_gradients_of_torch() -> None:
    """Of two adapters in one batch, whose samples have unequal lengths."""
    batch = Batch(tuple(replace(one, samples=one.samples[:2]) for one in (make_segment("c"), make_segment("a"))))
    stock, own = (make_trainer(base, "ac") for base in (tiny.base("llama_long"), cuda.base("llama_long")))
    losses = [[trained.stats.loss for trained in trainer.forward_backward(batch)] for trainer in (stock, own)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in "ac":
        theirs, ours = gradient(stock, name), gradient(own, name).cpu()
        assert float((theirs - ours).abs().max()) <= 1e-4 * float(theirs.abs().max())


def test_a_critics_head_is_added_as_whole_numbers_too(tmp_path: Path) -> None:
    """As torch computes it; cuts, orders, parking and a saved gradient change no bit, and there is no gradient in fp32."""
    whole, cut, stock = (critic_trainer(base) for base in (*[cuda.base("llama_long")] * 2, tiny.base("llama_long")))
    segment = value_segment()
    values = [found.tobytes() for found in whole.forward(Batch((segment,)))[0]]
    (trained,), _ = (each.forward_backward(Batch((segment,))) for each in (whole, stock))
    assert [found.tobytes() for found in trained.logprobs] == values
    for index in (2, 0, 1):
        cut.forward_backward(Batch((replace(segment, samples=(segment.samples[index],)),)))
        arena = inside.arena(cut, "a")
        assert arena._gradient is None
        arena.park(None)
        assert arena.parked == 3, "masters, and the sums in two"
        arena.bring_in()
        cut.save_adapter("a", tmp_path, optimizer=True)
        cut.load_adapter("a", tmp_path, optimizer=True)
    size, (ours, again, theirs) = arena.layout.size, (gradient(each, "a").cpu() for each in (whole, cut, stock))
    assert torch.equal(ours, again)
    assert inside.arena(whole, "a").sums.n_units == arena.sums.n_units == 3
    assert float((ours - theirs)[size:].abs().max()) <= 1e-4 * float(theirs[size:].abs().max())


def test_a_value_does_not_depend_on_the_order_in_which_its_products_are_added() -> None:
    """So it has the same bits in any number of rows, for which a library adds in other orders."""
    hidden, head = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 301)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    found = CudaMath().values(hidden, head)
    assert torch.equal(found, CudaMath().values(hidden[:, order], torch.cat([head[order], head[-1:]])))
    assert torch.allclose(found, hidden @ head[:-1] + head[-1], atol=1e-5)


def test_cuts_parking_and_a_saved_gradient_change_no_bit_of_a_step(tmp_path: Path) -> None:
    """One batch of all samples, or batches of single ones in another order; between these the adapter is parked and saved."""
    base, segment = cuda.base("llama_long"), make_segment("c")
    samples = [segment.samples[index] for index in (0, 1, 3)]
    whole, cut, other = (make_trainer(base, "c") for _ in range(3))
    whole.forward_backward(Batch((replace(segment, samples=tuple(samples)),)))
    for trainer, index in ((cut, 2), (cut, 0), (other, 1)):
        if trainer is other:
            inside.arena(cut, "c").park(tmp_path)
            inside.arena(cut, "c").bring_in()
            cut.save_adapter("c", tmp_path, optimizer=True)
            other.load_adapter("c", tmp_path, optimizer=True)
        trainer.forward_backward(Batch((replace(segment, samples=(samples[index],)),)))
    assert gradient(whole, "c").any()
    assert torch.equal(gradient(whole, "c"), gradient(other, "c"))
    assert inside.arena(whole, "c").sums.n_units == inside.arena(other, "c").sums.n_units == 3
    norms = [trainer.optim_step("c", ADAMW).grad_norm for trainer in (whole, other)]
    assert norms[0] == norms[1] > 0
    assert torch.equal(masters(whole, "c"), masters(other, "c"))
