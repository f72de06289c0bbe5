"""The recurrence by kernels: values and gradients of torch's steps, and the same bits however a sequence is cut.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.model.arithmetic import Arithmetic
from motet.model.attention import Prefix, Span
from motet.model.load import load_base
from motet.model.mixers.recurrence import RecurrentRows, recur
from motet.model.mixers.stretches import KEPT, Stretches, cached_stretches, packed_stretches
from motet.model.state_cache import StateCache
from tests.support import tiny_models as tiny

DEVICE = tests.support.triton_on_cpu.DEVICE
KEYS, VALUES = 24, 40
LENGTHS, PREFIXES = [KEPT + 5, 9, 3, 1], [None, None, Prefix(0, KEPT + 1), Prefix(0, 7)]


def rows(n: int, *, delta: bool) -> list[Tensor]:
    """With the delta rule of two heads, without it of one: what tells heads apart is the same."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(n, 1 + delta, *shape, generator=generator).to(DEVICE)

    keys = [torch.nn.functional.normalize(random(KEYS), dim=-1) for _ in range(2)]
    return [*keys, random(VALUES), random().sigmoid(), *([random().sigmoid()] if delta else [])]


def run(inputs: list[Tensor], stretches: Stretches) -> Tensor:
    query, key, value, decay, *beta = inputs
    return recur(RecurrentRows(query, key, value, decay.log(), beta[0] if beta else None), stretches, layer=0)


def gradients(inputs: list[Tensor], stretches: Stretches) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    output = run(leaves, stretches)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [output.detach(), *torch.autograd.grad(output, leaves, slope)]


@pytest.mark.parametrize("delta", [True, False])
def test_values_and_gradients_are_those_of_torch(delta: bool) -> None:
    inputs = rows(sum(LENGTHS), delta=delta)
    ours, torchs = (
        gradients(inputs, packed_stretches(LENGTHS, DEVICE, PREFIXES, kernels=kernels)) for kernels in (True, False)
    )
    for one, other in zip(ours, torchs, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("delta", [True, False])
def test_a_sequence_has_its_own_bits_beside_a_nan(delta: bool) -> None:
    inputs = rows(sum(LENGTHS), delta=delta)
    for one in inputs:
        one[LENGTHS[0] : sum(LENGTHS[:2])] = float("nan")
    shared = run(inputs, packed_stretches(LENGTHS, DEVICE, PREFIXES, kernels=True))
    start = sum(LENGTHS[:2])
    for begin, (prefix, length) in zip((start, start + 3), ((KEPT + 1, 3), (7, 1)), strict=True):
        whole = [torch.cat([one[:prefix], one[begin : begin + length]]) for one in inputs]
        alone = run(whole, packed_stretches([prefix + length], DEVICE, kernels=True))
        assert torch.equal(alone[:prefix], shared[:prefix])
        assert torch.equal(alone[prefix:], shared[begin : begin + length])


@pytest.mark.parametrize("delta", [True, False])
@torch.inference_mode()
def test_a_sequence_is_cut_and_decoded_with_the_same_bits(delta: bool) -> None:
    """Beside another that comes later; states lie in slots meanwhile."""
    inputs, other = rows(12, delta=delta), [one.flip(0) for one in rows(12, delta=delta)]
    whole, beside = (run(each, packed_stretches([12], DEVICE, kernels=True)) for each in (inputs, other))
    states = StateCache(2, DEVICE)
    slots = [states.take(), states.take()]
    for mine, theirs in [((0, 7), (0, 4)), ((7, 8), (4, 5)), ((8, 9), (5, 6)), ((9, 12), (6, 12))]:
        spans = [
            Span(start, stop - start, slot=slot) for (start, stop), slot in zip((theirs, mine), slots, strict=True)
        ]
        part = [torch.cat([late[slice(*theirs)], own[slice(*mine)]]) for late, own in zip(other, inputs, strict=True)]
        output = run(part, cached_stretches(spans, states, DEVICE, kernels=True))
        assert torch.equal(output, torch.cat([beside[slice(*theirs)], whole[slice(*mine)]]))


@pytest.mark.soak
def test_a_whole_base_is_exact() -> None:
    """As on a GPU: rows in tiles, attention and states by kernels; about a minute in the interpreter."""
    like_a_gpu = Arithmetic(rows=16, tile=16, attention="triton")
    base = load_base(
        str(tiny.directory("falcon_h1")),
        dtype="float32",
        device=str(DEVICE),
        block_size=tiny.BLOCK,
        arithmetic=like_a_gpu,
    )
    assert base.info.exact, base.info.notes
    assert base.arithmetic.attention == "triton", base.info.notes
