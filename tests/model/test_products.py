"""Products with adapters, alone and in company, over every rank, width, type and number of neighbours: not one bit differs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet.model.arithmetic import Arithmetic, least_rows
from motet.model.frozen_weight import FrozenWeight
from motet.model.lora import AdapterLayout, AdapterWeights, FusedLinears, make_layout
from motet.model.lora_products import PaddedProducts
from motet.model.routing import AdapterStacks, TrainerRouting, TrainSegment
from tests.support.cases import few

CPU = torch.device("cpu")
WIDTHS = (20, 36, 64, 72, 96, 100, 128, 192, 256, 384, 576, 1536)
SCANNED = 4 * 10**5
MOST_ROWS = 9 * 64
"""Of all adapters of a case."""


@dataclass(frozen=True)
class Case:
    """Adapters on one family of linear layers, each with so many rows; the first is looked at alone, too."""

    rank: int
    dtype: torch.dtype
    n_in: int
    n_outs: tuple[int, ...]
    lengths: tuple[int, ...]
    seed: int = 0

    def fused(self) -> FusedLinears:
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(sum(self.n_outs), self.n_in, generator=generator).to(self.dtype)
        frozen = FrozenWeight(weight, None)
        frozen.compute_with(self.arithmetic)
        return FusedLinears(tuple(f"layer.{place}" for place in range(len(self.n_outs))), frozen, self.n_outs)

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.of(CPU, self.dtype, experts=False)

    def layout(self, fused: FusedLinears) -> AdapterLayout:
        linears = {path: (self.n_in, n_out) for path, n_out in zip(fused.paths, self.n_outs, strict=True)}
        return make_layout(linears, self.rank, [fused.paths])

    def adapters(self, layout: AdapterLayout) -> list[AdapterWeights]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        masters = [torch.randn(layout.size, generator=generator) for _ in self.lengths]
        return [AdapterWeights.from_masters(layout, 0.5, each, self.dtype) for each in masters]

    def rows(self, width: int, seed: int) -> Tensor:
        """[1, T, width], T a multiple of four."""
        total = sum(self.lengths)
        generator = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn(1, total + -total % 4, width, generator=generator).to(self.dtype)


def sampled(case: Case, fused: FusedLinears, adapters: list[AdapterWeights], members: int) -> Tensor:
    """Rows of the first adapter, beside so many of the adapters."""
    runs, start = [], 0
    for weights, length in zip(adapters[:members], case.lengths, strict=False):
        runs.append((weights, start, length))
        start += length
    x = case.rows(case.n_in, seed=2)[:, : start + -start % 4]
    routing = AdapterStacks(PaddedProducts(case.dtype, case.arithmetic)).routing(runs, CPU)
    return torch.cat(routing.linear(fused, x), dim=-1)[0, : case.lengths[0]]


def trained(case: Case, fused: FusedLinears, adapters: list[AdapterWeights], members: int) -> tuple[Tensor, ...]:
    """Rows, gradient of the rows, and gradients of the first adapter, beside so many of the adapters."""
    segments, start, arenas = [], 0, []
    for weights, length in zip(adapters[:members], case.lengths, strict=False):
        arenas.append(torch.zeros(weights.layout.size))
        stop = start + length + -length % 4
        segments.append(TrainSegment(start, stop, weights, weights.layout.matrices(arenas[-1])))
        start = stop
    room = case.lengths[0] + -case.lengths[0] % 4
    generator = torch.Generator().manual_seed(case.seed + 3)
    x, slope = (torch.randn(1, MOST_ROWS, width, generator=generator) for width in (case.n_in, sum(case.n_outs)))
    x = x[:, :start].to(case.dtype).requires_grad_()
    y = torch.cat(
        TrainerRouting(segments, CPU, PaddedProducts(case.dtype, case.arithmetic), backward=True).linear(fused, x),
        dim=-1,
    )
    y.backward(slope[:, :start].to(case.dtype))
    assert x.grad is not None
    return y[0, :room], x.grad[0, :room], arenas[0]


def differing(case: Case) -> list[str]:
    """What of the first adapter has other bits beside the others than alone."""
    fused = case.fused()
    adapters = case.adapters(case.layout(fused))
    found = []
    if not torch.equal(sampled(case, fused, adapters, 1), sampled(case, fused, adapters, len(adapters))):
        found.append("sampled rows")
    alone, beside = (trained(case, fused, adapters, members) for members in (1, len(adapters)))
    names = ("trained rows", "gradient of rows", "gradient of the adapter")
    return found + [name for name, a, b in zip(names, alone, beside, strict=True) if not torch.equal(a, b)]


LENGTH = st.sampled_from((1, 2, 3, 4, 7, 8, 16, 33, 64))


@pytest.mark.parametrize("threads", few([1, 2, 4, 5], 1, 4, 5))
@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        rank=st.integers(1, 33),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        n_in=st.sampled_from(WIDTHS),
        n_outs=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3).map(tuple),
        lengths=st.lists(LENGTH, min_size=2, max_size=MOST_ROWS // 64).map(tuple),
        seed=st.integers(0, 10**6),
    )
)
@example(Case(1, torch.float32, 64, (96,), (4, 16, 16)))
@example(Case(2, torch.bfloat16, 256, (128, 128), (4, 4, 4, 4)))
@example(Case(20, torch.float32, 192, (1536,), (33, 4, 16)))
@example(Case(7, torch.float32, 64, (96,), (64, 64, 64)))
@example(Case(8, torch.bfloat16, 576, (576, 1536), (1, 33, 16)))
@example(Case(3, torch.float32, 64, (100, 36), (12, 236)))
def test_company_changes_no_bit_of_any_product(threads: int, case: Case):
    torch.set_num_threads(threads)
    assert not differing(case)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 400), (torch.bfloat16, 4097), (torch.float16, 4097)])
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 1), (4, 24), (20, 20), (32, 32), (5, 205), (64, 64), (4, 10**6), (10**3, 10**3)]
)
def test_every_product_is_large_enough_to_be_a_gemm_by_itself(shape, dtype, most):
    """And, not in float32, to be multiplied by units for matrices where there are such."""
    rows, per_row, shortest = (
        least_rows(shape[0], shape[1], dtype),
        shape[0] * shape[1],
        1 if dtype == torch.float32 else 64,
    )
    assert rows % 4 == 0
    assert rows * per_row >= most
    assert rows * min(shape) >= shortest
    assert rows == 4 or (rows - 4) * per_row < most or (rows - 4) * min(shape) < shortest


@pytest.mark.soak
@pytest.mark.parametrize("threads", [1, 2, 4, 5, 16])
def test_a_long_scan_of_small_ranks_finds_no_bit(threads):
    """Mostly ranks 1 to 8, where torch's thresholds are; products are counted until there were enough of them."""
    draw, counted, found = random.Random(threads), 0, []
    torch.set_num_threads(threads)
    while counted < SCANNED:
        lengths = tuple(draw.choice((1, 2, 4, 5, 8, 12, 32)) for _ in range(draw.randint(2, 16)))
        n_outs = tuple(draw.choice(WIDTHS) for _ in range(draw.randint(1, 3)))
        dtype = draw.choice((torch.float32, torch.bfloat16))
        case = Case(
            draw.choice((*range(1, 9), 12, 19, 24, 33)),
            dtype,
            draw.choice(WIDTHS),
            n_outs,
            lengths,
            draw.randint(0, 10**6),
        )
        found += [(case, what) for what in differing(case)]
        counted += len(lengths) * (1 + len(n_outs)) * 4  # forward twice, the rows' gradient, the adapter's
    print(f"{counted:,} products, {len(found)} differ")
    assert not found
