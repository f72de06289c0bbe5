"""Logprobs of passes equal those of draws to the last bit; their values and gradients are torch's within bounds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.support.triton_on_cpu
from motet.config import AdapterConfig
from motet.core import seeds
from motet.core.batch import AdamW
from motet.core.types import SamplingParams
from motet.kernels.cuda import sampling
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.sampling import Drawn, Head, RowSettings
from motet.model.distribution import LogitChanges
from motet.model.lora import make_layout
from motet.training.arena import AdapterArena
from motet.training.head import Targets, head_logprobs, whole
from tests.support import cuda_bases

DEVICE = tests.support.triton_on_cpu.DEVICE
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
CHANGES = LogitChanges(
    SimpleNamespace(logit_scale=0.8, logits_scaling=1.3, final_logit_softcapping=6.0), without_token=(2, 1299)
)
PLAIN = LogitChanges(SimpleNamespace(), ())
TEMPERATURES = [1.0, 0.7, 1.9, 1.0, 0.7, 1.9]


def random(n_rows: int, n_ids: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(n_rows, n_ids, generator=torch.Generator().manual_seed(seed)) * 4).to(DEVICE, dtype)


def bits(each: Tensor) -> bytes:
    return each.cpu().numpy().tobytes()


@pytest.mark.parametrize("changes", [PLAIN, CHANGES], ids=["plain", "changed"])
def test_sampled_logprobs_are_those_of_passes_to_the_last_bit(changes: LogitChanges) -> None:
    """Rows of a pass stand in other places, beside others, in a launch of another size, and are asked for gradients."""
    raw_NV, own = random(6, 1300), CudaMath()
    keys = np.random.default_rng(0).integers(0, 2**64, 6, np.uint64)
    settings = RowSettings(
        Head(changes, 1300, DEVICE),
        torch.tensor(TEMPERATURES, device=DEVICE),
        torch.from_numpy(keys.view(np.int64)).to(DEVICE),
        torch.arange(6, device=DEVICE),
    )
    drawn = Drawn.empty(6, DEVICE)
    sampling.draw(raw_NV, settings, drawn)
    others = random(3, 1300, seed=1)
    others[1] = math.nan
    tokens_N = torch.cat([torch.zeros(3, dtype=torch.int64, device=DEVICE), drawn.token_N.flip(0)])
    found = []
    for slope in (False, True):
        pass_NV, temperatures = torch.cat([others, raw_NV.flip(0)]), [0.5] * 3 + TEMPERATURES[::-1]
        logprobs_N, entropies_N, _ = own.head_logprobs(pass_NV, changes, tokens_N, temperatures, slope=slope)
        found.append((bits(logprobs_N[3:].flip(0)), bits(entropies_N)))
    assert found[0] == found[1]
    assert found[0][0] == bits(drawn.logprob_N)
    logits_NV = own.finish(raw_NV, changes)
    for row, temperature in enumerate(TEMPERATURES):
        alone_N, _ = own.logprobs(logits_NV[row : row + 1], drawn.token_N[row : row + 1], temperature)
        assert bits(alone_N) == bits(drawn.logprob_N[row : row + 1])
    uniforms_N = torch.from_numpy(seeds.uniforms(keys, np.arange(6, dtype=np.uint64))).to(DEVICE)
    again = own.draw(logits_NV, [SamplingParams(temperature=each) for each in TEMPERATURES], uniforms_N)
    assert [bits(each) for each in again] == [bits(each) for each in vars(drawn).values()]


@pytest.mark.parametrize("changes", [PLAIN, CHANGES], ids=["plain", "changed"])
def test_logprobs_entropies_and_gradients_are_torchs(changes: LogitChanges) -> None:
    raw_NV, tokens_N = random(3, 1300, torch.float32), torch.tensor([7, 1298, 600])
    temperatures_N1 = torch.tensor(TEMPERATURES[:3])[:, None]
    leaf_NV = raw_NV.cpu().requires_grad_()
    wanted_NV = torch.log_softmax((changes.finish(leaf_NV) / temperatures_N1).double(), -1)
    chosen_N = wanted_NV.gather(-1, tokens_N[:, None])[:, 0]
    (slope_NV,) = torch.autograd.grad(chosen_N.sum(), leaf_NV)
    entropies_N = -(wanted_NV.exp() * wanted_NV.nan_to_num(neginf=0.0)).sum(-1)
    found = CudaMath().head_logprobs(raw_NV, changes, tokens_N.to(DEVICE), TEMPERATURES[:3], slope=True)
    assert found[2] is raw_NV, "gradients take no further memory"
    for ours, theirs, bound in zip(found, (chosen_N, entropies_N, slope_NV), (4e-6, 1e-5, 1e-6), strict=True):
        assert ours is not None
        assert torch.allclose(ours.cpu().double(), theirs.detach().double(), rtol=1e-6, atol=bound)


def test_logits_are_finished_as_the_model_finishes_them() -> None:
    raw_NV = random(2, 1300)
    finished_NV = CudaMath().finish(raw_NV, CHANGES).cpu()
    assert finished_NV[:, [2, 1299]].isneginf().all()
    assert torch.allclose(finished_NV, CHANGES.finish(raw_NV.cpu().clone()), rtol=1e-6, atol=0)


def test_rows_that_are_not_finite_show_in_logprobs_entropies_and_gradients() -> None:
    raw_NV = random(4, 300)
    raw_NV[0, 5], raw_NV[1, 299], raw_NV[2] = math.nan, math.inf, -math.inf
    tokens_N = torch.tensor([0, 1, 2, 3], device=DEVICE)
    logprobs_N, entropies_N, slope_NV = CudaMath().head_logprobs(raw_NV, PLAIN, tokens_N, [1.0] * 4, slope=True)
    assert logprobs_N.isfinite().tolist() == entropies_N.isfinite().tolist() == [False] * 3 + [True]
    assert slope_NV is not None
    assert slope_NV[:2].isnan().any(-1).all()
    assert slope_NV[3].isfinite().all()


def test_adapters_learn_by_the_steps_of_torch() -> None:
    """Within the rounding of fp32; a gradient that is not finite changes nothing, and no step a version that there is."""
    layout, shape = make_layout({"q": (24, 16)}, 4), AdapterConfig(rank=4, alpha=3)
    masters = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    kinds = [(torch.float32, None), (torch.float32, CudaMath())]
    arenas = [AdapterArena(layout, shape, masters.clone(), dtype, own=own) for dtype, own in kinds]
    for step, scale in enumerate((0.001, 1.0, math.nan, 2.0)):
        gradient = torch.randn(layout.size, generator=torch.Generator().manual_seed(step + 1)) * scale
        found = []
        for arena in arenas:
            published = arena.weights.flat, arena.weights.flat.clone()
            arena.gradient.copy_(gradient)
            found.append(arena.step(AdamW(0.01, weight_decay=0.1)))
            assert not arena.gradient.any()
            assert torch.equal(*published), "rows in flight may read it"
        theirs, ours = found
        assert theirs.skipped == ours.skipped == math.isnan(scale)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6, nan_ok=True)
        assert ours.adapter_norm == pytest.approx(theirs.adapter_norm, rel=1e-6)
        pairs = list(zip(*([arena.masters, arena.weights.flat, *arena.state] for arena in arenas), strict=True))
        assert arenas[0].count == arenas[1].count
        assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-8) for one, other in pairs)


def test_what_a_draw_writes_is_what_the_trainer_reads() -> None:
    """Of a whole base: logprobs of a draw from some rows, and of the trainer's head over all."""
    base = cuda_bases.base("llama_long")
    hidden_TD = random(5, base.info.hidden_size, base.dtype)
    rows_N, drawn = torch.tensor([3, 1], device=DEVICE), Drawn.empty(2, DEVICE)
    with torch.no_grad():
        raw_NV = base.raw_logits(hidden_TD[rows_N])
    head = Head(base.changes, raw_NV.shape[1], DEVICE)
    temperature_N, zeros_N = torch.full((2,), 0.7, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    sampling.draw(raw_NV, RowSettings(head, temperature_N, zeros_N, rows_N), drawn)
    targets = [
        Targets(torch.arange(5, device=DEVICE), torch.full((5,), int(drawn.token_N[0]), device=DEVICE), 1.0),
        Targets(rows_N, drawn.token_N, 0.7),
    ]
    (_, (logprobs_N, _)) = whole(head_logprobs(base, hidden_TD.requires_grad_(), targets))
    assert bits(logprobs_N.detach()) == bits(drawn.logprob_N)
    assert logprobs_N.requires_grad
