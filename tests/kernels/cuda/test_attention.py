"""Attention of a GPU's own kernels: the plain formula's values, and equal bits of a row in every kind of pass.

Without a CUDA device the kernels run in Triton's interpreter, which adds in order: it shows masks, lists, the order of
pieces and who reads what. That a tensor core adds alike in tiles of every size is for a card to show.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401 (first of all, so that kernels are made for the interpreter)
from motet.kernels.cuda.attention import CudaAttention, CudaPass, WorkList
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.packed_blocks import packed_blocks
from motet.model.attention import LayerCall, Prefix, Span, torch_metadata
from motet.model.kv_cache import KVCache
from tests.support.attention_cases import attend as attend_in_torch
from tests.support.cases import few
from tests.support.cuda_attention_cases import DEVICE, LENGTH, cache_of_nan, computed_otherwise, random, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN

LENGTHS = [70, 40, 3, 33, 9, 5]
PREFIXES = [None, Prefix(0, 70), Prefix(0, 70), None, Prefix(113, 30), Prefix(146, 4, ((113, 30),))]
"""Two sequences continue the first, one a part of another, and the last both."""


@pytest.mark.parametrize(
    ("fold", "n_kv", "width", "block", "window", "softcap"),
    few(
        [
            (1, 2, 16, 64, None, None),
            (3, 1, 24, 64, 21, None),
            (4, 2, 80, 16, 50, 2.0),
            (7, 2, 64, 64, None, None),
            (64, 1, 16, 64, None, None),
            (2, 1, 256, 48, None, None),
        ],
        (3, 1, 24, 64, 21, None),
        (4, 2, 80, 16, 50, 2.0),
    ),
)
@torch.inference_mode()
def test_packed_sequences_have_the_values_of_products_of_torch(fold, n_kv, width, block, window, softcap):
    states = random(sum(LENGTHS), fold * n_kv, n_kv, n_kv, width=width)
    output = run(CudaAttention(block, DEVICE).packed(LENGTHS, PREFIXES), states, window=window, softcap=softcap)
    metadata = torch_metadata.packed_metadata(LENGTHS, 16, DEVICE, PREFIXES)
    expected = attend_in_torch(states, metadata=metadata, sliding_window=window, softcap=softcap)
    assert torch.allclose(output, expected, rtol=0, atol=1e-5)


def plain(states: list[Tensor], window: int) -> Tensor:
    """Attention of one sequence in fp64 [T, H, E]."""
    query_HTE, key_HTE, value_HTE = (x.double().transpose(0, 1) for x in states)
    fold = len(query_HTE) // len(key_HTE)
    score_HTT = query_HTE @ key_HTE.repeat_interleave(fold, 0).mT * query_HTE.shape[-1] ** -0.5
    position_T = torch.arange(query_HTE.shape[1], device=DEVICE)
    distance_TT = position_T[:, None] - position_T
    score_HTT[:, (distance_TT < 0) | (distance_TT >= window)] = -torch.inf
    output_HTE: Tensor = score_HTT.softmax(-1) @ value_HTE.repeat_interleave(fold, 0)
    return output_HTE.transpose(0, 1)


@torch.inference_mode()
def test_several_pieces_have_the_values_of_the_plain_formula():
    states = random(LENGTH, 2, 1, 1)
    output = run(CudaAttention(64, DEVICE).packed([LENGTH]), states, window=280)
    assert float((output - plain(states, 280)).abs().max()) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "fold", "n_kv", "width", "block", "window", "softcap"),
    few(
        [
            (torch.float32, 2, 1, 16, 64, None, None),
            (torch.bfloat16, 3, 1, 24, 64, 290, 2.0),
            (torch.float32, 7, 2, 64, 64, 100, None),
            (torch.float16, 1, 2, 80, 16, None, None),
            (torch.bfloat16, 64, 1, 16, 128, None, None),
            (torch.bfloat16, 5, 1, 144, 64, 64, 30.0),
            (torch.float32, 2, 1, 256, 48, 257, None),
        ],
        (torch.float32, 2, 1, 16, 64, None, None),
        (torch.bfloat16, 3, 1, 24, 64, 290, 2.0),
    ),
)
@torch.inference_mode()
def test_every_kind_of_pass_has_the_bits_of_the_whole_sequence(dtype, fold, n_kv, width, block, window, softcap):
    """Company of NaN, prefixes, prompts in chunks, forks, and tokens decoded alone and among others."""
    backend = CudaAttention(block, DEVICE)
    states = random(LENGTH, fold * n_kv, n_kv, n_kv, width=width, dtype=dtype)
    whole = run(backend.packed([LENGTH]), states, window=window, softcap=softcap)
    assert bool(whole.isfinite().all())
    for rows in computed_otherwise(backend, states, window=window, softcap=softcap):
        computed_T = rows.isfinite().flatten(1).all(1)
        assert computed_T.sum() in (LENGTH, 10)
        assert torch.equal(rows[computed_T].view(torch.uint8), whole[computed_T].view(torch.uint8))


def decode(positions: list[int], states: list[Tensor], least_blocks: int = 0, slots: int = 4096) -> CudaPass:
    """Rows of sequences that share a cache, whose blocks hold the states' keys and values in turn."""
    backend = CudaAttention(64, DEVICE)
    backend.slots = slots
    cache = cache_of_nan(len(states[1]) // 64 * len(positions), 64, states)
    spans = []
    for position in positions:
        blocks = cache.take(len(states[1]) // 64)
        for pool, own in zip(cache.layer(0, *states[1:]), states[1:], strict=True):
            pool[blocks] = own.unflatten(0, (-1, 64)).transpose(1, 2)
        spans.append(Span(position, 1, blocks))
    attention = backend.replayable(spans, cache, least_blocks)
    assert attention is not None
    return attention


def items(work: WorkList) -> list[list[int]]:
    n_items = int(work.n_items)
    return work.items_I8[:n_items, :7].tolist()


@pytest.mark.parametrize(("window", "slots"), [(None, 64), (300, 64), (None, 8)])
@torch.inference_mode()
def test_the_list_that_the_device_makes_is_that_of_the_host(window, slots):
    """An item for each piece that a row sees; a row without room for its pieces is one item."""
    positions = [0, 700, 255, 256, 1000, 5, 515]
    states = random(1024, 1, 1, 1)
    attention = decode(positions, states, slots=slots)
    rows = [x[positions] for x in states]
    run(attention, rows, window=window)
    (work,) = attention._works.values()
    expected, taken = [], 0
    for row, position in enumerate(positions):
        pieces = list(range(0 if window is None else max(0, position - window + 1) // 256, position // 256 + 1))
        if len(pieces) > 1:
            taken += len(pieces)
        if len(pieces) > 1 and taken <= slots:
            first = taken - len(pieces)
            expected += [[row, position, 1, row, piece, piece + 1, first + at] for at, piece in enumerate(pieces)]
        else:
            expected.append([row, position, 1, row, pieces[0], pieces[-1] + 1, -1])
    assert items(work) == expected


@torch.inference_mode()
def test_rows_without_room_for_their_pieces_have_the_same_bits():
    positions = [700, 1000, 300]
    states = random(1024, 2, 1, 1)
    rows = [x[positions] for x in states]
    outputs = [run(decode(positions, states, slots=slots), rows) for slots in (64, 4, 1)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@torch.inference_mode()
def test_pieces_merged_in_another_order_have_other_bits():
    """So the equalities above would find it."""
    states = random(1024, 8, 1, 1)
    attention = decode([1000], states)
    row = [x[1000, None] for x in states]
    expected = run(attention, row)
    (work,) = attention._works.values()
    slots = work.items_I8[:4, 6]
    call = LayerCall(1, 0.25, None, None)  # not the first layer, which would make the list anew
    pools, out = attention.pools(0, *row[1:]), torch.empty_like(row[0])
    attention.attend_into(call, row[0], *pools, out)
    assert torch.equal(out, expected)
    slots.copy_(slots.flip(0))
    attention.attend_into(call, row[0], *pools, out)
    assert not torch.equal(out, expected)
    assert torch.allclose(out, expected, rtol=0, atol=1e-6)


@torch.inference_mode()
def test_a_later_token_is_decoded_with_the_same_tensors_and_launches():
    """As a recorded graph does: only contents change, on the host or on the device."""
    states = random(1024, 2, 1, 1)
    attention = decode([3, 250, 64], states, least_blocks=18)
    addresses = [x.data_ptr() for x in attention.tensors]
    blocks = [row.tolist()[:16] for row in attention.tables_SL]
    found = []
    for positions in ([3, 250, 64], [4, 256, 900]):
        spans = [Span(position, 1, own) for position, own in zip(positions, blocks, strict=True)]
        for tensor, value in zip(attention.tensors, attention.values(spans), strict=True):
            tensor.copy_(value)
        places = attention.places_T.clone()
        attention.places_T.zero_()
        attention.place_rows()
        assert torch.equal(attention.places_T, places)
        rows = [x[positions] for x in states]
        with count() as launched:
            output = torch.stack(
                [run(attention, rows, layer=layer, window=window) for layer, window in ((0, None), (1, 9))]
            )
        found.append(launched)
        for row, position in enumerate(positions):
            alone = run(decode([position], states), [x[position, None] for x in states])
            assert torch.equal(output[0, row], alone[0])
    assert [x.data_ptr() for x in attention.tensors] == addresses
    assert found == [{"list_pieces": 2, "attend": 2, "combine": 2}] * 2


@torch.inference_mode()
def test_keys_beyond_a_table_go_to_the_scrap_block():
    attention = decode([127, 300], random(128, 1, 1, 1))
    assert attention.cache is not None
    attention.positions_T.add_(1)
    attention.place_rows()
    scrap = attention.cache.scrap_block * 64
    assert attention.places_T.tolist() == [scrap, scrap + 301 % 64]


@torch.inference_mode()
def test_a_packed_pass_is_one_launch_and_one_more_for_prefixes():
    states = random(sum(LENGTHS), 2, 1, 1)
    for lengths, prefixes, expected in (
        ([160], [None], {"attend": 1}),
        (LENGTHS, PREFIXES, {"attend": 1, "copy_rows": 1}),
    ):
        with count() as launched:
            run(CudaAttention(64, DEVICE).packed(lengths, prefixes), [x[: sum(lengths)] for x in states])
        assert launched == expected


def test_tables_short_enough_for_one_piece_are_never_combined():
    cache = KVCache(4, 64, DEVICE)
    with count() as launched:
        run(CudaAttention(64, DEVICE).cached([Span(255, 1, cache.take(4))], cache), random(1, 1, 1, 1))
    assert launched == {"list_pieces": 1, "attend": 1}


@pytest.mark.parametrize("block", [16, 48])
def test_sequences_share_the_full_blocks_of_their_prefixes(block):
    lengths, prefixes = [100, 50, 60, 7], [None, Prefix(0, 100), Prefix(100, 50, ((0, 100),)), Prefix(0, 96)]
    blocks = packed_blocks(lengths, prefixes, block)
    row_P = np.full(blocks.n_blocks * block, -1)
    row_P[blocks.places_T] = np.arange(sum(lengths))
    row_P[blocks.targets_C] = row_P[blocks.sources_C]
    assert len(np.unique(blocks.targets_C)) == len(blocks.targets_C)
    ends = np.cumsum([0, *lengths])
    for (start, end), prefix, table in zip(pairwise(ends), prefixes, blocks.tables, strict=True):
        held = np.concatenate([row_P[one * block : (one + 1) * block] for one in table])
        rows = [*([] if prefix is None else prefix.rows), *range(start, end)]
        assert held[: len(rows)].tolist() == rows
    first, second, third, fourth = blocks.tables
    full = 100 // block
    assert second[:full] == first[:full]
    assert third[: 150 // block] == second[: 150 // block]
    assert fourth[: 96 // block] == first[: 96 // block]


def test_what_the_kernels_lack_is_refused():
    with pytest.raises(ValueError, match="block_size is 24"):
        CudaAttention(24, DEVICE)
    attention = CudaAttention(64, DEVICE).packed([3])
    states = random(3, 65, 1, 1)
    with pytest.raises(ValueError, match="65 query heads share a KV head"):
        run(attention, states)
    pools = attention.pools(0, *states[1:])
    with pytest.raises(ValueError, match="sinks"):
        attention.attend_into(
            LayerCall(0, 1.0, None, None, torch.zeros(65, device=DEVICE)), states[0], *pools, states[0]
        )
