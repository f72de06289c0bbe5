"""What a trainer reads of its files and of its samples, without a base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from motet.algorithms import datum
from motet.config import AdapterConfig
from motet.core.batch import AdamW, Optimizer, Segment
from motet.core.errors import AdapterError
from motet.kernels.cpu import library
from motet.kernels.cpu.own_math import OwnMath
from motet.model.distribution import MathKernels
from motet.model.lora import initial_weights, make_layout
from motet.training.arena import OPTIMIZER, AdapterArena, step_all
from motet.training.packed_pass import _TrainableRows

pytestmark = pytest.mark.tier1


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "gradient"])
def test_optimizer_state_of_another_length_is_refused(name: str, tmp_path: Path) -> None:
    """Kernels would read and write behind its end."""
    layout = make_layout({"q": (16, 16)}, 4)
    arena = AdapterArena(layout, AdapterConfig(rank=4, alpha=4), initial_weights(layout, 0), torch.float32)
    arena.gradient.fill_(1.0)
    arena.step(AdamW(1e-3))
    arena.gradient.fill_(1.0)
    arena.pending = True
    arena.save_optimizer(tmp_path)
    arena.set_optimizer(*arena.read_optimizer(tmp_path))
    path = tmp_path / OPTIMIZER
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for changed in (tensors[name][:-1], tensors[name].bfloat16()):
        save_file({**tensors, name: changed.clone()}, path, metadata)
        with pytest.raises(AdapterError, match="belongs to an adapter of another shape"):
            arena.read_optimizer(tmp_path)


def test_adapters_that_train_in_turn_share_memory_for_their_gradients() -> None:
    layout = make_layout({"q": (16, 16)}, 4)
    shape, masters = AdapterConfig(rank=4, alpha=4), initial_weights(layout, 0)
    places = []
    for _ in range(3):
        arena = AdapterArena(layout, shape, masters, torch.bfloat16)
        assert not arena.gradient.any()
        arena.gradient.fill_(1.0)
        places.append(arena.gradient.data_ptr())
        arena.step(AdamW(1e-3))
    assert len({*places}) == 1


def test_a_sample_without_a_ratio_mask_counts_whole_beside_one_with_a_mask() -> None:
    ids, mask = np.arange(1, 5), np.array([1, 0, 0, 1])
    plain, masked = datum(ids, ids), datum(ids, ids, sequence_ratio_mask=mask)
    for samples, wanted in (
        ((plain, masked), [1.0] * 4 + [1.0, 0.0, 0.0, 1.0]),
        ((masked, plain), [1.0, 0.0, 0.0, 1.0] + [1.0] * 4),
    ):
        segment = Segment("a", samples)
        rows = _TrainableRows.of(segment, [((0, 5),), ((5, 5),)], torch.device("cpu"))
        found = rows.gather_optional(segment, "ratio_mask")
        assert found is not None
        assert found.tolist() == wanted
    assert rows.gather_optional(segment, "reference_logprobs") is None


@dataclass(frozen=True)
class Momentum(Optimizer):
    """An optimizer that no kernel has."""

    STATE = ("momentum",)
    lr: float
    beta: float = 0.9
    clip_norm: float = 1.0

    def step(
        self, number: int, masters: torch.Tensor, gradient: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if not float(masters[0]) < 1e6:
            raise MemoryError("full")
        (momentum,) = state
        momentum = momentum * self.beta + gradient
        return masters - momentum * (self.lr / number), momentum


def arena_of(own: MathKernels | None, seed: int = 0, head: int = 3) -> AdapterArena:
    layout = make_layout({"q": (40, 16)}, 4)
    shape, masters = AdapterConfig(rank=4, alpha=4), initial_weights(layout, seed)
    return AdapterArena(layout, shape, masters, torch.bfloat16, head=head, own=own)


def give(arena: AdapterArena, seed: int) -> torch.Tensor:
    """A gradient, the same for a seed."""
    gradient = torch.randn(len(arena.masters), generator=torch.Generator().manual_seed(seed))
    arena.gradient.copy_(gradient)
    return gradient


def test_adamw_by_torch_has_the_bits_of_its_optimizer() -> None:
    arena, settings = arena_of(None), AdamW(1e-2, (0.8, 0.9), 1e-6, 0.1, 0.5)
    masters = torch.nn.Parameter(arena.masters.clone())
    theirs = torch.optim.AdamW([masters], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, fused=True)
    for seed in range(4):
        gradient = give(arena, seed)
        norm = float(torch.linalg.vector_norm(gradient))
        masters.grad = gradient.mul_(settings.clip_norm / (norm + 1e-6))
        theirs.step()
        assert arena.step(settings).grad_norm == norm
        assert torch.equal(arena.masters, masters)
        moments = (theirs.state[masters][name] for name in AdamW.STATE)
        assert all(torch.equal(*both) for both in zip(arena.state, moments, strict=True))


@pytest.mark.parametrize("own", [None, OwnMath(library.load().calls, lambda: 1)], ids=["torch", "native"])
def test_other_optimizer_steps_by_torch_with_the_bits_that_it_has_alone(own: MathKernels | None) -> None:
    """What fails, in company, changes no adapter; a gradient that is not finite is only cleared; another begins anew."""
    alone, *together = (arena_of(own, seed) for seed in (0, 0, 1))
    settings = Momentum(1e-2, clip_norm=0.5)
    expected, momentum = alone.masters.clone(), torch.zeros_like(alone.masters)
    for number in (1, 2):
        for arena in (alone, *together):
            gradient = give(arena, number)
        norm = alone.step(settings).grad_norm
        step_all([(arena, settings) for arena in together])
        momentum = momentum * 0.9 + gradient * (0.5 / (norm + 1e-6))
        expected = expected - momentum * (1e-2 / number)
        for arena in (alone, together[0]):
            assert torch.equal(arena.masters, expected)
            assert torch.equal(arena.state[0], momentum)
    assert torch.equal(alone.weights.flat, together[0].weights.flat)
    before, bad = alone.masters.clone(), together[1]
    bad.masters[0] = 1e6
    for arena in (alone, bad):
        give(arena, 3)
    with pytest.raises(MemoryError, match="full"):
        step_all([(alone, settings), (bad, settings)])
    assert torch.equal(alone.masters, before)
    alone.gradient[0] = torch.nan
    assert alone.step(settings).skipped
    assert (alone.count, torch.equal(alone.masters, before)) == (2, True)
    give(alone, 3)
    alone.step(AdamW(1e-2))
    assert (alone.count, len(alone.state)) == (1, 2)
    give(alone, 4)
    alone.step(settings)
    assert (alone.count, len(alone.state)) == (1, 1)
