"""Bases that own kernels compute: what they give, in any company, and that sampler and trainer agree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from motet.algorithms.client import ClientLoss
from motet.config import EngineConfig
from motet.config.budgets import Need
from motet.config.jobfile import validate
from motet.core.batch import Batch, Segment
from motet.core.errors import AdapterError, BaseModelError, ConfigError
from motet.hosts.launch import build, load
from motet.kernels.cpu import library
from motet.kernels.cpu.own_math import OwnMath
from motet.kernels.supported_bases import check_room, compute_with
from motet.model.attention import Span
from motet.model.covered_decoder import FAMILIES, angles
from motet.model.kv_cache import KVCache
from motet.model.lora import FusedLinears, NoAdapters
from motet.model.routing import AdapterStacks
from tests.support import inside, native_calls
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.segments import gradient, long_batch, make_samples, make_segment, make_trainer
from tests.support.small_runs import REWARDS, job, metrics, run

OWN = (("llama/native", "float32"), ("llama/native", "bfloat16"), ("llama/native-dpbf16", "bfloat16"))
COVERED = (
    "llama", "llama_biased", "mistral", "ministral", "ministral3", "qwen2", "qwen2_linear", "qwen3_wide", "gemma", "gemma2",
    "gemma3", "gemma3_mixed", "vaultgemma", "phi3", "granite", "olmo2", "olmo3", "exaone4", "smollm3", "seed_oss", "mistral3",
    "gemma3_seeing", "qwen3_vl", "mixtral", "qwen3_moe", "olmoe",
)  # fmt: skip
"""Tiny models of every family, with each kind of position and bias."""
EVERY_TIME = (
    "llama_biased",
    "ministral3",
    "gemma2",
    "gemma3_mixed",
    "phi3",
    "granite",
    "olmo2",
    "smollm3",
    "qwen3_moe",
    "olmoe",
)
"""One of each kind."""
MORE = [(f"{name}/native", dtype) for name in COVERED[1:] for dtype in ("float32", "bfloat16")]
MORE_EVERY_TIME = (("gemma2/native", "bfloat16"), ("qwen3_moe/native", "float32"))
LENGTHS = (70, 9, 37, 48, 1)
LONG = [
    ("llama/native-dpbf16", "bfloat16"),
    ("llama/native", "float32"),
    ("gemma2/native", "bfloat16"),
    ("qwen3_moe/native", "bfloat16"),
]


@pytest.fixture(scope="module")
def small() -> Any:
    native_calls.directory()
    return load("small", EngineConfig(threads=1, kernels="native"))


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def same(*tensors: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return all(torch.equal(each.view(torch.int32), tensors[0].view(torch.int32)) for each in tensors)


# --- what is computed -----------------------------------------------------------------------------------------------------


def test_every_family_is_tried() -> None:
    types = {kind: model_type for model_type, kind in CONFIG_MAPPING_NAMES.items()}
    tried = set()
    for name in COVERED:
        kind, options = tiny.CONFIGS[name]
        wrapped = options.get("text_config", {})
        text = kind.replace("Config", "TextConfig") if "text_config" in options else kind
        tried.add(wrapped.get("model_type") or types[text])
    assert tried == set(FAMILIES)


@pytest.mark.parametrize("name", few(COVERED, *EVERY_TIME))
def test_logits_are_those_of_transformers(name: str) -> None:
    tiny.assert_equals_stock(name, tiny.base(f"{name}/native"), (70, 9, 37))


@pytest.mark.parametrize("name", ["llama/native", "llama/native-dpbf16"])
def test_logits_in_bfloat16_are_nearer_to_fp32_than_torchs(name: str) -> None:
    packed: tiny.Packed = [(None, tiny.tokens(length)) for length in LENGTHS]
    exact, ours, torchs = (
        torch.cat(tiny.packed_logits(tiny.base(*each), packed))
        for each in (("llama", "float32"), (name, "bfloat16"), ("llama", "bfloat16"))
    )
    assert float((ours - exact).square().mean()) < float((torchs - exact).square().mean())


@pytest.mark.parametrize("name", few(COVERED, *EVERY_TIME))
def test_gradients_are_those_of_autograd(name: str) -> None:
    """Within 2e-5 of the largest in fp32."""
    found = []
    for each in (name, f"{name}/native"):
        trainer = make_trainer(tiny.base(each))
        trainer.forward_backward(Batch(tuple(make_segment(each) for each in "abc")))
        found.append([gradient(trainer, each) for each in "abc"])
    for theirs, ours in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("name", ["llama/native", "llama/native-dpbf16"])
def test_gradients_in_bfloat16_are_nearer_to_fp32_than_torchs(name: str) -> None:
    found = []
    for each in (("llama", "float32"), (name, "bfloat16"), ("llama", "bfloat16")):
        trainer = make_trainer(tiny.base(*each), "a")
        trainer.forward_backward(Batch((make_segment("a"),)))
        found.append(gradient(trainer, "a"))
    exact, ours, torchs = found
    assert float((ours - exact).square().sum()) < float((torchs - exact).square().sum())


# --- company --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [*OWN, *few(MORE, *MORE_EVERY_TIME)])
def test_decoding_is_prefilling_is_the_whole_pass(name: str, dtype: str) -> None:
    """However a sequence is cut, alone and beside others that overflow, with two threads and one: the same bits."""
    base, ids = tiny.base(name, dtype), tiny.tokens(70)
    broken = tiny.adapter(base, scale=1e30, seed=1)
    mine = tiny.adapter(base, rank=3, seed=2)
    (whole,) = tiny.packed_logits(base, [(mine, ids)])
    crowd = [
        (broken, tiny.tokens(40)),
        (mine, ids),
        (None, tiny.tokens(9)),
        (tiny.adapter(base, seed=3), tiny.tokens(21)),
    ]
    packed = tiny.packed_logits(base, crowd)
    assert not torch.isfinite(packed[0]).all()
    assert same(packed[1], whole)
    torch.set_num_threads(2)
    assert all(same(one, other) for one, other in zip(tiny.packed_logits(base, crowd), packed, strict=True))
    for cuts in ([70], [1] * 70, [33, 1, 16, 20]):
        assert same(_in_pieces(base, mine, ids, cuts), whole)


@torch.no_grad()
def _in_pieces(base: Any, weights: Any, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of a sequence that is read a piece at a time, beside another whose blocks lie between its own."""
    cache = KVCache(2 * 5, tiny.BLOCK, base.device, clean=False)
    for pool in (each for index in range(2) for each in base.kernels.pools(cache)[index]):
        assert pool
    for keys, values in cache._layers.values():
        keys.fill_(torch.nan), values.fill_(torch.nan)
    taken, stacks = cache.take(10), AdapterStacks(base.products)
    found, start = [], 0
    for length in cuts:
        spans = [Span(start, length, taken[1::2]), Span(start, 1, taken[::2])]
        rows = torch.cat([ids[start : start + length], ids[start : start + 1]])
        positions = torch.cat([torch.arange(start, start + length), torch.tensor([start])])
        with base.routed(stacks.routing([(weights, 0, length), (None, length, 1)], base.device)):
            hidden = base.hidden(rows, positions, base.attention.cached(spans, cache))
        found.append(base.logits(hidden)[:length])
        start += length
    return torch.cat(found)


