"""The figure of attention that a card is asked for, rehearsed in the interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from bench.speed.shapes import SHAPES
from torch import Tensor

import tests.support.triton_on_cpu

from bench.gpu.attention import times_of_reading  # isort: skip  # kernels are made for the interpreter
from motet.kernels.cuda.launches import count  # isort: skip

DEVICE = tests.support.triton_on_cpu.DEVICE
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def test_attention_is_timed_without_its_list_and_beside_half_a_copy() -> None:
    """By a clock that counts: of attention the launches, of a copy nothing; what is read are keys and values of all rows."""
    timed, copied = list[Counter[str]](), list[Tensor]()

    def clock(run: Callable[[], Tensor]) -> float:
        with count() as launches:
            made = run()
        assert made.isfinite().all()
        timed.append(launches)
        copied.append(made)
        return 9.0 if launches else 4.0

    found = times_of_reading(SHAPES["tiny"], DEVICE, DTYPE, clock, rows=2, keys=300)
    assert found == pytest.approx(9 / (4 / 2))
    assert timed == [{"attend": 1, "combine": 1}, {}]
    assert copied[1].shape[0] >= 2 * 5, "the blocks of both rows"
