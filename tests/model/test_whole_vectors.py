"""Functions of single numbers, and long training passes, with odd numbers of threads: company changes not one bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from motet.config import AdapterConfig
from motet.core.batch import Batch, Segment
from motet.model.find import SMALL_BASE
from motet.model.load import load_base
from motet.model.lora_model import LoraModel
from motet.model.simd_safe_functions import Uneven, by_whole_vectors, take_whole_vectors
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.segments import REINFORCE, gradient, make_samples

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "power": lambda x: x.abs().pow(1.5),
}
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "whole rows": lambda x, width: x[:, :width].contiguous(),
    "rows that are apart": lambda x, width: x[None, :, :width],
    "numbers that are apart": lambda x, width: x[:, ::2],
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 200).map(lambda n: 4 * n),
    st.sampled_from((1, 3, 5, 24, 100, 576, 1536)),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.data(),
)
def test_a_number_has_the_same_bits_wherever_it_is(name, dtype, layout, n_rows, width, threads, data):
    """Beside neighbours that are not finite, with another number of threads, forth and back."""
    first, last = sorted(data.draw(st.tuples(st.integers(0, n_rows // 4), st.integers(0, n_rows // 4)), label="rows"))
    mine = slice(4 * first, 4 * last + 4)
    generator = torch.Generator().manual_seed(n_rows)
    x, slope = (torch.randn(n_rows, n, generator=generator).to(dtype) for n in (2 * width, width))
    beside = torch.full_like(x, torch.nan)
    beside[mine] = x[mine]

    def of(rows: Tensor, slope: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        leaf = LAYOUTS[layout](rows, width).detach().requires_grad_()
        y = by_whole_vectors(FUNCTIONS[name], leaf, gelu=name == "gelu").view(-1, width)
        y.backward(slope)
        assert leaf.grad is not None
        return y.detach(), leaf.grad.view(-1, width)

    for whole, alone in zip(of(beside, slope, threads[0]), of(x[mine], slope[mine], threads[1]), strict=True):
        assert torch.equal(whole[mine], alone)


class Gate(nn.Module):
    """A model that calls a function itself, and has a module that does."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.act(x) * x.sigmoid()
        return gated


def test_modules_whose_numbers_depend_on_their_place_are_found_and_mended():
    model, x = Gate(), torch.randn(12, 3)
    with Uneven(model) as uneven:
        before = model(x)
    assert uneven.modules == {model: "sigmoid", model.act: "silu"}
    for module in uneven.modules:
        take_whole_vectors(module)
    with Uneven(model) as left:
        whole = model(x)
        torch.sigmoid(x)
    assert (left.modules, left.elsewhere) == ({}, {"sigmoid"})
    assert torch.allclose(before, whole)
    assert torch.equal(model(x[:4]), whole[:4])


class Power(nn.Module):
    """A module that raises to a power."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self._power = power

    def forward(self, x: Tensor) -> Tensor:
        return x**self._power


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2, 3])
def test_a_power_that_is_not_taken_apart_has_the_same_bits_in_every_place(power: float, dtype: torch.dtype) -> None:
    model = Power(power)
    with Uneven(model) as uneven:
        model(torch.ones(4, dtype=dtype))
    for module in uneven.modules:
        take_whole_vectors(module)
    plain = [-1, 1, 2, 3, *([0.5] if dtype == torch.float32 else [])]
    assert bool(uneven.modules) == (power not in plain)
    numbers = torch.rand(88, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.1

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(torch.full_like(y, 0.3))
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    for alone, behind in zip(both(numbers), both(torch.cat([torch.ones(72, dtype=dtype), numbers])), strict=True):
        assert torch.equal(alone, behind[72:])


@functools.cache
def small() -> LoraModel:
    return load_base(str(SMALL_BASE), dtype="float32", device="cpu")


def gradients(threads: int, names: str) -> list[Tensor]:
    """What each of some adapters learns from a pass of several hundred rows for each."""
    base = small()
    torch.set_num_threads(threads)
    trainer = TorchTrainer(base, slots=4)
    segments = []
    for name, n_rows in zip("abc", (468, 552, 476), strict=True):
        if name not in names:
            continue
        trainer.add_adapter(name, AdapterConfig(rank=8), seed=ord(name))
        inside.arena(trainer, name).set_masters(tiny.adapter_masters(base, rank=8, seed=ord(name))[1])
        samples = make_samples([(3, n_rows // 4 - 3)] * 4, seed=ord(name))
        segments.append(Segment(name, samples, REINFORCE, 100.0))
    trainer.forward_backward(Batch(tuple(segments)))
    return [gradient(trainer, name) for name in names]


@pytest.mark.parametrize("threads", few([3, 5], 5))
def test_company_changes_no_bit_of_a_long_pass_with_an_odd_number_of_threads(threads):
    (alone,) = gradients(threads, "a")
    assert torch.equal(gradients(threads, "abc")[0], alone)


def test_one_thread_and_two_make_the_same_bits():
    for one, two in zip(gradients(1, "abc"), gradients(2, "abc"), strict=True):
        assert torch.equal(one, two)
