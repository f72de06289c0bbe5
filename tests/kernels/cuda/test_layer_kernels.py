"""Kernels between products: what they round, and how often."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_on_cpu
from motet.kernels.cuda.kernels.adapters import add_adapters
from motet.kernels.cuda.kernels.norms import norm_after_add, norm_before_add

DEVICE = tests.support.triton_on_cpu.DEVICE
OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}
"""As launches have them."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def coarse(*shape: int, limit: float, step: float, seed: int) -> torch.Tensor:
    """Multiples of a step: sums of their products have the same bits in every order, also in a tensor core's."""
    return (numbers(*shape, seed=seed).clamp(-limit, limit) / step).round() * step


@pytest.mark.parametrize("rank", [1, 17])
def test_a_product_and_its_adapter_are_added_in_fp32_and_rounded_once(rank: int) -> None:
    """Rows 3, 0 and 4 have the adapter; rows 1 and 2 none."""
    n_rows, width, pieces, inner_width = 5, 40, 3, 32
    y = numbers(n_rows, width).half()
    b = coarse(rank, width, limit=4, step=2**-4, seed=1).half()
    inner = coarse(pieces, n_rows, inner_width, limit=1, step=2**-12, seed=2)
    inner[:, :, rank:] = float("nan")  # of no adapter
    tiles = torch.full((3, 17), -1, dtype=torch.int32, device=DEVICE)
    tiles[0, 1:3], tiles[1, 0], tiles[1, 1:4] = torch.tensor([1, 2]), 0, torch.tensor([3, 0, 4])
    entries = torch.tensor([[0, inner_width, rank, 0, b.data_ptr()]], device=DEVICE)
    expected = y.clone()
    for row in (3, 0, 4):
        sums = inner[0, row, :rank] + inner[1, row, :rank] + inner[2, row, :rank]
        added = torch.zeros(width, device=DEVICE)
        for a, b_row in zip(sums.half().float(), b.float(), strict=True):
            added += a * b_row
        expected[row] = (y[row].float() + added).half()
    n_tiles = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    add_adapters[(3, 3)](
        y, tiles, n_tiles, entries, inner, n_rows, inner_width, N=width, BLOCK=16, ENTRY=5, PIECES=pieces, ALIGNED=True,
        **OPTIONS,
    )  # fmt: skip
    assert torch.equal(y, expected)


@pytest.mark.parametrize("width", [40, 64])
def test_the_residual_stream_is_rounded_before_the_norm(width: int) -> None:
    x, delta, weight = numbers(3, width).half(), numbers(3, width, seed=1).half(), numbers(width, seed=2)
    y, x_out = torch.empty_like(x), torch.empty_like(x)
    constants = {"D": width, "BLOCK": 64, "EPSILON": 1e-5, "FACTOR": 0.7, **OPTIONS}
    norm_after_add[(3,)](x, delta, x_out, weight, y, ADD=True, **constants)
    total = (x.float() + 0.7 * delta.float()).half()
    normed = total.float() / (total.float().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.equal(x_out, total)
    assert torch.allclose(y.float(), normed, rtol=1e-3, atol=1e-4)
    alone = torch.empty_like(x)
    norm_after_add[(3,)](x_out, x_out, x_out, weight, alone, ADD=False, **constants)
    assert torch.equal(alone, y)
    norm_before_add[(3,)](x, x_out, x, weight, **constants)
    assert torch.equal(x, (numbers(3, width).half().float() + 0.7 * y.float()).half())
