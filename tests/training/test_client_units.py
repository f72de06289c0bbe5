"""A client's data: how it is cut and ordered, what is beside it, and where it waits change no bit of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet.algorithms import datum
from motet.algorithms.client import ClientLoss, batch_of
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Batch, Sample, Segment
from motet.kernels.supported_bases import compute_with
from motet.model.load import load_base
from motet.model.lora_model import LoraModel
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside, native_calls
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.segments import gradient, make_segment, make_trainer, masters

pytestmark = pytest.mark.tier1

BASES = (
    *((name, dtype) for name in ("llama", "llama/native", "llama/native-dpbf16") for dtype in ("float32", "bfloat16")),
    ("gemma3", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("falcon_h1", "float32"),
    ("opt", "float32"),
)
RANKS = (1, 8, 64)
LENGTHS = (9, 64, 17, 3, 40, 5, 90, 33)
STEP = AdamW(1e-3, eps=1e-12, clip_norm=0.1)
WHOLE = (tuple(range(8)),)
CUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "4+4": (tuple(range(4)), tuple(range(4, 8))),
    "2+6": ((0, 1), tuple(range(2, 8))),
    "8x1": tuple((index,) for index in range(8)),
    "reordered": ((3, 7, 0, 1, 6, 5, 2, 4),),
    "reordered 5+3": ((6, 5, 2, 4, 3), (7, 0, 1)),
}


def data() -> tuple[Sample, ...]:
    """Data of all lengths, of which the first four begin alike."""
    numbers, found = np.random.default_rng(5), []
    for index, length in enumerate(LENGTHS):
        tokens = tiny.tokens(length + 1, seed=index).numpy()
        if index < 4:
            tokens[:2] = 7
        q, advantages = numbers.uniform(-6, -4, length), numbers.normal(size=length)
        found.append(datum(tokens[:-1], tokens[1:], logprobs=q, advantages=advantages))
    return tuple(found)


def trainer_of(base: LoraModel, rank: int, *others: str, **options: Any) -> TorchTrainer:
    trainer = make_trainer(base, "".join(others))
    for name, value in options.items():
        setattr(trainer, name, value)
    trainer.add_adapter("client", AdapterConfig(rank=rank, alpha=32), seed=1)
    inside.arena(trainer, "client").set_masters(tiny.adapter_masters(base, rank=rank, seed=4)[1])
    return trainer


def segments(samples: Sequence[Sample], loss: str = "ppo", budget: int = 150) -> tuple[Segment, ...]:
    return batch_of(samples, by_sample=True).segments("client", ClientLoss.of(loss), 1.0, budget)


def stepped(trainer: TorchTrainer, cut: Sequence[Sequence[int]], *beside: Segment) -> dict[str, Any]:
    """Everything a client sees of a step whose data it sends as `cut` says: twice, so that moments count too."""
    samples, seen = data(), dict[str, Any]()
    for step in range(2):
        total, logprobs = 0.0, dict[int, bytes]()
        for request in cut:
            found = [
                trainer.forward_backward(Batch((*beside, one)))[-1] for one in segments([samples[i] for i in request])
            ]
            total += sum(one.stats.loss for one in found)
            values = [value.tobytes() for one in found for value in one.logprobs]
            logprobs |= dict(zip(request, values, strict=True))
        flat = gradient(trainer, "client")
        assert flat.any()
        seen[f"{step}"] = (total, sorted(logprobs.items()), flat.numpy().tobytes(), trainer.optim_step("client", STEP))
    return seen | {"masters": masters(trainer, "client").numpy().tobytes()}


@pytest.mark.parametrize("rank", few(RANKS, 8))
@pytest.mark.parametrize(("name", "dtype"), few(BASES, BASES[1], BASES[3], BASES[2], BASES[-3]))
def test_cuts_and_orders_of_a_clients_data_change_no_bit(name: str, dtype: str, rank: int) -> None:
    base = tiny.base(name, dtype)
    expected = stepped(trainer_of(base, rank), WHOLE)
    for cut, requests in CUTS.items():
        assert stepped(trainer_of(base, rank), requests) == expected, cut
    beside = make_segment("b"), make_segment("c")
    assert stepped(trainer_of(base, rank, "b", "c"), CUTS["2+6"], *beside) == expected, "in company"


@pytest.mark.parametrize("parking", [True, False], ids=["disk", "memory"])
@pytest.mark.parametrize("name", ["llama", "llama/native"])
def test_a_gradient_that_waits_is_parked_and_saved_as_whole_numbers(name: str, parking: bool, tmp_path: Path) -> None:
    base, parts = tiny.base(name, "bfloat16"), [segments([one])[0] for one in data()]
    whole, first, second = (trainer_of(base, 8) for _ in range(3))
    for one in segments(data(), budget=1000):
        whole.forward_backward(Batch((one,)))
    for one in reversed(parts[3:]):
        first.forward_backward(Batch((one,)))
        arena = inside.arena(first, "client")
        arena.park(tmp_path if parking else None)
        arena.bring_in()
    first.save_adapter("client", tmp_path, optimizer=True)
    second.load_adapter("client", tmp_path, optimizer=True)
    for one in parts[:3]:
        second.forward_backward(Batch((one,)))
    assert torch.equal(gradient(whole, "client"), gradient(second, "client"))
    assert whole.optim_step("client", STEP) == second.optim_step("client", STEP)
    assert torch.equal(masters(whole, "client"), masters(second, "client"))


def test_a_gradient_in_fp32_of_an_older_release_waits_for_its_step_too(tmp_path: Path) -> None:
    base, older = tiny.base("llama/native"), replace(segments(data())[0], by_sample=False)
    first, second = trainer_of(base, 8), trainer_of(base, 8)
    first.forward_backward(Batch((older,)))
    first.save_adapter("client", tmp_path, optimizer=True)
    waits = gradient(first, "client")
    second.load_adapter("client", tmp_path, optimizer=True)
    assert torch.equal(gradient(second, "client"), waits)
    for trainer in (first, second):
        trainer.forward_backward(Batch(segments(data()[:2])))
    assert torch.equal(gradient(first, "client"), gradient(second, "client"))
    assert not torch.equal(gradient(first, "client"), waits)


@pytest.mark.parametrize("name", ["llama", "llama/native"])
def test_a_datum_that_is_not_finite_spoils_the_step_of_its_model_alone(name: str) -> None:
    base, other = tiny.base(name), make_segment("b")
    trainer, alone = trainer_of(base, 8, "b"), trainer_of(base, 8, "b")
    bad = replace(data()[2], advantages=np.full_like(data()[2].advantages, np.nan))
    before = masters(trainer, "client")
    trainer.forward_backward(Batch((*segments([data()[0], bad, data()[1]]), other)))
    alone.forward_backward(Batch((other,)))
    stats = trainer.optim_step("client", STEP)
    assert stats.skipped
    assert np.isnan(stats.grad_norm)
    assert torch.equal(masters(trainer, "client"), before)
    assert torch.equal(gradient(trainer, "b"), gradient(alone, "b"))
    assert stepped(trainer, WHOLE) == stepped(trainer_of(base, 8), WHOLE), "nothing of it is left"


@pytest.mark.parametrize("name", ["llama", "llama/native"])
@pytest.mark.parametrize("size", [2.0**17.5, 2.0**18, float("nan"), float("inf")])
def test_numbers_that_do_not_fit_make_the_whole_gradient_not_finite(name: str, size: float) -> None:
    """2¹⁷·⁵ fits once, and not with eight units."""
    base = tiny.base(name)
    trainer = trainer_of(base, 8)
    for one in segments(data()):
        trainer.forward_backward(Batch((one,)))
    arena = inside.arena(trainer, "client")
    assert torch.isfinite(arena.gradient).all()
    arena.sums.add_unit(arena.sums.flat[5:6], torch.tensor([size]))
    assert torch.isnan(arena.gradient).all()


@pytest.mark.parametrize("name", ["llama", "llama/native"])
def test_whole_numbers_and_fp32_agree_and_both_are_clipped(name: str) -> None:
    base, found = tiny.base(name), []
    for by_sample in (False, True):
        trainer = trainer_of(base, 8)
        for one in segments(data()):
            trainer.forward_backward(Batch((replace(one, by_sample=by_sample),)))
        before, arena = gradient(trainer, "client"), inside.arena(trainer, "client")
        assert trainer.optim_step("client", STEP).grad_norm > STEP.clip_norm
        mean, _ = arena.state
        assert float(mean.norm()) == pytest.approx((1 - STEP.betas[0]) * STEP.clip_norm, rel=1e-4)
        found.append((before, mean))
    for fp32, whole in zip(*found, strict=True):
        assert float((whole - fp32).norm()) <= 1e-5 * float(fp32.norm())


@pytest.mark.soak
@pytest.mark.smollm2
@pytest.mark.parametrize("length", [64, 257])
@pytest.mark.usefixtures("smollm2_dir")
def test_cuts_and_orders_change_no_bit_of_smollm2(length: int) -> None:
    """Data of one block of 64, and of four and a token; two begin alike."""
    base = load_base("smollm2", dtype="bfloat16", device="cpu")
    native_calls.directory()
    compute_with(base, "native")
    numbers, samples = np.random.default_rng(length), list[Sample]()
    for index in range(4):
        tokens = numbers.integers(3, base.info.vocab_size, length + 1 - index)
        tokens[: length // 2 * (index < 2)] = 7
        samples.append(datum(tokens[:-1], tokens[1:], weights=numbers.normal(size=len(tokens) - 1)))
    found = set[bytes]()
    for cut in (((0, 1, 2, 3),), ((2, 0), (3, 1)), ((3,), (1,), (2,), (0,))):
        trainer = TorchTrainer(base, slots=1)
        trainer.add_adapter("client", AdapterConfig(rank=16, alpha=32), seed=1)
        inside.arena(trainer, "client").set_masters(tiny.adapter_masters(base, rank=16, seed=4)[1])
        for request in cut:
            for one in segments([samples[index] for index in request], "cross_entropy", budget=4 * length):
                trainer.forward_backward(Batch((one,)))
        flat = gradient(trainer, "client")
        assert torch.isfinite(flat).all()
        assert flat.any()
        stats = trainer.optim_step("client", STEP)
        found.add(flat.numpy().tobytes() + masters(trainer, "client").numpy().tobytes() + repr(stats).encode())
    assert len(found) == 1
