"""Attention through the cache against attention of whole sequences: equal bits; and what masks must keep out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from motet.model.attention import Span
from motet.model.attention.torch_metadata import cached_metadata, packed_metadata
from motet.model.kv_cache import KVCache
from tests.support.attention_cases import BLOCK, HEADS, WIDTH, attend, sequences, shared_blocks, sinks_of
from tests.support.live_memory import LiveMemory

pytestmark = pytest.mark.tier1

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("fold", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_decoding_equals_whole_sequences_bitwise(dtype, fold, window):
    states = sequences(dtype, HEADS * fold)
    whole = [
        attend(
            [torch.cat([each, each[-1:].expand(-len(each) % 4, -1, -1)]) for each in one],
            metadata=packed_metadata([len(one[0]), *([pad] if (pad := -len(one[0]) % 4) else [])], BLOCK, CPU),
            sliding_window=window,
        )[: len(one[0])]
        for one in states
    ]
    cache = KVCache(60, BLOCK, CPU)
    tables = shared_blocks(cache)
    for one, blocks in zip(states, tables, strict=True):
        rows = len(one[0]) - 1
        metadata = cached_metadata([Span(0, rows, blocks)], cache, CPU)
        attend([torch.cat([each[:rows], each[: -rows % 4]]) for each in one], metadata=metadata, sliding_window=window)
    last = [torch.stack([one[place][-1] for one in states]) for place in range(3)]
    metadata = cached_metadata(
        [Span(len(one[0]) - 1, 1, blocks) for one, blocks in zip(states, tables, strict=True)], cache, CPU
    )
    assert torch.equal(attend(last, metadata=metadata, sliding_window=window), torch.stack([one[-1] for one in whole]))


@pytest.mark.parametrize("position", [BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 2, 2 * BLOCK - 1])
@torch.inference_mode()
def test_keys_after_the_query_are_hidden_up_to_the_end_of_its_block(position):
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(4, heads, WIDTH, generator=generator) for heads in (4, HEADS, HEADS)]
    outputs = []
    for later in (0.0, 9.0):
        cache = KVCache(8, BLOCK, CPU)
        tables = [cache.take(2) for _ in range(4)]
        for pool in cache.layer(0, *states[1:]):
            rows = pool[torch.tensor(tables)].transpose(1, 2).flatten(2, 3)
            rows[:, :, position + 1 :] = later
            pool[torch.tensor(tables)] = rows.unflatten(2, (2, BLOCK)).transpose(1, 2)
        metadata = cached_metadata([Span(position, 1, blocks) for blocks in tables], cache, CPU)
        outputs.append(attend(states, metadata=metadata))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_hidden_key_is_replaced_whatever_it_holds(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, heads, WIDTH, generator=generator).to(dtype) for heads in (4, HEADS, HEADS))
    outputs = []
    for bad in (0.0, float("nan"), float("inf"), 1e30):
        cache = KVCache(4, BLOCK, CPU)
        blocks = [cache.take(1) for _ in range(4)]
        keys, _ = cache.layer(0, key, value)
        keys[[block for (block,) in blocks]] = bad
        outputs.append(
            attend([query, key, value], metadata=cached_metadata([Span(0, 1, b) for b in blocks], cache, CPU))
        )
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(outputs[0], value.repeat_interleave(2, dim=1))


@torch.inference_mode()
def test_scores_far_below_the_largest_weigh_nothing():
    query, value = torch.ones(4, HEADS, WIDTH), torch.eye(4)[:, None, :].repeat(1, HEADS, WIDTH // 4)
    key = torch.tensor([100.0, 0.0, -1e6, 50.0])[:, None, None].expand(4, HEADS, WIDTH).contiguous()
    output = attend([query, key, value], metadata=packed_metadata([4], BLOCK, CPU))
    assert torch.allclose(output, value[:1].expand_as(output), rtol=0, atol=1e-37)


@pytest.mark.parametrize("fold", [1, 3])
def test_sinks_take_their_share_of_the_softmax(fold):
    lengths, heads = [7, 50, 1], HEADS * fold
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), n, WIDTH, generator=generator) for n in (heads, HEADS, HEADS)]
    states = [each.requires_grad_() for each in states]
    output = attend(states, metadata=packed_metadata(lengths, BLOCK, CPU), s_aux=sinks_of(heads))
    plain = []
    for query, key, value in zip(
        *(each.double().transpose(0, 1).split(lengths, dim=1) for each in states), strict=True
    ):
        key, value = (each.repeat_interleave(fold, dim=0) for each in (key, value))
        score = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(
            ~torch.ones(2 * (query.shape[1],)).tril().bool(), -torch.inf
        )
        sink = sinks_of(heads)[:, None, None].expand(-1, query.shape[1], 1)
        plain.append(torch.cat([score, sink], dim=-1).softmax(-1)[..., :-1] @ value)
    expected = torch.cat(plain, dim=1).transpose(0, 1)
    assert torch.allclose(output.double(), expected, atol=1e-5)
    slope = torch.randn(output.shape, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad(output, states, slope), torch.autograd.grad(expected, states, slope.double()), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("lengths", [[7, 5, 31, 1], [64, 64], [50, 45, 70, 3]])
def test_gradients_equal_the_plain_formula(lengths):
    generator = torch.Generator().manual_seed(0)
    query, key, value, slope = (
        torch.randn(sum(lengths), heads, WIDTH, generator=generator) for heads in (4, HEADS, HEADS, 4)
    )
    states = [each.requires_grad_() for each in (query, key, value)]
    output = attend(states, metadata=packed_metadata(lengths, BLOCK, CPU))
    found = torch.autograd.grad(output, states, slope)
    cut = [each.double().transpose(0, 1).split(lengths, dim=1) for each in states]
    plain = [
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*cut, strict=True)
    ]
    expected = torch.cat(plain, dim=1).transpose(0, 1)
    assert torch.allclose(output.double(), expected, atol=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(expected, states, slope.double()), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_do_not_depend_on_how_far_company_pads(dtype):
    """Two tiles of query rows alone, three beside a longer sequence: one sum over all rows would have other bits."""
    generator = torch.Generator().manual_seed(0)
    lengths = [80, 100]
    states = [torch.randn(sum(lengths), heads, WIDTH, generator=generator).to(dtype) for heads in (6, HEADS, HEADS)]
    slope = torch.randn(sum(lengths), 6, WIDTH, generator=generator).to(dtype)

    def gradients(own: list[int]) -> tuple[Tensor, ...]:
        leaves = [each[: sum(own)].clone().requires_grad_() for each in states]
        output = attend(leaves, metadata=packed_metadata(own, 64, CPU))
        return torch.autograd.grad(output, leaves, slope[: sum(own)])

    for alone, together in zip(gradients(lengths[:1]), gradients(lengths), strict=True):
        assert torch.equal(alone, together[: lengths[0]])


@pytest.mark.parametrize(("window", "heads"), [(None, 32), (50, 4)])
def test_memory_grows_with_the_length_and_not_with_its_square(window, heads):
    """Of twice the length twice as much at most, beyond the scores of the shorter one, all of which are kept."""

    def most(length: int) -> int:
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(length, n, WIDTH, generator=generator) for n in (heads, HEADS, HEADS)]
        leaves = [each.requires_grad_(window is not None) for each in states]
        memory = LiveMemory()
        with memory:
            output = attend(leaves, metadata=packed_metadata([length], 64, CPU), sliding_window=window)
            if window is not None:
                output.sum().backward()
        return memory.most

    assert most(2048) < 2.1 * most(1024)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_scores_that_are_not_kept_are_the_same_when_they_are_made_again(dtype):
    """The last row of a sequence too long for all scores to be kept, against the same row decoded."""
    length, heads = 1536, 16
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(length, n, WIDTH, generator=generator).to(dtype) for n in (heads, HEADS, HEADS)]
    whole = attend(states, metadata=packed_metadata([length], 64, CPU), softcap=2.0)
    cache = KVCache(length // 64, 64, CPU)
    blocks = cache.take(length // 64)
    attend([each[:-1] for each in states], metadata=cached_metadata([Span(0, length - 1, blocks)], cache, CPU, 1))
    last = [each[-1:].expand(4, -1, -1) for each in states]
    metadata = cached_metadata([Span(length - 1, 1, blocks)], cache, CPU)
    assert torch.equal(attend(last, metadata=metadata, softcap=2.0)[0], whole[-1])
