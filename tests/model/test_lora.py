"""Many adapters on one base: each row sees its own adapter and nothing of its neighbours."""

from __future__ import annotations

import math
from threading import Thread

import pytest
import torch

from motet.config import AdapterConfig
from motet.core.errors import AdapterError
from motet.model.lora import NoAdapters, initial_weights, make_layout
from motet.model.routing import AdapterStacks, TrainerRouting, TrainSegment
from motet.training.torch_trainer import TorchTrainer
from tests.support import tiny_models as tiny
from tests.support.lora_cases import company, mixed

pytestmark = pytest.mark.tier1

NAMES = ("llama", "gemma2", "opt", "phi3")
DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_company_equal_each_adapter_alone_bitwise(name, dtype):
    base = tiny.base(name, dtype)
    packed = company(base)
    together = tiny.packed_logits(base, packed)
    plain = tiny.packed_logits(base, [(None, ids) for _, ids in packed])
    for (weights, ids), logits, without in zip(packed, together, plain, strict=True):
        assert torch.equal(tiny.packed_logits(base, [(weights, ids)])[0], logits)
        assert torch.equal(logits, without) == (weights is None), "base rows stay, adapted rows change"


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflowing_neighbours_change_nothing(dtype):
    base = tiny.base("llama", dtype)
    good = tiny.adapter(base, seed=1)
    broken = [tiny.adapter(base, seed=2, scale=math.inf), tiny.adapter(base, seed=3, rank=4, scale=math.nan)]
    mine = [(good, tiny.tokens(37)), (None, tiny.tokens(22))]
    alone = tiny.packed_logits(base, mine)
    together = tiny.packed_logits(base, [(broken[0], tiny.tokens(9)), *mine, (broken[1], tiny.tokens(18))])
    assert not torch.isfinite(together[0]).any()
    assert not torch.isfinite(together[3]).any()
    assert torch.equal(together[1], alone[0])
    assert torch.equal(together[2], alone[1])