@pytest.mark.parametrize("own", [*OWN, ("olmoe/native", "bfloat16")])
def test_two_threads_and_recomputing_change_no_bit_of_a_gradient(own: tuple[str, str]) -> None:
    base = tiny.load(*own)
    segments, found = [make_segment(each) for each in "abcab"], []
    for threads, recompute, at_a_time in ((1, False, 1), (1, False, 5), (2, False, 5), (2, True, 5)):
        torch.set_num_threads(threads)
        trainer = make_trainer(base, recompute=recompute)
        batches = [Batch(tuple(segments[first : first + at_a_time])) for first in range(0, 5, at_a_time)]
        stats = [each.stats for batch in batches for each in trainer.forward_backward(batch)]
        found.append((stats, [gradient(trainer, each) for each in "abc"]))
    for stats, gradients in found[1:]:
        assert stats == found[0][0]
        assert all(same(one, other) for one, other in zip(gradients, found[0][1], strict=True))


def test_one_process_samples_and_trains_with_all_threads() -> None:
    """And no weight is packed a second time."""
    native_calls.directory()
    config = EngineConfig(threads=2, kernels="native")
    base: Any = load("small", config)
    workshop = build(base, config, [Need(16, 16)])
    try:
        assert workshop.spread is None
        assert base.kernels.n_threads == 2
        assert not any(weight.back for layer in base.kernels._plan.layers[:2] for weight in layer.linears)
    finally:
        workshop.close()


