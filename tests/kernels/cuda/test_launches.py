"""Launches are counted while a test counts, by kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tests.support.triton_on_cpu  # noqa: F401
from motet.kernels.cuda import launches
from motet.kernels.cuda.kernels.compiling import kernel


class Kernel:
    """Launched as Triton's kernels are."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.grids.append(grid)


NUMBERS = torch.zeros(1)


def test_launches_are_counted_by_kernel_and_only_meanwhile() -> None:
    kernel = Kernel()
    launches.launch(kernel, [1], NUMBERS)
    with launches.count() as outer:
        launches.launch(kernel, (2, 3), NUMBERS, 1, word=2)
        with launches.count() as inner:
            launches.called("library")
    launches.launch(kernel, (4,), NUMBERS)
    assert kernel.grids == [(1,), (2, 3), (4,)]
    assert (outer, inner) == ({"kernel": 1, "library": 1}, {"library": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a card torch says that it was asked for one")
def test_a_kernel_is_launched_on_the_card_of_its_first_argument_or_not_at_all() -> None:
    kernel = Kernel()
    with FakeTensorMode():
        far = torch.zeros(1, device="cuda:1")
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        launches.launch(kernel, (1,), far)
    assert not kernel.grids


def test_an_aligned_name_that_is_no_argument_is_refused() -> None:
    def copies(x: Any, y: Any, WIDTH: Any) -> None: ...

    kernel("x", "y")(copies)
    for unknown in ("z", "WIDTH"):
        with pytest.raises(TypeError, match=f"copies has no argument {unknown}"):
            kernel("x", unknown)(copies)
