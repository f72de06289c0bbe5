"""Attention by kernels on models of tensor cores: a row's bits are its own, whatever shares its tile or its batch.

The interpreter multiplies by the bit models of the package mmasim (Xie et al. 2025), which `.envs/mmasim` has. They say how
an instruction aligns, truncates and rounds; how Triton cuts a product into instructions is not part of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bench.speed import envs

from tests.support.kernel_cases import alone_and_in_company, decoded_and_whole
from tests.support.triton_on_cpu import DEVICE, Matrix, in_order, multiplied_by

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="gpu: it has tensor cores"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # numpy on Inf and NaN
]
UNITS = {
    "Ampere mma": ("nv_ptx", "MMA", "Ampere", "m16n8k16.f32.bf16.bf16.f32"),
    "Hopper mma": ("nv_ptx", "MMA", "Hopper", "m16n8k16.f32.bf16.bf16.f32"),
    "Hopper wgmma": ("nv_ptx", "WGMMA", "Hopper", "m64n64k16.f32.bf16.bf16"),
    "Blackwell tcgen05": ("nv_ptx", "TCGen05MMA", "Blackwell", "m64n64k16.kind::f16.f32.bf16.bf16"),
    "CDNA3 mfma": ("amd", "MFMA", "CDNA3", "f32_16x16x16_bf16"),
}
"""Room, class, architecture and instruction."""


def by_place(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
    """A unit that sums the rows of a tile's second half from the end."""
    half = len(left) // 2
    other = in_order(left[half:, ::-1], right[::-1], total[half:])
    return np.concatenate([in_order(left[:half], right, total[:half]), other])


def test_a_unit_that_sums_a_row_by_its_place_is_found() -> None:
    with multiplied_by(by_place):
        assert not all(torch.equal(*pair) for pair in decoded_and_whole(torch.float32, 1, None))


@pytest.fixture(scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """mmasim, which compiles a function with ninja when it is imported."""
    packages = envs.packages("mmasim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(packages.parents[2] / "bin"), prepend=":")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        patch.setattr(sys, "path", [*sys.path, str(packages)])
        yield


@pytest.mark.soak
@pytest.mark.usefixtures("_models")
@pytest.mark.parametrize("unit", UNITS)
def test_rows_keep_their_bits_on(unit: str) -> None:
    """Decoded or in whole sequences, alone or among others; outputs and gradients."""
    room, name, *which = UNITS[unit]
    sums = getattr(importlib.import_module(f"mmasim.{room}"), name)(*which).arithmetic_op
    asked = []

    def product(left: Matrix, right: Matrix, total: Matrix) -> Matrix:
        asked.append(left.shape)
        one, other = (torch.from_numpy(each.copy()).bfloat16() for each in (left, right))
        found: Matrix = sums(one, other, torch.from_numpy(total.copy())).numpy()
        return found

    with multiplied_by(product):
        assert all(torch.equal(*pair) for pair in decoded_and_whole(torch.bfloat16, 4, None))
        alone, company = alone_and_in_company(50, dtype=torch.bfloat16)
    assert asked
    assert all(torch.equal(left, right) for left, right in zip(alone, company, strict=True))
