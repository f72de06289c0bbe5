"""Adapters of every kind of rank side by side, and very many of them: values and gradients near those of torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny

BASE = "llama_long"
RANKS = (1, 2, 3, 5, 8, 16, 17, 32, 64, 127, 128, 256)
BOUND = 1e-4
"""Largest difference from torch, as a share of the largest value; both add in fp32, in other orders."""


def trained(base: LoraModel, members: Sequence[AdapterWeights], n_rows: int) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of a sequence for each adapter, and the gradients of all."""
    sums = [UnitSums.empty(weights.layout.size, base.device) for weights in members]
    segments = [
        TrainSegment(n * n_rows, (n + 1) * n_rows, weights, weights.layout.matrices(own.flat), sums=own)
        for n, (weights, own) in enumerate(zip(members, sums, strict=True))
    ]
    ids = torch.cat([tiny.tokens(n_rows, seed) for seed in range(len(members))]).to(base.device)
    positions = torch.arange(n_rows, device=base.device).repeat(len(members))
    with base.routed(TrainerRouting(segments, base.device, base.products, backward=True)):
        hidden = base.hidden(ids, positions, base.attention.packed([n_rows] * len(members)))
        slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        (hidden * slope.to(base.device)).sum().backward()
    return hidden.detach().cpu(), [own.total().cpu() for own in sums]


def near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= BOUND * float(other.abs().max())


@pytest.mark.soak
def test_every_rank_has_the_values_and_gradients_of_torch() -> None:
    """All ranks in one pass; rows of a multiple of four, as torch's path needs them."""
    found = []
    for base in (cuda.base(BASE), tiny.base(BASE)):
        members = [tiny.adapter(base, rank=rank, seed=rank) for rank in RANKS]
        found.append(trained(base, members, 4))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert near(ours, theirs)
    for rank, own, other, weights in zip(RANKS, our_gradients, their_gradients, members, strict=True):
        parts = zip(weights.layout.matrices(own).items(), weights.layout.matrices(other).values(), strict=True)
        for (leader, mine), its in parts:
            for which, (one, two) in {"A": (mine.a, its.a), "B": (mine.bs[0][1], its.bs[0][1])}.items():
                assert two.any(), (rank, leader, which)
                assert near(one, two), (rank, leader, which)


@pytest.mark.soak
def test_two_thousand_adapters_in_a_batch_each_have_the_bits_that_they_have_alone() -> None:
    """And of some of them torch's values; a row for each adapter."""
    base, stock = cuda.base(BASE), tiny.base(BASE)
    members = [tiny.adapter(base, rank=1 + seed % 3, seed=seed) for seed in range(2000)]
    ids = [tiny.tokens(1, seed) for seed in range(2000)]
    together = tiny.packed_logits(base, list(zip(members, ids, strict=True)))
    assert len(together) == 2000
    for place in (0, 1, 777, 1999):
        (alone,) = tiny.packed_logits(base, [(members[place], ids[place])])
        assert torch.equal(alone, together[place])
        its = tiny.adapter(stock, rank=1 + place % 3, seed=place)
        assert near(together[place].cpu(), tiny.packed_logits(stock, [(its, ids[place])])[0].cpu())