@pytest.mark.parametrize("recompute", few([False, True], False))
def test_the_estimate_of_memory_is_near_what_a_pass_takes(recompute: bool) -> None:
    """In a process of its own, whose memory nothing else has used."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.native_memory", str(int(recompute))],
        capture_output=True,
        text=True,
        check=True,
    )
    taken, estimate = map(int, found.stdout.split())
    assert 0.7 < estimate / taken < 1.4, found.stdout


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3_mixed", 2)])
def test_a_copy_of_the_weights_that_does_not_fit_is_refused_before_it_is_made(name: str, kinds: int) -> None:
    """With it come cosines and sines of each position, for each kind of layers."""
    base = tiny.base(name, "bfloat16")
    config: Any = base.model.config
    made = angles(base.decoder, config, base.info.max_positions, OwnMath(library.load().calls, lambda: 1).angles)
    tables = {id(one): one for layer in range(config.num_hidden_layers) for one in made(layer)}
    assert len(tables) == 2 * kinds
    needed = base.info.n_parameters * 2 + sum(one.nbytes for one in tables.values())
    check_room(base, needed)
    with pytest.raises(BaseModelError, match=r"a copy of the weights.*kernels to torch"):
        check_room(base, needed - 1)


def test_a_clients_loss_has_the_same_bits_with_and_without_a_gradient() -> None:
    base = tiny.base(*OWN[0])
    loss = ClientLoss("importance_sampling", {})
    segment = Segment("a", make_samples([(4, 60)] * 6, seed=3), loss, 1.0, by_sample=True)
    trainer = make_trainer(base, "a")
    (trained,) = trainer.forward_backward(Batch((segment,)))
    (logprobs,) = trainer.forward(Batch((segment,)))
    assert loss.value(segment.samples, logprobs, base.math) == trained.stats.loss


def test_an_overflowing_neighbour_changes_no_gradient() -> None:
    base = tiny.base(*OWN[1])
    alone, company = make_trainer(base, "a"), make_trainer(base)
    arena = inside.arena(company, "c")
    arena.set_masters(torch.full_like(arena.masters, 1e30))
    alone.forward_backward(Batch((make_segment("a"),)))
    company.forward_backward(Batch((make_segment("c"), make_segment("a"))))
    assert not torch.isfinite(gradient(company, "c")).all()
    assert same(gradient(company, "a"), gradient(alone, "a"))


@torch.no_grad()
def test_many_rows_have_the_bits_of_few(small: Any) -> None:
    """Products of 256 rows and more are cut otherwise than those of few."""
    slopes = torch.randn(256, small.info.vocab_size, generator=torch.Generator().manual_seed(0))
    assert same(small.through_head(slopes)[:3], small.through_head(slopes[:3]))
    crowd = [torch.arange(length) * 7 % small.info.vocab_size for length in (150, 3, 180)]
    positions = torch.cat([torch.arange(len(each)) for each in crowd])
    with small.routed(NoAdapters()):
        whole = small.hidden(torch.cat(crowd), positions, small.attention.packed([150, 3, 180]))
        alone = small.hidden(crowd[1], positions[150:153], small.attention.packed([3]))
    assert same(whole[150:153], alone)


# --- long passes ----------------------------------------------------------------------------------------------------------


def assert_threads_do_not_meet(name: str, dtype: str, repeats: int) -> None:
    """Long passes: threads are at other linears of other blocks each time. Too many threads for blocks share operations."""
    base, found = tiny.base(name, dtype), []
    trainer = make_trainer(base)
    for threads, names in ((1, "abc"), *((n, "abc") for n in (2, 3, 4) * repeats), (16, "a")):
        torch.set_num_threads(threads)
        for each in names:
            inside.arena(trainer, each).gradient.zero_()
        logprobs = [some for each in trainer.forward_backward(long_batch(names)) for some in each.logprobs]
        found.append([*(gradient(trainer, each) for each in names), torch.from_numpy(np.concatenate(logprobs))])
    for again in found[1:-1]:
        assert all(same(one, other) for one, other in zip(again, found[0], strict=True))
    assert same(found[-1][0], found[0][0])


@pytest.mark.parametrize(("name", "dtype"), few(LONG, LONG[0], LONG[-1]))
def test_threads_that_share_blocks_of_rows_change_no_bit(name: str, dtype: str) -> None:
    assert_threads_do_not_meet(name, dtype, repeats=1)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "dtype"), LONG)
def test_threads_that_share_blocks_of_rows_never_meet(name: str, dtype: str) -> None:
    assert_threads_do_not_meet(name, dtype, repeats=40)


# --- jobs -----------------------------------------------------------------------------------------------------------------


def test_on_policy(small: Any, tmp_path: Path, rewards: Path) -> None:
    """Trainer and sampler agree on every bit of every logprob."""
    jobs = [job("plain", rewards), job("warm", rewards, sampling={"temperature": 0.7}, adapter={"rank": 8})]
    assert run(small, tmp_path / "run", jobs).ok
    trained = [line for each in jobs for line in metrics(tmp_path / "run" / each["name"]) if line.get("tokens")]
    assert {line["logprob_gap"] for line in trained} == {0.0}


def test_what_computed_a_job_is_written_down(small: Any) -> None:
    assert small.info.processor == "motet exact"
    assert not small.info.inexact
    assert not small.info.notes


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cohere", "do not compute cohere"),
        ("qwen3", "multiple of 16"),
        ("lfm2", "lfm2, which has layers with a state"),
        ("gpt_oss", "gpt_oss, which has a mixture of experts of another kind"),
    ],
)
def test_a_base_that_is_not_covered_is_refused_before_its_weights_are_read(
    name: str, said: str, tmp_path: Path
) -> None:
    native_calls.directory()
    (tmp_path / "config.json").write_text((tiny.directory(name) / "config.json").read_text())
    with pytest.raises(BaseModelError, match=f"{said}.*set engine.kernels to torch"):
        load(str(tmp_path), EngineConfig(threads=1, kernels="native", block_size=tiny.BLOCK))


def test_a_setting_that_the_model_does_not_read_changes_nothing(tmp_path: Path) -> None:
    """Sizes are those of the weights: kernels would read and write beyond them."""
    shutil.copytree(tiny.directory("llama"), tmp_path / "base")
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"moe_intermediate_size": 112}))
    other = load(str(tmp_path / "base"), EngineConfig(threads=1, kernels="native", dtype="float32"))
    ids: tiny.Packed = [(None, tiny.tokens(37))]
    assert same(*tiny.packed_logits(other, ids), *tiny.packed_logits(tiny.base(*OWN[0]), ids))


def test_a_base_of_fewer_tokens_than_its_proof_stays_with_torch(tmp_path: Path) -> None:
    shutil.copytree(tiny.directory("llama"), tmp_path / "base")
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 21}))
    base = load(str(tmp_path / "base"), EngineConfig(threads=1))
    assert any("are proved on 22 tokens, and this base takes 21" in note for note in base.info.notes)
    with pytest.raises(BaseModelError, match=r"this base.*set engine\.kernels to torch"):
        compute_with(base, "native")


def test_adapters_on_experts_are_refused() -> None:
    base = tiny.base("qwen3_moe/native")
    with pytest.raises(AdapterError, match="own kernels have no adapters on experts"):
        base.adapter_layout(["experts"], 4)


def test_a_base_whose_linear_layers_are_apart_is_refused() -> None:
    base = tiny.load("llama")
    layer = next(iter(base.linears.values()))
    layer.fused = FusedLinears((layer.path,), layer.fused.frozen, layer.fused.sizes)
    with pytest.raises(BaseModelError, match=r"in one product.*set engine\.kernels to"):
        compute_with(base, "native")
    assert base.kernels is None


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"device": "cuda"}, "device is cuda"),
        ({"shard": 2}, "shard is 2"),
        ({"block_size": 24}, "no multiple of 16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(engine: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(
            {
                "base": "small",
                "run": str(tmp_path),
                "engine": {"kernels": "native", **engine},
                "jobs": [job("one", tmp_path / "rewards.py")],
            },
            "test",
        )


@pytest.mark.parametrize(
    ("token", "position", "block", "said"),
    [
        (tiny.VOCABULARY, 0, 1, "outside the vocabulary"),
        (3, 256, 1, "longest sequence"),
        (3, 0, 99, "a block that is not there"),
    ],
)
def test_the_kernels_check_their_bounds(token: int, position: int, block: int, said: str) -> None:
    base = tiny.base(*OWN[0])
    attention = base.attention.cached([Span(0, 1, [block])], KVCache(2, tiny.BLOCK, base.device))
    with base.routed(NoAdapters()), pytest.raises(RuntimeError, match=said):
        base.hidden(torch.tensor([token]), torch.tensor([position]), attention)


_BEYOND_MEMORY = """
import resource, torch
from motet.model.attention import Span
from motet.model.kv_cache import KVCache
from motet.model.lora import NoAdapters
from tests.support import tiny_models as tiny

base, one = tiny.base("llama/native"), torch.zeros(1, dtype=torch.long)
cache = KVCache(1, 1 << 16, base.device, clean=False)
block, keys = cache.take(1), 1 << 32
with base.routed(NoAdapters()):
    before = base.hidden(one, one, base.attention.cached([Span(0, 1, block)], cache))
    resource.setrlimit(resource.RLIMIT_AS, (keys * 4, -1))  # scores of two heads take twice as much
    try:
        base.hidden(one, one, base.attention.cached([Span(keys - 1, 1, block * (keys >> 16))], cache))
    except RuntimeError as error:
        print(error)
    assert torch.equal(base.hidden(one, one, base.attention.cached([Span(0, 1, block)], cache)), before)
"""


def test_a_pass_beyond_the_memory_is_refused_and_the_next_one_runs() -> None:
    done = subprocess.run([sys.executable, "-c", _BEYOND_MEMORY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "native kernels: there is not enough memory for a pass\n"), done.stderr
