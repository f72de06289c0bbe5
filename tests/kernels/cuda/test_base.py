"""Passes of covered bases by the kernels for GPUs: values near torch's, and bits that depend on a row's own sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401
from motet.model.attention import Prefix, Span
from motet.model.kv_cache import KVCache
from motet.model.lora import AdapterWeights
from motet.model.lora_model import LoraModel
from motet.model.routing import AdapterStacks, TrainerRouting, TrainSegment
from motet.model.unit_sums import UnitSums
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.cases import few

BOUND = 2e-5
"""Largest difference from torch's logits, as a share of the largest logit; both add in fp32, in other orders."""
LENGTHS = (22, 1, 6)


def third(place: int) -> list[str]:
    """Every third base, and the fast one: of three long tests, which share the kernels, each base is asked one."""
    return [*cuda.DENSE[place:-1:3], cuda.DENSE[-1]]


def adapters(base: LoraModel) -> list[AdapterWeights | None]:
    """Of different ranks and targets, and none, for sequences of `LENGTHS`."""
    some = cuda.targets(base, "v_proj", "o_proj", "up_proj")
    return [
        tiny.adapter(base, rank=18, targets=some, seed=1),
        None,
        tiny.adapter(base, rank=3, seed=2),
    ]


def sequences() -> list[Tensor]:
    return [tiny.tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def packed(base: LoraModel, members: list[AdapterWeights | None], ids: list[Tensor]) -> list[Tensor]:
    return tiny.packed_logits(base, list(zip(members, ids, strict=True)))


@torch.no_grad()
def through_cache(base: LoraModel, members: list[AdapterWeights | None], ids: list[Tensor], read: int) -> list[Tensor]:
    """Logits [T, V] of sequences whose first tokens are read `read` at a time, and whose last 4 are decoded; all together."""
    blocks = [-(-len(own) // base.block_size) for own in ids]
    cache = KVCache(sum(blocks), base.block_size, base.device)
    tables = [cache.take(n) for n in blocks]
    found: list[list[Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    while any(start < len(own) for start, own in zip(done, ids, strict=True)):
        spans, runs, tokens, taken, row = [], [], [], [], 0
        for place, own in enumerate(ids):
            left = len(own) - done[place]
            length = min(read, left - 4) if left > 4 else min(1, left)
            if length:
                spans.append(Span(done[place], length, tables[place]))
                runs.append((members[place], row, length))
                tokens.append(own[done[place] : done[place] + length])
                taken.append((place, length))
                done[place], row = done[place] + length, row + length
        given = base.pad(torch.cat(tokens).to(base.device))
        with base.routed(AdapterStacks(base.products).routing(runs, base.device)):
            hidden = base.hidden(given, torch.zeros_like(given), base.attention.cached(spans, cache))
        logits = base.logits(hidden)[:row].split([length for _, length in taken])
        for (place, _), own_logits in zip(taken, logits, strict=True):
            found[place].append(own_logits)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("name", few(cuda.DENSE, "qwen3"))
def test_logits_are_near_those_of_torch_with_adapters_and_without(name: str) -> None:
    stock, own = tiny.base(name), cuda.base(name)
    theirs, ours = (torch.cat(packed(base, adapters(base), sequences())).cpu() for base in (stock, own))
    assert float((theirs - ours).abs().max()) <= BOUND * float(theirs.abs().max())


@pytest.mark.parametrize("name", few(third(0), "llama_long"))
def test_reading_in_chunks_and_decoding_give_the_bits_of_a_packed_pass(name: str) -> None:
    base, ids = cuda.base(name), sequences()
    members = adapters(base)
    whole = packed(base, members, ids)
    for together, by_cache in zip(whole, through_cache(base, members, ids, 13), strict=True):
        assert torch.equal(together, by_cache)


@pytest.mark.parametrize("name", few(third(1), "llama_long"))
def test_company_changes_no_bit_and_nan_and_inf_stay_with_their_adapter(name: str) -> None:
    base, ids = cuda.base(name), sequences()
    members = adapters(base)
    together = packed(base, members, ids)
    for place, own in enumerate(ids[1:], 1):
        assert torch.equal(packed(base, [members[place]], [own])[0], together[place])
    for wrong in (float("nan"), float("inf")):
        bad = tiny.adapter(base, rank=7, seed=4)
        bad.flat.fill_(wrong)
        crowd = packed(base, [bad, *members, bad], [ids[2], *ids, ids[1]])
        assert not crowd[0].isfinite().any()
        for own, other in zip(crowd[1:-1], together, strict=True):
            assert torch.equal(own, other)


@torch.no_grad()
def test_forks_of_a_prompt_have_the_bits_of_whole_sequences() -> None:
    base = cuda.base("llama_long")
    weights = tiny.adapter(base, rank=5)
    prompt, rests = tiny.tokens(21), [tiny.tokens(7, 1), tiny.tokens(4, 2)]
    with base.routed(AdapterStacks(base.products).routing([(weights, 0, 32)], base.device)):
        positions = torch.zeros(32, dtype=torch.long, device=base.device)
        attention = base.attention.packed([21, 7, 4], [None, Prefix(0, 21), Prefix(0, 21)])
        forked = base.hidden(torch.cat([prompt, *rests]).to(base.device), positions, attention)
    wholes = packed(base, [weights, weights], [torch.cat([prompt, rest]) for rest in rests])
    for whole, rest, rows in zip(wholes, rests, (slice(21, 28), slice(28, 32)), strict=True):
        assert torch.equal(base.logits(forked[rows]), whole[-len(rest) :])


@pytest.mark.parametrize("name", few(third(2), "llama_long"))
def test_training_has_the_bits_of_sampling_and_the_gradients_of_torch(name: str) -> None:
    """The second sequence continues the first, its prompt."""
    stock, own = tiny.base(name), cuda.base(name)
    lengths, ids = (12, 8, 4), torch.cat([tiny.tokens(20), tiny.tokens(4, 1)])
    positions = torch.cat([torch.arange(20), torch.arange(4)])
    some = cuda.targets(own, "o_proj", "down_proj")
    found = []
    for base in (stock, own):
        first, second = tiny.adapter(base, rank=3, seed=1), tiny.adapter(base, rank=18, targets=some, seed=2)
        both = [UnitSums.empty(weights.layout.size, base.device) for weights in (first, second)]
        segments = [
            TrainSegment(start, stop, weights, weights.layout.matrices(sums.flat), sums=sums)
            for start, stop, weights, sums in zip((0, 20), (20, 24), (first, second), both, strict=True)
        ]
        routing = TrainerRouting(segments, base.device, base.products, backward=True)
        with base.routed(routing):
            attention = base.attention.packed(lengths, [None, Prefix(0, 12), None])
            hidden = base.hidden(ids.to(base.device), positions.to(base.device), attention)
            slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
            (hidden * slope.to(base.device)).sum().backward()
        found.append((base.logits(hidden.detach()), [sums.total().cpu() for sums in both]))
    (_, theirs), (logits, ours) = found
    sampled = packed(own, [first, second], list(ids.split([20, 4])))
    assert torch.equal(logits, torch.cat(sampled))
    for their, our in zip(theirs, ours, strict=True):
        assert float(their.abs().max()) > 0
        assert float((their - our).abs().max()) <= 5 * BOUND * float(their.abs().max())
