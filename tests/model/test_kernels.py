"""Attention by kernels: the results of torch's products, equal bits however a sequence is cut, and what must stay out.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet.model.attention import Prefix, Span, torch_metadata
from motet.model.attention.triton_metadata import TILE_KEYS, TritonMetadata, cached_metadata, packed_metadata
from motet.model.kv_cache import KVCache
from tests.support.attention_cases import BLOCK, sinks_of
from tests.support.attention_cases import attend as attend_in_torch
from tests.support.cases import few
from tests.support.kernel_cases import (
    DEVICE,
    LENGTHS,
    PREFIXES,
    alone_and_in_company,
    attend,
    decoded_and_whole,
    random,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN


def gradients(output: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
    """Of queries, keys and values, with other slopes for every row."""
    (slope,) = random(len(output), output.shape[1], width=output.shape[2], seed=1)
    return torch.autograd.grad(output, states, slope.to(output.dtype))


@pytest.mark.parametrize(
    ("fold", "n_kv", "width", "window", "softcap", "sinks"),
    few(
        [
            (1, 2, 16, None, None, False),
            (3, 1, 24, 21, None, True),
            (4, 1, 16, None, 2.0, False),
            (4, 2, 24, 50, 2.0, True),
            (3, 1, 136, None, None, False),
        ],
        (3, 1, 24, 21, None, True),
        (4, 2, 24, 50, 2.0, True),
        (3, 1, 136, None, None, False),
    ),
)
def test_packed_sequences_and_their_gradients_equal_the_products_of_torch(fold, n_kv, width, window, softcap, sinks):
    states = [each.requires_grad_() for each in random(sum(LENGTHS), fold * n_kv, n_kv, n_kv, width=width)]
    sinks_H = sinks_of(fold * n_kv).to(DEVICE) if sinks else None
    output = attend(packed_metadata(LENGTHS, DEVICE, PREFIXES), states, window, softcap, sinks_H)
    metadata = torch_metadata.packed_metadata(LENGTHS, BLOCK, DEVICE, PREFIXES)
    options = {"sliding_window": window, "softcap": softcap, "s_aux": sinks_H}
    expected = attend_in_torch(states, metadata=metadata, **options)
    assert torch.allclose(output, expected, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients(output, states), gradients(expected, states), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_gradients_equal_the_plain_formula():
    states = [each.requires_grad_() for each in random(100, 4, 2, 2)]
    output = attend(packed_metadata([30, 70], DEVICE), states)
    cut = [each.double().transpose(0, 1).split([30, 70], dim=1) for each in states]
    plain = [
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for q, k, v in zip(*cut, strict=True)
    ]
    expected = torch.cat(plain, dim=1).transpose(0, 1)
    for ours, theirs in zip(gradients(output, states), gradients(expected, states), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_size", [16, 24])
@torch.inference_mode()
def test_prefilled_and_decoded_rows_equal_the_products_of_torch(block_size):
    outputs = []
    pairs: list[tuple[Callable[..., Any], Callable[..., Tensor]]] = [
        (cached_metadata, attend),
        (torch_metadata.cached_metadata, lambda metadata, states: attend_in_torch(states, metadata=metadata)),
    ]
    for make, run in pairs:
        cache = KVCache(20, block_size, DEVICE)
        blocks = [cache.take(-(-length // block_size)) for length in (80, 7)]
        prompts, rests = [
            [Span(start, length, own) for start, length, own in zip(starts, lengths, blocks, strict=True)]
            for starts, lengths in (((0, 0), (70, 6)), ((70, 6), (1, 1)))
        ]
        prefilled = run(make(prompts, cache, DEVICE), random(76, 4, 2, 2))
        outputs.append([prefilled, run(make(rests, cache, DEVICE), random(4, 4, 2, 2, seed=2))[:2]])
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "fold", "window"),
    few(
        [
            (torch.float32, 1, None),
            (torch.float32, 3, 21),
            (torch.bfloat16, 1, None),
            (torch.bfloat16, 4, None),
        ],
        (torch.float32, 3, 21),
        (torch.bfloat16, 1, None),
    ),
)
def test_decoding_equals_whole_sequences_bitwise(dtype, fold, window):
    for decoded, whole in decoded_and_whole(dtype, fold, window):
        assert torch.equal(decoded, whole)


@torch.inference_mode()
def test_a_sequence_decoded_from_its_first_token_equals_the_whole_bitwise():
    states = random(TILE_KEYS + 5, 3, 1, 1)
    whole = attend(packed_metadata([len(states[0])], DEVICE), states, 20)
    cache = KVCache(5, BLOCK, DEVICE)
    blocks = cache.take(5)
    decoded = [
        attend(
            cached_metadata([Span(position, 1, blocks)], cache, DEVICE),
            [each[position, None] for each in states],
            20,
        )
        for position in range(len(whole))
    ]
    assert torch.equal(torch.cat(decoded), whole)


def test_a_shared_prompt_gives_the_rows_of_whole_sequences_bitwise():
    prompt, *rests = (random(rows, 6, 2, 2, seed=rows) for rows in (70, 40, 5))
    together = [torch.cat(each) for each in zip(prompt, *rests, strict=True)]
    output = attend(packed_metadata([70, 40, 5], DEVICE, [None, Prefix(0, 70), Prefix(0, 70)]), together)
    for rest, rows in zip(rests, output[70:].split([40, 5]), strict=True):
        whole = [torch.cat(each) for each in zip(prompt, rest, strict=True)]
        assert torch.equal(attend(packed_metadata([len(whole[0])], DEVICE), whole)[70:], rows)


@pytest.mark.parametrize(("window", "width", "kv_heads"), few([(None, 16, 2), (50, 16, 2), (50, 136, 1)], (50, 136, 1)))
def test_company_changes_no_bit_of_outputs_or_gradients(window, width, kv_heads):
    found = alone_and_in_company(window, width, kv_heads)
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    assert all(bool(each.isfinite().all()) for each in found[0])


@pytest.mark.parametrize("bad", few([math.nan, math.inf, 1e30], math.nan))
@pytest.mark.parametrize("window", [None, 10])
@torch.inference_mode()
def test_what_no_query_sees_is_not_read(window, bad):
    """Blocks of other tenants, the block that pads tables, keys after the query, and whole blocks before the window."""
    outputs = []
    for other in (0.0, bad):
        cache = KVCache(12, BLOCK, DEVICE)
        pools = cache.layer(0, *random(1, 2, 2))
        long, short = cache.take(9), cache.take(1)
        spans = [Span(8 * BLOCK + 6, 1, long), Span(3, 1, short)]
        for pool in pools:
            pool.fill_(other)
            for span in spans:
                first = 0 if window is None else max(0, span.start - window + 1) // TILE_KEYS * TILE_KEYS
                for position in range(first, span.start):
                    pool[span.blocks[position // BLOCK], :, position % BLOCK] = position / 100
        outputs.append(attend(cached_metadata(spans, cache, DEVICE, least_blocks=11), random(2, 4, 2, 2), window))
    assert torch.equal(*outputs)
    assert bool(outputs[0].isfinite().all())


@torch.inference_mode()
def test_rows_of_padding_are_zeros():
    cache = KVCache(2, BLOCK, DEVICE)
    spans = [Span(0, 5, cache.take(1)), Span(0, 2, cache.take(1))]
    output = attend(cached_metadata(spans, cache, DEVICE), random(12, 4, 2, 2))
    assert not bool(output[7:].any())
    assert bool(output[:7].any(-1).all())
    assert not any(bool(pool[cache.zero_block].any()) for pool in cache.layer(0, *random(1, 2, 2)))


@torch.inference_mode()
def test_a_later_token_is_decoded_with_the_same_shapes_and_tensors():
    """As a recorded graph does: only the contents of the tensors change from token to token."""
    cache = KVCache(24, BLOCK, DEVICE)
    tables = [cache.take(7) for _ in range(3)]
    row = random(3, 4, 2, 2)

    def at(*positions: int) -> TritonMetadata:
        spans = [Span(position, 1, blocks) for position, blocks in zip(positions, tables, strict=True)]
        return cached_metadata(spans, cache, DEVICE, least_blocks=7)

    pools = cache.layer(0, *row[1:])
    for pool, states in zip(pools, random(pools[0].shape[0] * BLOCK, 2, 2), strict=True):
        pool.copy_(states.unflatten(0, (-1, BLOCK)).transpose(1, 2))
    recorded = at(3, 0, 40)
    attend(recorded, row)
    later = at(70, 17, 111)
    expected = attend(later, row)
    for tensor, value in zip(recorded.tensors, later.tensors, strict=True):
        tensor.copy_(value)
    for left, right in zip(vars(recorded.tiles(2)).values(), vars(later.tiles(2)).values(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(attend(recorded, row), expected)


def test_views_of_a_joint_product_have_the_bits_of_tensors_of_their_own():
    (joint,) = random(34, 8, width=24)
    odd = torch.empty(joint.numel() + 1, device=DEVICE)[1:].view_as(joint).copy_(joint)
    across = joint.transpose(0, 2).contiguous().transpose(0, 2)
    found = []
    for whole in (joint, odd, across, None):
        parts = (
            [each.contiguous() for each in joint.split([4, 2, 2], 1)] if whole is None else whole.split([4, 2, 2], 1)
        )
        states = [each.detach().requires_grad_() for each in parts]
        output = attend(packed_metadata([34], DEVICE), states)
        found.append([output, *gradients(output, states)])
    for others in found[1:]:
        assert all(torch.equal(left, right) for left, right in zip(found[0], others, strict=True))


@torch.inference_mode()
def test_a_tile_holds_at_least_one_query():
    states = random(3, 64, 1, 1)
    expected = attend_in_torch(states, metadata=torch_metadata.packed_metadata([3], BLOCK, DEVICE))
    assert torch.allclose(attend(packed_metadata([3], DEVICE), states), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="65 query heads share a KV head"):
        attend(packed_metadata([3], DEVICE), random(3, 65, 1, 1))


@torch.inference_mode()
def test_blocks_that_a_row_does_not_see_leave_the_sign_of_its_zeros():
    """A value that shrinks to −0, beside which hidden keys would add 0: alone the last row is given nothing to add."""
    query, key, value = random(2 * TILE_KEYS + 1, 3, 1, 1)
    query[:], key[:TILE_KEYS], key[TILE_KEYS:] = 10.0, 0.0, 20.0
    value[:TILE_KEYS], value[TILE_KEYS:], value[-1] = -1e-38, -0.0, 1.0
    rows = 2 * TILE_KEYS
    longer = attend(packed_metadata([rows + 1], DEVICE), [query, key, value])
    output = attend(packed_metadata([rows], DEVICE), [each[:rows] for each in (query, key, value)])
    assert torch.equal(longer[:rows].view(torch.int32), output.view(torch.int32))


@pytest.mark.parametrize("cap", [2.0, 5000.0])
@torch.inference_mode()
def test_the_soft_cap_bends_scores_from_tiny_to_huge(cap):
    wide, narrow = [0.0, 1e-3, -0.4, 0.6, 7.0, -30.0, 200.0, -1e4], [0.0, 1e-3, -0.4, 0.6, 1.3, -2.0, 2.2, 3.0]
    scores = torch.tensor(wide if cap < 3.0 else narrow, device=DEVICE)
    (value,) = random(8, 1)
    key, query = (torch.zeros_like(value) for _ in range(2))
    key[:, 0, 0], query[:, 0, 0] = scores, 4.0  # the width of 16 divides by 4
    output = attend(packed_metadata([8], DEVICE), [query, key, value], softcap=cap)
    weights = (cap * (scores.double() / cap).tanh()).softmax(0)
    assert torch.allclose(output[-1, 0].double(), weights @ value[:, 0].double(), rtol=0, atol=1e-6)
