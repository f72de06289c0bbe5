"""Steps of AdamW by the kernels for GPUs: the bits of their rule, near those of torch, and of each adapter alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.core.batch import AdamW
from motet.kernels.cuda.adapter_steps import CHUNK, step_all
from motet.kernels.cuda.launches import count
from motet.model.adapter_step import AdapterStep, StepNorms
from motet.model.lora import AdapterWeights, make_layout
from motet.model.unit_sums import SCALE, UnitSums

DEVICE = tests.support.triton_on_cpu.DEVICE
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
ADAMW = AdamW(0.01, (0.9, 0.95), 1e-6, 0.1, 0.5)
HEAD = 25
LARGE, SMALL = 700, 24
"""Inputs of a layer; of the large one a program has only the last part of its chunk."""


def random(n: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def due(n_inputs: int = SMALL, seed: int = 0, *, head: int = 0, number: int = 3, scale: float = 1.0) -> AdapterStep:
    """An adapter that has taken two steps; with a head also of a gradient in fp32."""
    layout = make_layout({"q": (n_inputs, 32)}, 4 if n_inputs == SMALL else 28)
    n = layout.size + head
    sums = UnitSums(
        (random(n, seed, scale).double() * SCALE).long(), torch.ones(1, dtype=torch.int64, device=DEVICE), 9
    )
    new = AdapterWeights(layout, 0.75, torch.zeros(n, device=DEVICE))
    mean, square = random(n, seed + 2, 0.1), random(n, seed + 3, 0.1).square()
    gradient = random(n, seed + 4, 0.01) if head else None
    return AdapterStep(ADAMW, number, random(n, seed + 1), (mean, square), gradient, sums, new)


def by_rule(one: AdapterStep, norm: float) -> tuple[Tensor, ...]:
    """Masters, mean, square and version after a step, by plain fp64."""
    assert one.sums is not None
    adamw, (old_mean, old_square) = ADAMW, one.state
    beta1, beta2 = adamw.betas
    gradient = one.sums.total() if one.gradient is None else one.gradient + one.sums.total()
    gradient = gradient.double() * (adamw.clip_norm / (norm + 1e-6) if norm > adamw.clip_norm else 1.0)
    mean = (old_mean.double() * beta1 + gradient * (1 - beta1)).float()
    square = (old_square.double() * beta2 + gradient * gradient * (1 - beta2)).float()
    divisor = square.double().sqrt() / math.sqrt(1 - beta2**one.number) + adamw.eps
    rate, kept = adamw.lr / (1 - beta1**one.number), 1 - adamw.lr * adamw.weight_decay
    masters = (one.masters.double() * kept - rate * (mean.double() / divisor)).float()
    version = AdapterWeights.from_masters(one.new.layout, one.new.scaling, masters, one.new.flat.dtype)
    return masters, mean, square, version.flat


def by_torch(one: AdapterStep, norm: float) -> tuple[Tensor, ...]:
    """The same by torch's optimizer, in fp32."""
    assert one.sums is not None
    parameter, adamw, (mean, square) = torch.nn.Parameter(one.masters.clone()), ADAMW, one.state
    optimizer = torch.optim.AdamW([parameter], adamw.lr, adamw.betas, adamw.eps, adamw.weight_decay, fused=True)
    before = torch.tensor(float(one.number - 1), device=DEVICE)
    state = {"step": before, "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    optimizer.state[parameter] = state
    gradient = one.sums.total() if one.gradient is None else one.gradient + one.sums.total()
    parameter.grad = gradient * min(1.0, adamw.clip_norm / (norm + 1e-6))
    optimizer.step()
    version = AdapterWeights.from_masters(one.new.layout, one.new.scaling, parameter, one.new.flat.dtype)
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"], version.flat


def state(one: AdapterStep) -> tuple[Tensor, ...]:
    return one.masters, *one.state, one.new.flat


def copied(one: AdapterStep) -> AdapterStep:
    masters, *vectors, flat = (vector.clone() for vector in state(one))
    return replace(one, masters=masters, state=vectors, new=replace(one.new, flat=flat))


def taken(steps: Sequence[AdapterStep]) -> tuple[list[StepNorms], list[tuple[Tensor, ...]]]:
    """Steps of copies."""
    own = [copied(one) for one in steps]
    return step_all(own), [state(one) for one in own]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("given", [due(), due(LARGE, head=HEAD), due(scale=1e-3), due(number=1)])
def test_a_step_is_fp64_rounded_once_and_near_to_that_of_torch(given: AdapterStep) -> None:
    """Large and small adapters, a head, gradients that are clipped and that are not, and the first step."""
    (norms,), (found,) = taken([given])
    assert given.sums is not None
    gradient = given.sums.total() if given.gradient is None else given.gradient + given.sums.total()
    assert norms.gradient == pytest.approx(float(gradient.double().norm()), rel=1e-14)
    assert norms.weights == pytest.approx(float(found[0][: given.new.layout.size].double().norm()), rel=1e-14)
    assert equal(found, by_rule(given, norms.gradient))
    for own, theirs in zip(found, by_torch(given, norms.gradient), strict=True):
        assert torch.allclose(own, theirs, rtol=1e-6, atol=1e-7)


def test_neighbours_and_places_change_no_bit_of_a_step() -> None:
    """Not of norms either, whose sums have other partial sums in one adapter than in another."""
    members = [due(seed=10), due(LARGE, seed=20, head=HEAD), due(seed=30, scale=1e-3)]
    assert len(members[1].masters) > CHUNK
    assert len(members[1].masters) % CHUNK
    alone = [taken([one]) for one in members]
    together, found = taken(members[::-1])
    assert together[::-1] == [norms for own, _ in alone for norms in own]
    assert all(equal(one, other) for one, (_, (other,)) in zip(found[::-1], alone, strict=True))


@pytest.mark.parametrize("place", [0, -1])
def test_an_adapter_with_one_nan_or_that_does_not_fit_is_not_stepped_at_all_and_others_are(place: int) -> None:
    """Wherever the NaN is: no program of its adapter takes its part of the step."""
    wrong, large, good = due(LARGE, seed=1, head=HEAD), due(LARGE, seed=2), due(seed=3)
    assert wrong.gradient is not None
    assert large.sums is not None
    wrong.gradient[place] = float("nan")
    large.sums.largest.fill_(1 << 62)
    told, found = taken([wrong, good, large])
    assert [math.isnan(one.gradient) for one in told] == [True, False, True]
    assert equal(found[0], state(wrong))
    assert equal(found[2], state(large))
    assert equal(found[1], taken([good])[1][0])
    assert told[0].weights == pytest.approx(float(wrong.masters[: wrong.new.layout.size].double().norm()))


def test_without_a_gradient_weights_decay() -> None:
    given = replace(due(), sums=None)
    (norms,), (found,) = taken([given])
    zeros = UnitSums.empty(len(given.masters), DEVICE)
    assert norms.gradient == 0
    assert equal(found, by_rule(replace(given, sums=zeros), 0.0))


@pytest.mark.parametrize("n_adapters", [1, 8, 64])
def test_any_number_of_adapters_takes_two_launches(n_adapters: int) -> None:
    steps = [due(seed=seed) for seed in range(n_adapters)]
    with count() as launches:
        step_all(steps)
    assert launches == {"add_squares": 1, "step_adapters": 1}