def test_two_threads_on_one_base_keep_their_adapters():
    base, ids = tiny.base("llama", "float32"), tiny.tokens(24)
    mine, theirs = tiny.adapter(base, seed=1), tiny.adapter(base, seed=2)
    expected = [tiny.packed_logits(base, [(weights, ids)])[0] for weights in (mine, theirs)]
    found = []

    def other() -> Thread:
        thread = Thread(target=lambda: found.append(tiny.packed_logits(base, [(theirs, ids)])[0]))
        thread.start()
        return thread

    routing = AdapterStacks(base.products).routing([(mine, 0, len(ids))], base.device)
    with base.routed(routing):
        with base.aside(routing):
            other().join()
        waiting = other()
        waiting.join(0.5)  # long enough for its pass, if nothing holds it
        logits = base.logits(base.hidden(ids, torch.arange(len(ids)), base.attention.packed([len(ids)])))
    waiting.join()
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(logits, expected[1]) for logits in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_trainer_and_sampler_routings_agree_bitwise(name, dtype):
    base = tiny.base(name, dtype)
    ids = tiny.tokens(37)
    for weights in mixed(base):
        sampled = tiny.packed_logits(base, [(weights, ids)])[0]
        routing = TrainerRouting([TrainSegment(0, 40, weights, None)], base.device, base.products, backward=False)
        assert torch.equal(tiny.packed_logits(base, [(weights, ids)], routing)[0], sampled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_equal_prefill_rows_bitwise(dtype):
    """One row per adapter, as in decoding, against many rows, as in prefill."""
    base = tiny.base("llama", dtype)
    layer = base.linears["model.layers.0.mlp.down_proj"]
    adapters = [tiny.adapter(base, seed=seed) for seed in range(5)]
    x = torch.randn(1, 20, layer.in_features, generator=torch.Generator().manual_seed(0)).to(base.dtype)
    with base.routed(
        AdapterStacks(base.products).routing([(each, 4 * i, 4) for i, each in enumerate(adapters)], base.device)
    ):
        many = layer(x)
    with base.routed(
        AdapterStacks(base.products).routing([(each, i, 1) for i, each in enumerate(adapters)], base.device)
    ):
        few = layer(torch.cat([x[:, ::4], x[:, :3]], 1))
    assert torch.equal(few[0, :5], many[0, ::4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_products_of_few_numbers_equal_each_alone_bitwise(dtype, rank):
    """Below a certain size `bmm` takes a loop of its own instead of the matrix kernel."""
    base = tiny.base("llama", dtype)
    layer = base.linears["model.layers.0.self_attn.k_proj"]
    adapters = [tiny.adapter(base, rank=rank, targets=["k_proj"], seed=seed) for seed in range(4)]
    x = torch.randn(1, 4, layer.in_features, generator=torch.Generator().manual_seed(0)).to(base.dtype)
    with base.routed(
        AdapterStacks(base.products).routing([(each, i, 1) for i, each in enumerate(adapters)], base.device)
    ):
        together = layer(x)
    for i, each in enumerate(adapters):
        with base.routed(AdapterStacks(base.products).routing([(each, i, 1)], base.device)):
            assert torch.equal(layer(x)[0, i], together[0, i])


def test_stacks_follow_their_adapters():
    """A new version of an adapter is another stack, even right after the old one was let go."""
    base, ids, stacks = tiny.base("llama"), tiny.tokens(8), AdapterStacks(tiny.base("llama").products, keep=2)
    for seed in range(6):
        pair = [tiny.adapter(base, seed=seed), tiny.adapter(base, seed=seed + 100)]
        routing = stacks.routing([(pair[0], 0, 4), (pair[1], 4, 4)], base.device)
        found = tiny.packed_logits(base, [(None, ids[:4]), (None, ids[4:])], routing)
        alone = [tiny.packed_logits(base, [(each, part)])[0] for each, part in zip(pair, ids.split(4), strict=True)]
        assert torch.equal(torch.cat(found), torch.cat(alone))


def test_unknown_target_names_what_exists():
    base = tiny.base("llama")
    with pytest.raises(AdapterError, match=r"'q_prj'.*did you mean.*all-linear,"):
        base.adapter_layout(["v_proj", "q_prj"], 8)
    with pytest.raises(AdapterError, match="'lm_head'"):
        base.adapter_layout("lm_head", 8)


def test_targets_by_name_by_suffix_and_by_path():
    base = tiny.base("llama")
    assert len(base.adapter_layout("all-linear", 2).places) == 14
    assert [place.path for place in base.adapter_layout("q_proj", 2).places] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert len(base.adapter_layout(["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"], 2).places) == 2
    with pytest.raises(AdapterError):
        base.adapter_layout("proj", 2)  # a part of a name is not a name


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_layout_has_no_overlap_and_what_lies_between_stays_zero(rank):
    layout = tiny.base("gemma3").adapter_layout("all-linear", rank)
    flat = torch.zeros(layout.size)
    for a, b in layout.views(flat).values():
        a += 1
        b += 1
    assert set(flat.tolist()) <= {0.0, 1.0}
    assert flat.sum() == sum(rank * (place.n_in + place.n_out) for place in layout.places)
    assert flat[: layout.size_a].sum() == sum(rank * place.n_in for place in layout.places), (
        "every A comes before every B"
    )
    for matrices in layout.matrices(flat).values():
        assert all(part.data_ptr() % 64 == flat.data_ptr() % 64 for part in (matrices.a, *(b for _, b in matrices.bs)))


def test_every_matrix_is_aligned_and_wide_enough_whatever_the_shapes():
    """fp32 products depend on how memory is aligned, and a product's width counts like its rows."""
    linears = {"q": (6, 10), "k": (6, 7), "v": (6, 7), "o": (10, 3)}
    layout = make_layout(linears, 3, [("q", "k", "v"), ("o",)])
    offsets = [*(group.offset for group in layout.fused), *(place.offset for place in layout.places)]
    assert len(set(offsets)) == 6
    assert all(offset % 32 == 0 for offset in offsets)
    assert [group.width for group in layout.fused] == [12, 4]


def test_initial_weights_depend_on_seed_and_path_only():
    base = tiny.base("llama")
    everything, some = base.adapter_layout("all-linear", 4), base.adapter_layout(["up_proj", "q_proj"], 4)
    whole, part = (layout.views(initial_weights(layout, 7)) for layout in (everything, some))
    torch.manual_seed(123)  # the global stream has no say
    again = everything.views(initial_weights(everything, 7))
    other = everything.views(initial_weights(everything, 8))
    for path, (a, b) in whole.items():
        assert torch.equal(a, again[path][0])
        assert not torch.equal(a, other[path][0])
        assert not b.any()
        bound = 1 / math.sqrt(a.shape[0])
        assert 0.9 * bound < float(a.abs().max()) <= bound
        if path in part:
            assert torch.equal(a, part[path][0])
    firsts = {float(a[0, 0]) for a, _ in whole.values()}
    assert len(firsts) == len(whole), "every layer has numbers of its own"


def test_rows_are_packed_as_told_when_nothing_is_adapted():
    """A routing without buckets is the base, and the context forgets it afterwards."""
    base = tiny.base("llama")
    ids = tiny.tokens(12)
    with torch.no_grad():
        before = base.hidden(ids, torch.arange(12), base.attention.packed([12]))
        assert torch.equal(base.logits(before), tiny.packed_logits(base, [(None, ids)])[0])
    tiny.packed_logits(base, [(tiny.adapter(base), ids)])
    assert isinstance(base.context.routing, NoAdapters)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_share_a_product_of_the_same_input_only(dtype):
    """A model may call some of them again, or with another input, and each gets what is its own."""
    base = tiny.base("llama", dtype)
    query, key, value = (base.linears[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv")
    assert query.fused is key.fused is value.fused
    weights = tiny.adapter(base)
    one, other = (torch.randn(1, 8, query.in_features, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    one, other = one.to(base.dtype), other.to(base.dtype)
    with torch.no_grad(), base.routed(AdapterStacks(base.products).routing([(weights, 0, 8)], base.device)):
        wanted = [[layer(x) for layer in (query, key, value)] for x in (one, other)]
        assert base.context.joint is None, "memory is kept after the last of them has taken its part"
        calls = [(query, one), (key, other), (value, other), (value, one), (key, one), (query, other), (key, other)]
        for layer, x in calls:
            assert torch.equal(layer(x), wanted[x is other][layer.index])


def test_slots_are_counted_and_names_are_unique():
    trainer = TorchTrainer(tiny.base("llama"), slots=2)
    shape = AdapterConfig(rank=2)
    trainer.add_adapter("a", shape, 0)
    with pytest.raises(AdapterError, match="'a' exists already"):
        trainer.add_adapter("a", shape, 0)
    trainer.add_adapter("b", shape, 0)
    with pytest.raises(AdapterError, match=r"all 2 adapter slots.*raise engine\.slots"):
        trainer.add_adapter("c", shape, 0)
    trainer.remove_adapter("a")
    trainer.add_adapter("c", shape, 0)
    with pytest.raises(AdapterError, match=r"no adapter 'a' in the.*there are: b, c"):
        trainer.weights("a")
