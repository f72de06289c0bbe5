"""Passes of one sample that is longer than a limit compute their layers again: no bit differs, and others keep all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from motet.config import EngineConfig
from motet.core.batch import Batch, Segment
from motet.model.lora_model import LoraModel
from motet.training.memory import longest_sample, pass_memory
from motet.training.torch_trainer import TorchTrainer
from tests.support import native_calls
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.segments import REINFORCE, gradient, make_samples, make_segment, make_trainer

LIMIT = 100


def sample_of(length: int) -> Segment:
    return Segment("a", make_samples([(20, length - 20)], seed=length), REINFORCE, float(length))


def passes_of(base: LoraModel) -> list[Batch]:
    """One within the limit, two beyond it, and one of two adapters."""
    return [
        *(Batch((sample_of(length),)) for length in (LIMIT, LIMIT + 1, 150)),
        Batch((make_segment("b"), sample_of(30))),
    ]


def learned(trainer: TorchTrainer, batch: Batch) -> list[Any]:
    stats = [(one.stats, [some.tobytes() for some in one.logprobs]) for one in trainer.forward_backward(batch)]
    return [stats, *(gradient(trainer, name).numpy().tobytes() for name in "abc")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [
            (name, dtype)
            for name in ("llama", "gemma2", "opt", "falcon_h1", "qwen3_moe")
            for dtype in ("float32", "bfloat16")
        ],
        ("llama", "bfloat16"),
    ),
)
def test_a_pass_over_the_limit_alone_is_computed_again_with_the_same_bits(name: str, dtype: str) -> None:
    """By torch: its layers run once more in the backward pass."""
    base = tiny.load(name, dtype)
    kept, limited = make_trainer(tiny.base(name, dtype)), make_trainer(base, kept_tokens=LIMIT)
    calls, found = Counter[int](), []
    layers: Any = base.decoder.layers
    for module in layers[0].modules():
        module.register_forward_pre_hook(lambda module, _: calls.update([id(module)]))
    for batch in passes_of(base):
        calls.clear()
        assert learned(limited, batch) == learned(kept, batch)
        found.append(max(calls.values()))
        assert not any(layer.training for layer in layers)
    assert [calls // found[0] for calls in found] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    few([("llama/native", "float32"), ("llama/native-dpbf16", "bfloat16")], ("llama/native", "float32")),
)
def test_own_kernels_keep_less_of_a_pass_over_the_limit(name: str, dtype: str) -> None:
    native_calls.directory()
    base: Any = tiny.load(name, dtype)
    found = []
    for kept_tokens in (None, LIMIT, 0):
        trainer, sizes, each = make_trainer(base, kept_tokens=kept_tokens), [], []
        for batch in passes_of(base):
            base.kernels.spare = None
            each.append(learned(trainer, batch))
            sizes.append(len(base.kernels.spare))
        found.append((each, sizes))
    (whole, large), (limited, some), (again, small) = found
    assert limited == whole == again
    assert some == [large[0], small[1], small[2], large[3]]
    assert all(3 * less < more for less, more in zip(small, large, strict=True))


def test_the_limit_is_what_a_pass_of_several_samples_may_have() -> None:
    assert EngineConfig().kept_tokens == 2048
    assert EngineConfig(micro_batch_tokens=4096).kept_tokens == 4096
    assert EngineConfig(recompute=True).kept_tokens == 0
    assert EngineConfig(recompute=False).kept_tokens is None


def test_samples_beyond_the_limit_fit_where_they_are_computed_again() -> None:
    base = tiny.base("llama")
    whole, again = pass_memory(base, recompute=False), pass_memory(base, recompute=True)
    room = whole.of(LIMIT)
    assert longest_sample(base, None, room) == LIMIT < again.longest(room)
    assert longest_sample(base, LIMIT, room) == longest_sample(base, 0, room) == again.longest(room)
    assert longest_sample(base, LIMIT + 1, room) == LIMIT, "passes of several samples would not fit"


def test_a_base_that_cannot_compute_its_layers_again_keeps_all() -> None:
    base = tiny.load("ctrl")
    kept, limited = make_trainer(base, "a"), make_trainer(base, "a", kept_tokens=LIMIT)
    for trainer in (kept, limited):
        trainer.forward_backward(Batch((sample_of(150),)))
    assert torch.equal(gradient(kept, "a"), gradient(limited, "a"))
    assert longest_sample(base, LIMIT, 10**8) == longest_sample(base, None, 10**8)
