"""Gradients: those of `peft` and plain PyTorch, bit for bit the same in any company, and never another adapter's."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from motet.algorithms import Grpo, Gspo
from motet.algorithms.supervised import Supervised
from motet.config import AdapterConfig, EngineConfig
from motet.core.batch import AdamW, Batch, Sample, Segment, shared_prefixes, shared_prompts
from motet.core.errors import AdapterError, BaseModelError
from motet.hosts.launch import load
from motet.training import torch_trainer
from motet.training.arena import OPTIMIZER
from motet.training.head import HEAD_ROWS
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few, paired
from tests.support.segments import (
    ADAMW,
    LR,
    REINFORCE,
    branching_samples,
    gradient,
    make_samples,
    make_segment,
    make_trainer,
    masters,
    plain_loss,
    run_steps,
    sampler_logprobs,
)

pytestmark = pytest.mark.bits

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
DTYPES = ("float32", "bfloat16")
OWN = ("llama/native", "llama/native-dpbf16")
"""Computed by own kernels."""
SHARING_EVERY_TIME = ("llama", "lfm2", *OWN)
SHARING = (*SHARING_EVERY_TIME, "gemma2", "qwen2", "qwen3_5", "falcon_h1")
"""Bases whose samples share rows."""


# --- against peft and plain PyTorch -----------------------------------------------------------------------------------


PEFTS = (*tiny.DENSE, *tiny.HYBRID_IN_PEFT, "qwen3_moe", "llama4")


@pytest.mark.parametrize("name", few(PEFTS, "llama", "minicpm3", "gemma3n", "falcon_h1", "qwen3_moe"))
def test_gradients_and_steps_equal_peft(name, tmp_path):
    """Gradients within 5e-5 of the largest, weights after two AdamW steps within 1e-3 of a step's length.

    Of a stock mixer that takes chunks the last digits are wrong: in fp64 they are Motet's.
    """
    base = tiny.base(name)
    near, step = (2e-3, 5e-2) if base.stateful else (5e-5, 1e-3)
    trainer, segment = make_trainer(base), make_segment("a")
    trainer.save_adapter("a", tmp_path, optimizer=False)
    model = PeftModel.from_pretrained(tiny.stock(name), tmp_path, is_trainable=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(parameters, lr=LR, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=0.1)
    layout = inside.arena(trainer, "a").layout
    for _ in range(2):
        adamw.zero_grad()
        loss = plain_loss(model, segment)
        loss.backward()
        (trained, _) = trainer.forward_backward(Batch((segment, make_segment("b"))))
        stats = trained.stats
        assert stats.loss == pytest.approx(loss.item(), rel=near)
        theirs = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
        for path, pair in layout.views(gradient(trainer, "a")).items():
            for side, ours in zip("AB", pair, strict=True):
                want = theirs[f"base_model.model.{path}.lora_{side}.default.weight"]
                assert want is not None
                assert float((ours.t() - want).abs().max()) <= near * float(want.abs().max()), (path, side)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, ADAMW.clip_norm))
        adamw.step()
        done = trainer.optim_step("a", ADAMW)
        assert done.grad_norm == pytest.approx(norm, rel=near)
        assert norm > ADAMW.clip_norm, "this test is about clipped steps too"
        for path, pair in layout.views(masters(trainer, "a")).items():
            for side, ours in zip("AB", pair, strict=True):
                want = model.get_parameter(f"base_model.model.{path}.lora_{side}.default.weight").detach()
                assert float((ours.t() - want).abs().max()) <= step * LR, (path, side)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_waits_for_its_step_is_saved_with_the_moments(dtype: str, tmp_path: Path) -> None:
    base = tiny.base("llama", dtype)
    whole, first = make_trainer(base), make_trainer(base)
    for trainer in (whole, first):
        trainer.forward_backward(Batch((make_segment("a"),)))
        trainer.optim_step("a", ADAMW)
        trainer.forward_backward(Batch((make_segment("a"),)))
    first.save_adapter("a", tmp_path, optimizer=True)
    second = make_trainer(base)
    second.load_adapter("a", tmp_path, optimizer=True)
    for trainer in (whole, second):
        trainer.forward_backward(Batch((make_segment("a"),)))
        trainer.optim_step("a", ADAMW)
    assert torch.equal(masters(whole, "a"), masters(second, "a"))
    whole.save_adapter("a", tmp_path, optimizer=True)
    with safe_open(str(tmp_path / "optimizer.safetensors"), framework="pt") as file:
        assert "gradient" not in file.keys(), "nothing waits"  # noqa: SIM118


def test_each_step_brings_its_own_adamw(tmp_path: Path) -> None:
    base = tiny.base("llama")
    trainer = make_trainer(base)
    trainer.save_adapter("a", tmp_path, optimizer=False)
    model = PeftModel.from_pretrained(tiny.stock("llama"), tmp_path, is_trainable=True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    theirs = torch.optim.AdamW(parameters)
    for own in (AdamW(1e-3, (0.5, 0.6), 1e-3, 0.2), AdamW(3e-3, (0.9, 0.99), 1e-6, 0.0, clip_norm=100.0)):
        theirs.param_groups[0].update(lr=own.lr, betas=own.betas, eps=own.eps, weight_decay=own.weight_decay)
        theirs.zero_grad()
        plain_loss(model, make_segment("a")).backward()
        torch.nn.utils.clip_grad_norm_(parameters, own.clip_norm)
        theirs.step()
        trainer.forward_backward(Batch((make_segment("a"),)))
        trainer.optim_step("a", own)
    for path, pair in inside.arena(trainer, "a").layout.views(masters(trainer, "a")).items():
        for side, ours in zip("AB", pair, strict=True):
            want = model.get_parameter(f"base_model.model.{path}.lora_{side}.default.weight").detach()
            assert float((ours.t() - want).abs().max()) <= 1e-3 * 3e-3, (path, side)


# --- company ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "lfm2", *OWN])  # every family: test_bases.py
def test_packed_batch_equals_each_adapter_alone_bitwise(name, dtype):
    base = tiny.base(name, dtype)
    segments = {
        "a": make_segment("a", Grpo(), 1.0),
        "b": make_segment("b", Gspo(), 1.0),
        "c": make_segment("c"),
    }
    together = run_steps(make_trainer(base), [Batch(tuple(segments[each] for each in "cab"))])
    for each, segment in segments.items():
        assert run_steps(make_trainer(base, each), [Batch((segment,))])[each] == together[each]


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_few_rows_equal_each_alone_bitwise(dtype):
    """Kernels treat fewer than four rows, and some other small numbers, in ways of their own."""
    base, lengths = tiny.base("llama", dtype), {"a": [(1, 1)], "b": [(2, 1), (1, 1)], "c": [(3, 7)]}
    segments = {
        name: replace(make_segment(name), samples=make_samples(shape, ord(name))) for name, shape in lengths.items()
    }
    together = run_steps(make_trainer(base), [Batch(tuple(segments[name] for name in "abc"))])
    for name, segment in segments.items():
        assert run_steps(make_trainer(base, name), [Batch((segment,))])[name] == together[name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_with_equal_segments_equal_each_alone_bitwise(dtype):
    """Equal lengths make one call of all their sums; unequal ones of the same layout share products, but not sums."""
    base = tiny.base("llama", dtype)
    names, shape = ("d", "e", "f", "g"), AdapterConfig(rank=8)
    lengths = {"d": [(9, 11), (5, 15)], "e": [(7, 13), (8, 12)], "f": [(20, 20)], "g": [(16, 18)]}
    segments = {
        name: replace(make_segment("a"), adapter=name, samples=make_samples(lengths[name], ord(name))) for name in names
    }

    def trained(*chosen: str) -> dict[str, list[bytes]]:
        trainer = TorchTrainer(base, slots=4)
        for name in chosen:
            trainer.add_adapter(name, shape, ord(name))
        return run_steps(trainer, [Batch(tuple(segments[name] for name in chosen))])

    together, three = trained("f", "d", "e", "g"), trained("d", "e", "f")
    for name in names:
        assert together[name] == trained(name)[name]
        assert name == "g" or together[name] == three[name]


def overflow(trainer: TorchTrainer, name: str) -> None:
    arena = inside.arena(trainer, name)
    arena.set_masters(torch.full_like(arena.masters, 1e30))


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflowing_neighbour_is_skipped_and_changes_nothing(dtype):
    base = tiny.base("gemma2", dtype)
    alone = run_steps(make_trainer(base, "a"), [Batch((make_segment("a"),))])["a"]
    trainer = make_trainer(base)
    batch = Batch((make_segment("b"), make_segment("a"), make_segment("c")))
    run_steps(trainer, [Batch((make_segment("b"),))], steps=1)  # b has moments by now
    overflow(trainer, "c")
    arena = inside.arena(trainer, "b")
    count, kept = arena.count, [vector.clone() for vector in arena.state]
    weights, before = trainer.weights("b"), masters(trainer, "b")
    inside.arena(trainer, "b").gradient[3] = float("inf")
    seen = run_steps(trainer, [batch], steps=1)
    assert seen["a"] == alone[: len(seen["a"])]
    for name in "bc":
        stats = trainer.optim_step(name, ADAMW) if name not in seen else seen[name][3]
        assert stats.skipped
        assert not np.isfinite(stats.grad_norm)
    assert trainer.weights("b") is weights, "the version in use stays"
    assert torch.equal(masters(trainer, "b"), before)
    assert arena.count == count
    assert all(torch.equal(*vectors) for vectors in zip(kept, arena.state, strict=True)), "moments and count stay"
    assert not gradient(trainer, "b").any(), "the gradient is cleared"
    assert run_steps(trainer, [batch], steps=1)["a"] == alone[len(seen["a"]) :]
    assert not trainer.optim_step("b", ADAMW).skipped


def test_clipping_is_per_adapter():
    """A neighbour's large gradient does not shrink mine."""
    trainer = make_trainer(tiny.base("llama"))
    for name, size in {"a": 100.0, "b": 1e-3}.items():
        inside.arena(trainer, name).gradient.normal_(generator=torch.Generator().manual_seed(1)).mul_(size)
    large, small = trainer.optim_step("a", ADAMW), trainer.optim_step("b", ADAMW)
    assert large.grad_norm > 1000 * ADAMW.clip_norm > 1000 * small.grad_norm
    first_moment = {name: inside.arena(trainer, name).state[0] for name in "ab"}
    keep = 1 - ADAMW.betas[0]
    assert float(first_moment["a"].norm()) == pytest.approx(keep * ADAMW.clip_norm, rel=1e-4)
    assert float(first_moment["b"].norm()) == pytest.approx(keep * small.grad_norm, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_micro_batches_add_up_to_the_whole(name):
    base, segment = tiny.base(name), make_segment("c")
    whole, parts = make_trainer(base, "c"), make_trainer(base, "c")
    stats = whole.forward_backward(Batch((segment,)))[0].stats
    pieces = [replace(segment, samples=(sample,)) for sample in segment.samples]
    sums = [parts.forward_backward(Batch((piece,)))[0].stats for piece in pieces]
    ours, theirs = gradient(parts, "c"), gradient(whole, "c")
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    assert sum(one.loss for one in sums) == pytest.approx(stats.loss, rel=1e-5)
    assert sum(one.tokens for one in sums) == stats.tokens == 52


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", few(["llama", "gemma2", "opt", "phimoe", "qwen3_5", "falcon_h1"], "opt", "phimoe"))
def test_recomputing_changes_no_bit(name, dtype):
    """OPT drops out inside its layers when it is in training mode, Phi-MoE adds noise to what its routers see."""
    batch = Batch((make_segment("a"), make_segment("c")))
    plain = run_steps(make_trainer(tiny.base(name, dtype)), [batch])
    base = tiny.load(name, dtype)
    trainer = make_trainer(base, recompute=True)
    assert run_steps(trainer, [batch]) == plain
    ids = tiny.tokens(37)
    assert torch.equal(
        tiny.packed_logits(base, [(None, ids)])[0], tiny.packed_logits(tiny.base(name, dtype), [(None, ids)])[0]
    )


def test_a_base_that_cannot_recompute_is_refused():
    with pytest.raises(BaseModelError, match=r"cannot compute its layers.*to false"):
        make_trainer(tiny.load("ctrl"), recompute=True)


def test_unknown_adapter_leaves_gradients_alone():
    trainer = make_trainer(tiny.base("llama"), "a")
    with pytest.raises(AdapterError, match="no adapter 'b'"):
        trainer.forward_backward(Batch((make_segment("a"), make_segment("b"))))
    assert not gradient(trainer, "a").any()


# --- one slot after another, saved and loaded ---------------------------------------------------------------------------


def test_reused_slot_starts_from_nothing(tmp_path):
    base = tiny.base("llama")
    fresh, reused = (TorchTrainer(base, slots=1) for _ in range(2))
    shape = AdapterConfig(rank=8, alpha=16)
    reused.add_adapter("a", shape, seed=1)
    run_steps(reused, [Batch((make_segment("a"),))])
    reused.forward_backward(Batch((make_segment("a"),)))  # leaves a gradient behind
    reused.remove_adapter("a")
    for trainer in (fresh, reused):
        trainer.add_adapter("a", shape, seed=2)
    assert torch.equal(masters(fresh, "a"), masters(reused, "a"))
    assert not gradient(reused, "a").any()
    batch = Batch((make_segment("a"),))
    assert run_steps(fresh, [batch]) == run_steps(reused, [batch])


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_and_loaded_goes_on_with_the_same_bits(dtype, tmp_path):
    base, batch = tiny.base("llama", dtype), Batch((make_segment("a"),))
    straight, first = make_trainer(base, "a"), make_trainer(base, "a")
    for trainer in (straight, first):
        run_steps(trainer, [batch])
    first.save_adapter("a", tmp_path, optimizer=True)
    second = make_trainer(base, "a")
    second.load_adapter("a", tmp_path, optimizer=True)
    assert torch.equal(second.weights("a").flat, straight.weights("a").flat)
    assert run_steps(second, [batch]) == run_steps(straight, [batch])
    second.load_adapter("a", tmp_path, optimizer=False)
    assert not inside.arena(second, "a").state, "a start from a directory has fresh moments"


def test_optimizer_state_before_the_first_step(tmp_path):
    base, batch = tiny.base("llama"), Batch((make_segment("a"),))
    first, second = make_trainer(base, "a"), make_trainer(base, "a")
    first.save_adapter("a", tmp_path, optimizer=True)
    second.load_adapter("a", tmp_path, optimizer=True)
    assert run_steps(second, [batch]) == run_steps(first, [batch])


def test_saving_beside_the_device_takes_one_torch_thread(tmp_path, monkeypatch):
    """A new thread takes over the device's number of threads, and OpenMP would keep a second team for it."""
    trainer, seen = make_trainer(tiny.base("llama"), "a"), []

    def watched(*args: Any) -> None:
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(torch_trainer, "write_adapter", watched)
    torch.set_num_threads(2)  # as the device does while it trains
    saving = threading.Thread(target=lambda: trainer.save_adapter("a", tmp_path, optimizer=True))
    saving.start()
    saving.join()
    assert seen == [1]
    assert torch.get_num_threads() == 2, "it is another thread's number"


def test_optimizer_state_that_does_not_fit(tmp_path):
    trainer = make_trainer(tiny.base("llama"))
    for name in "ac":
        (tmp_path / name).mkdir()
        trainer.save_adapter(name, tmp_path / name, optimizer=True)
    file = tmp_path / "a" / OPTIMIZER
    file.write_bytes((tmp_path / "c" / OPTIMIZER).read_bytes())
    with pytest.raises(AdapterError, match="belongs to an adapter of another shape"):
        trainer.load_adapter("a", tmp_path / "a", optimizer=True)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(AdapterError, match="cannot be read"):
        trainer.load_adapter("a", tmp_path / "a", optimizer=True)
    file.unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        trainer.load_adapter("a", tmp_path / "a", optimizer=True)


def test_an_adapter_that_cannot_be_loaded_whole_changes_nothing(tmp_path):
    base, batch = tiny.base("llama"), Batch((make_segment("a"),))
    trainer, untouched = make_trainer(base, "a"), make_trainer(base, "a")
    trainer.save_adapter("a", tmp_path, optimizer=False)
    for one in (trainer, untouched):
        run_steps(one, [batch])
        one.forward_backward(batch)
    with pytest.raises(AdapterError, match="cannot be read"):
        trainer.load_adapter("a", tmp_path, optimizer=True)
    for one in (trainer, untouched):
        one.optim_step("a", ADAMW)
    assert torch.equal(masters(trainer, "a"), masters(untouched, "a"))


# --- logprobs without gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "lfm2", *OWN])  # every family: test_bases.py
def test_forward_equals_the_sampler_bitwise(name, dtype):
    base = tiny.base(name, dtype)
    trainer, segments = make_trainer(base), tuple(make_segment(each) for each in "abc")
    own, plain = trainer.forward(Batch(segments)), trainer.forward(Batch(segments), base=True)
    for segment, with_adapter, without in zip(segments, own, plain, strict=True):
        for sample, mine, reference in zip(segment.samples, with_adapter, without, strict=True):
            assert np.array_equal(mine, sampler_logprobs(base, trainer.weights(segment.adapter), sample, 0.8))
            assert np.array_equal(reference, sampler_logprobs(base, None, sample, 0.8))
            assert not np.array_equal(mine, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_in_chunks(dtype):
    """More than HEAD_ROWS tokens: logprobs equal the sampler's bit for bit, the gradient that of two halves."""
    base = tiny.base("llama", dtype)
    samples = make_samples([(3, 200), (10, 130)], seed=5)
    segment = Segment("a", samples, REINFORCE, 330.0)
    assert sum(sample.n_trainable for sample in samples) > HEAD_ROWS
    whole, halves = make_trainer(base, "a"), make_trainer(base, "a")
    for sample, found in zip(samples, whole.forward(Batch((segment,)))[0], strict=True):
        assert np.array_equal(found, sampler_logprobs(base, whole.weights("a"), sample, 1.0))
    stats = whole.forward_backward(Batch((segment,)))[0].stats
    parts = [halves.forward_backward(Batch((replace(segment, samples=(each,)),)))[0].stats for each in samples]
    assert stats.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-5)
    ours, theirs = gradient(whole, "a"), gradient(halves, "a")
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


@pytest.mark.parametrize("name", OWN)
def test_segments_in_common_head_products_keep_their_temperatures(name):
    """More than HEAD_ROWS tokens of three segments: each has the bits that it has alone."""
    base, trainer = tiny.base(name), make_trainer(tiny.base(name))
    segments = tuple(
        Segment(adapter, make_samples([(3, 110)], seed=seed), REINFORCE, 110.0, temperature)
        for seed, (adapter, temperature) in enumerate({"a": 0.5, "b": 1.5, "c": 1.5}.items())
    )
    for segment, (found,) in zip(segments, trainer.forward(Batch(segments)), strict=True):
        weights, (sample,) = trainer.weights(segment.adapter), segment.samples
        assert np.array_equal(found, sampler_logprobs(base, weights, sample, segment.temperature))
    trainer.forward_backward(Batch(segments))
    for segment in segments:
        alone = make_trainer(base)
        alone.forward_backward(Batch((segment,)))
        assert torch.equal(gradient(trainer, segment.adapter), gradient(alone, segment.adapter))


def test_a_published_version_is_never_written_again(tmp_path: Path):
    trainer = make_trainer(tiny.base("llama"), "a")
    version = trainer.weights("a")
    bytes_before = version.flat.clone()
    run_steps(trainer, [Batch((make_segment("a"),))])
    assert trainer.weights("a") is not version
    assert torch.equal(version.flat, bytes_before)
    assert not torch.equal(trainer.weights("a").flat, bytes_before)


# --- shared prompts -----------------------------------------------------------------------------------------------------


def group_samples(prompt: int, completions: Sequence[int], seed: int) -> tuple[Sample, ...]:
    """Samples that begin with the same prompt."""
    samples = make_samples([(prompt, length) for length in completions], seed=seed)
    head = samples[0].token_ids[:prompt]
    return tuple(replace(each, token_ids=np.concatenate([head, each.token_ids[prompt:]])) for each in samples)


@pytest.mark.parametrize(
    ("name", "dtype", "prompt"),
    few(itertools.product(SHARING, DTYPES, [1, 13, 16, 40]), *paired(SHARING_EVERY_TIME, DTYPES, [1, 16])),
)
def test_shared_prompts_keep_logprobs_and_gradients(name, dtype, prompt):
    """Logprobs equal those of whole samples bit for bit, gradients within rounding; two groups, two adapters, one alone."""
    base = tiny.base(name, dtype)
    groups = [group_samples(prompt, lengths, seed) for seed, lengths in enumerate([(5, 30, 1), (9, 2), (7,)])]
    segments = (
        Segment("a", groups[0] + groups[1], REINFORCE, 20.0, 0.8),
        Segment("b", groups[1] + groups[2], REINFORCE, 20.0),
    )
    shared, whole = make_trainer(base, "ab"), make_trainer(base, "ab")
    whole._share_prompts = False
    logprobs = [trainer.forward(Batch(segments)) for trainer in (shared, whole)]
    for ours, theirs in zip(*logprobs, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for trainer in (shared, whole):
        trainer.forward_backward(Batch(segments))
    for each in "ab":
        ours, theirs = gradient(shared, each), gradient(whole, each)
        tolerance = 1e-5 if dtype == "float32" else 3e-2
        assert float(theirs.abs().max()) > 0
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", few(SHARING, *SHARING_EVERY_TIME))
def test_shared_prefixes_keep_logprobs_and_gradients(name, dtype):
    """Of branches that part one after another: logprobs have whole samples' bits, gradients agree, alone as in company."""
    base = tiny.base(name, dtype)
    segments = [
        Segment(adapter, branching_samples(prompt, prompt) + group_samples(6, (3, 9), 1), REINFORCE, 20.0, 0.8, True)
        for adapter, prompt in (("a", 11), ("b", 5))
    ]
    assert segments[0].shared == (0, 36, 20, 23, 0, 6)
    nested, alone, whole = (make_trainer(base, "ab") for _ in range(3))
    whole._share_prompts = False
    logprobs = [trainer.forward(Batch(tuple(segments))) for trainer in (nested, whole)]
    for ours, theirs in zip(*logprobs, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for trainer in (nested, whole):
        trainer.forward_backward(Batch(tuple(segments)))
    for segment in segments:
        alone.forward_backward(Batch((segment,)))
    for each in "ab":
        ours, theirs = gradient(nested, each), gradient(whole, each)
        assert torch.equal(ours, gradient(alone, each))
        tolerance = 1e-5 if dtype == "float32" else 3e-2
        assert float(theirs.abs().max()) > 0
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


def test_prefixes_are_shared_up_to_the_last_token():
    """Which is each sample's own, so that one that begins as the one before, or is the same, still has a row."""
    (sample,) = make_samples([(4, 6)], seed=1)
    shorter = replace(sample, token_ids=sample.token_ids[:7], loss_mask=sample.loss_mask[:7])
    assert shared_prefixes((sample, sample, shorter, sample)) == (0, 9, 6, 7)
    assert shared_prefixes(()) == ()


def test_prompts_are_shared_only_where_they_are_the_same():
    same = group_samples(6, (3, 4), seed=1)
    other = group_samples(6, (3,), seed=2)
    longer = group_samples(7, (3,), seed=1)
    assert shared_prompts((*same, *other, *same)) == (0, 6, 0, 0, 6)
    assert shared_prompts((*same, *longer)) == (0, 6, 0)
    assert [shared_prompts(group_samples(prompt, (3, 4), seed=1)) for prompt in (0, 1)] == [(0, 0), (0, 1)]
    assert shared_prompts(()) == ()


# --- a real base, and lengths as jobs have them --------------------------------------------------------------------------


def some_samples(source: random.Random, vocabulary: int) -> tuple[Sample, ...]:
    """Two groups of four, each with a prompt that they share and answers of other lengths."""
    found = []
    for _ in range(2):
        prompt = [source.randrange(100, vocabulary) for _ in range(source.randrange(8, 60))]
        for _ in range(4):
            answer = [source.randrange(100, vocabulary) for _ in range(source.randrange(1, 70))]
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            found.append(
                Sample(
                    token_ids=np.array(prompt + answer, np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
                    advantages=np.where(mask, source.uniform(-1, 1), 0.0).astype(np.float32),
                    versions=np.zeros(len(mask), np.int32),
                )
            )
    return tuple(found)


@pytest.mark.parametrize(
    ("rounds", "kernels", "dtype"),
    few(
        itertools.product([2, 8], ["torch", "auto"], ["float32", "bfloat16"]),
        (2, "torch", "float32"),
        (2, "auto", "bfloat16"),
    ),
)
def test_gradients_do_not_depend_on_how_long_the_neighbours_are(rounds, kernels, dtype):
    """Company decides how far sequences are padded and which of them share a product; no sum may show it."""
    base = load("small", EngineConfig(dtype=dtype, threads=1, block_size=32, kernels=kernels))
    trainer = TorchTrainer(base, slots=4)
    names = ("a", "b", "c", "d")
    for name in names:
        trainer.add_adapter(name, AdapterConfig(rank=16, alpha=32), seed=ord(name))
        inside.arena(trainer, name).set_masters(tiny.adapter_masters(base, rank=16, seed=ord(name))[1])

    def gradients(segments: Sequence[Segment]) -> dict[str, torch.Tensor]:
        trainer.forward_backward(Batch(tuple(segments)))
        found = {segment.adapter: gradient(trainer, segment.adapter) for segment in segments}
        for segment in segments:
            inside.arena(trainer, segment.adapter).gradient.zero_()
        return found

    source = random.Random(0)
    for _ in range(rounds):
        segments = [
            Segment(name, some_samples(source, base.info.vocab_size), REINFORCE, 64.0)
            for name in source.sample(names, 3)
        ]
        together = gradients(segments)
        for segment in segments:
            assert torch.equal(gradients([segment])[segment.adapter], together[segment.adapter])


def soft_samples(base: Any, k: int) -> tuple[Sample, ...]:
    """Samples with K weighted targets at each trainable place, none of which need be the token that stands there."""
    numbers = np.random.default_rng(3)
    found = []
    for sample in make_samples(((4, 5), (3, 6)), seed=9):
        shape = (sample.n_tokens, k)
        targets = numbers.integers(0, base.info.vocab_size, shape).astype(np.int32)
        found.append(replace(sample, targets=targets, weights=numbers.uniform(0, 1, shape).astype(np.float32)))
    return tuple(found)


def test_soft_targets_are_as_many_samples_with_one_target_each() -> None:
    """[T, K]: one pass over each sequence has the logprobs and the gradient of K passes, one for each target."""
    base = tiny.base("llama")
    samples, loss = soft_samples(base, 3), Supervised()
    together, apart = make_trainer(base, "a"), make_trainer(base, "a")
    (trained,) = together.forward_backward(Batch((Segment("a", samples, loss, 10.0),)))
    assert [found.shape for found in trained.logprobs] == [(9, 3), (9, 3)]
    for k in range(3):
        one = tuple(
            replace(sample, targets=sample.targets[:, k], weights=sample.weights[:, k])  # type: ignore[index]
            for sample in samples
        )
        (alone,) = apart.forward_backward(Batch((Segment("a", one, loss, 10.0),)))
        for found, wanted in zip(trained.logprobs, alone.logprobs, strict=True):
            np.testing.assert_array_equal(found[:, k], wanted)
    torch.testing.assert_close(gradient(together, "a"), gradient(apart, "a"), rtol=1e-4, atol=1e-6)


def test_cross_entropy_is_minus_the_weighted_logprob() -> None:
    base = tiny.base("llama")
    samples = make_samples(((4, 5), (3, 6)), seed=9)
    weights = np.linspace(0.1, 1, 9, dtype=np.float32)
    samples = tuple(replace(sample, weights=weights) for sample in samples)
    trainer = make_trainer(base, "a")
    (trained,) = trainer.forward_backward(Batch((Segment("a", samples, Supervised(), 4.0),)))
    wanted = -sum(
        float((found * weights)[sample.loss_mask].sum())
        for found, sample in zip(trained.logprobs, samples, strict=True)
    )
    assert trained.stats.loss == pytest.approx(wanted / 4.0, rel=1e-5)
    with pytest.raises(ValueError, match="has no loss"):
        trainer.forward_backward(Batch((Segment("a", samples),)))
