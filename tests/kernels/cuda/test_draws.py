"""Draws on the card: the tokens, logprobs and verdicts of `model.distribution`, and bits that nothing else changes.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tests.support.triton_on_cpu
from motet.core import seeds
from motet.core.types import SamplingParams
from motet.kernels.cuda import sampling
from motet.kernels.cuda.kernels.weights import number_of
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.math import CudaMath
from motet.kernels.cuda.sampling import Drawn, Head, bits_of
from motet.model import distribution
from motet.model.distribution import LogitChanges
from tests.support.cases import few
from tests.support.draw_cases import head_of, settings_of

DEVICE = tests.support.triton_on_cpu.DEVICE
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
BORDER = 2e-6
"""How near to a border between two tokens a uniform number may take either, as a share of the whole."""


@triton.jit
def numbers(keys, positions, out, N: tl.constexpr):
    place = tl.arange(0, N)
    number = number_of(tl.load(keys + place), tl.load(positions + place))
    tl.store(out + place, number.to(tl.float64) * 2.0**-53)


def counters(n_rows: int, seed: int = 0) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Keys and positions."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**64, n_rows, np.uint64), generator.integers(0, 10**5, n_rows, np.uint64)


def random(n_rows: int, n_ids: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (torch.randn(n_rows, n_ids, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE, dtype)


def drawn(raw_NV: Tensor, head: Head, params, keys, positions, allowed_NW: Tensor | None = None) -> Drawn:
    out = Drawn.empty(len(raw_NV), DEVICE)
    sampling.draw(raw_NV, settings_of(head, params, keys, positions, allowed_NW, DEVICE), out)
    return Drawn(out.token_N.cpu(), out.logprob_N.cpu(), out.usable_N.cpu())


def bits(each: Tensor) -> bytes:
    return each.cpu().numpy().tobytes()


def test_numbers_are_those_of_the_host_to_the_last_bit() -> None:
    generator, edges = np.random.default_rng(1), np.array([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    keys = np.concatenate([generator.integers(0, 2**64, 8186, np.uint64), edges])
    positions = np.concatenate([generator.integers(0, 2**20, 8186, np.uint64), edges[::-1]])
    out = torch.empty(8192, dtype=torch.float64, device=DEVICE)
    numbers[(1,)](*(torch.from_numpy(each.view(np.int64)).to(DEVICE) for each in (keys, positions)), out, N=8192)
    assert bits(out) == seeds.uniforms(keys, positions).tobytes()


def assert_same_but_at_borders(ours_N, theirs_N, logits_NV, params, uniforms_N) -> None:
    """At most one row's token differs, and it is one beside a border that the uniform number nearly meets."""
    differ = (ours_N != theirs_N).nonzero()[:, 0].tolist()
    for row in differ:
        probs_V = torch.softmax(logits_NV[row].double() / (params[row].temperature or 1.0), -1)
        if params[row].truncates:
            probs_V = distribution._truncate(probs_V.float(), params[row]).double()
        assert probs_V[ours_N[row]] > 0
        ends_V = probs_V.cumsum(-1) / probs_V.sum()
        first, last = sorted((int(ours_N[row]), int(theirs_N[row])))
        assert (ends_V[first:last] - uniforms_N[row]).abs().max() < BORDER, "no neighbour at a border"
    assert len(differ) <= 1


CASES = {
    "one block": (40, {}, (), False),
    "whole blocks": (1024, {"logit_scale": 0.5}, (), False),
    "part of a block": (4357, {"logits_scaling": 1.7}, (4300, 4356), False),
    "capped": (1000, {"final_logit_softcapping": 5.0}, (3, 999), False),
    "grammars": (1000, {}, (17,), True),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_logprobs_and_verdicts_are_those_of_the_distribution(case: str) -> None:
    n_ids, config, without, masked = CASES[case]
    raw_NV, (keys, positions) = random(12, n_ids), counters(12)
    params = [SamplingParams(temperature=t) for t in (1.0, 0.7, 3.0, 0.0, 1e-3, 1e4)] * 2
    head = head_of(n_ids, without, DEVICE, **config)
    allowed_NV = np.random.default_rng(2).random((12, n_ids)) < (0.2 if masked else 1)
    allowed_NW = torch.stack([bits_of(row) for row in allowed_NV]).to(DEVICE) if masked else None
    out = drawn(raw_NV, head, params, keys, positions, allowed_NW)

    changes = LogitChanges(type("Config", (), config), without)
    logits_NV = changes.finish(raw_NV.float().cpu()).masked_fill(~torch.from_numpy(allowed_NV), -math.inf)
    uniforms_N = torch.from_numpy(seeds.uniforms(keys, positions))
    tokens_N, logprobs_N, usable_N = distribution.draw(logits_NV, params, uniforms_N)
    assert out.usable_N.all()
    assert usable_N.all()
    assert_same_but_at_borders(out.token_N, tokens_N, logits_NV, params, uniforms_N)
    temperatures_N1 = torch.tensor([row.temperature or 1.0 for row in params])[:, None]
    exact_NV = torch.log_softmax((logits_NV / temperatures_N1).double(), -1)
    exact_N = exact_NV.gather(-1, out.token_N[:, None])[:, 0]
    bound_N = 1e-6 + (1e-6 / temperatures_N1[:, 0] if "final_logit_softcapping" in config else 0.0)
    assert ((out.logprob_N - exact_N).abs() <= bound_N + 1e-6 * exact_N.abs()).all()
    same_N = out.token_N == tokens_N
    assert torch.allclose(
        out.logprob_N[same_N], logprobs_N[same_N], rtol=1e-6, atol=float(torch.as_tensor(bound_N).max())
    )


def test_greedy_rows_take_the_first_of_the_likeliest() -> None:
    raw_NV = torch.zeros(2, 700)
    raw_NV[0, [300, 301, 650]] = 2.0
    out = drawn(raw_NV.to(DEVICE), head_of(700, (0, 1), DEVICE), [SamplingParams(temperature=0)] * 2, *counters(2))
    assert out.token_N.tolist() == [300, 2]


def test_frequencies_are_probabilities_where_all_weights_are_equal() -> None:
    """300 equal ids of 512 are drawn where ⌊300 u⌋ says."""
    keys, positions = counters(24)
    head = head_of(512, tuple(range(100, 312)), DEVICE)
    out = drawn(torch.ones(24, 512, device=DEVICE), head, [SamplingParams()] * 24, keys, positions)
    places = (seeds.uniforms(keys, positions) * 300).astype(np.int64)
    assert out.token_N.tolist() == np.where(places < 100, places, places + 212).tolist()


def test_a_token_without_probability_is_never_drawn() -> None:
    raw_NV = torch.full((4, 600), -math.inf, dtype=torch.bfloat16, device=DEVICE)
    raw_NV[:, 258] = 1.0
    raw_NV[2:, 400] = -120.0
    least, most = np.uint64(0), np.uint64(2**53 - 1)
    settings = settings_of(head_of(600, (), DEVICE), [SamplingParams()] * 4, *counters(4), None, DEVICE)
    for number in (least, most):
        out = Drawn.empty(4, DEVICE)
        given_N = torch.full((4,), int(number), device=DEVICE)
        sampling.draw(raw_NV, sampling.RowSettings(settings.head, settings.temperature_N, given_N, None), out)
        assert out.token_N.tolist() == [258] * 4
        assert out.logprob_N.tolist() == [0.0] * 4


def test_rows_that_are_not_finite_are_told_and_stay_alone() -> None:
    raw_NV, (keys, positions) = random(6, 700), counters(6)
    clean = drawn(raw_NV, head_of(700, (5,), DEVICE), [SamplingParams()] * 6, keys, positions)
    raw_NV[0, 300], raw_NV[1, 699], raw_NV[2], raw_NV[3, 5], raw_NV[4, 7] = (
        math.nan,
        math.inf,
        -math.inf,
        math.nan,
        -math.inf,
    )
    for temperature in (1.0, 0.0, 0.5):
        params = [SamplingParams(temperature=temperature)] * 6
        out = drawn(raw_NV, head_of(700, (5,), DEVICE), params, keys, positions)
        assert out.usable_N.tolist() == [False, False, False, True, True, True]
        assert out.token_N[:3].tolist() == [0, 0, 0]
        assert out.logprob_N[:3].isnan().all()
        if temperature == 1.0:
            assert bits(out.token_N[[3, 5]]) == bits(clean.token_N[[3, 5]])
            assert bits(out.logprob_N[[3, 5]]) == bits(clean.logprob_N[[3, 5]])


def test_a_rows_bits_depend_on_no_tile_company_place_or_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    raw_NV, (keys, positions) = random(6, 3000), counters(6)
    params = [SamplingParams(temperature=t) for t in (1.0, 0.7, 2.0, 0.0, 1.0, 1.3)]
    head = head_of(3000, (2999,), DEVICE, final_logit_softcapping=10.0)
    whole = drawn(raw_NV, head, params, keys, positions)
    for row in (0, 4, 5):
        own = slice(row, row + 1)
        alone = drawn(raw_NV[own].float(), head, params[own], keys[own], positions[own])
        assert (bits(alone.token_N), bits(alone.logprob_N)) == (bits(whole.token_N[own]), bits(whole.logprob_N[own]))
    for blocks in (1, 4):
        monkeypatch.setattr(sampling, "_BLOCKS", blocks)
        moved = drawn(raw_NV.flip(0), head, params[::-1], keys[::-1].copy(), positions[::-1].copy())
        assert bits(moved.token_N.flip(0)) == bits(whole.token_N)
        assert bits(moved.logprob_N.flip(0)) == bits(whole.logprob_N)


class LargestMade(TorchDispatchMode):
    """Bytes of the largest storage that torch makes beside one that is there."""

    def __init__(self, there: Tensor) -> None:
        super().__init__()
        self._there, self.found = there.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != self._there:
            self.found = max(self.found, made.untyped_storage().nbytes())
        return made


def test_a_draw_is_two_launches_and_makes_no_copy_of_the_logits() -> None:
    raw_NV, out = random(2, 5000), Drawn.empty(2, DEVICE)
    settings = settings_of(head_of(5000, (), DEVICE), [SamplingParams()] * 2, *counters(2), None, DEVICE)
    with count() as launches, LargestMade(raw_NV) as largest:
        sampling.draw(raw_NV, settings, out)
    assert launches == {"block_sums": 1, "pick": 1}
    assert largest.found == 8 * 2 * 20, "sums of blocks of 256 ids"


TRUNCATED = [
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=2.0, top_p=0.8, top_k=9, min_p=0.02),
    SamplingParams(),
    SamplingParams(top_p=1e-6),
    SamplingParams(temperature=0, top_k=2),
    SamplingParams(top_k=10**6, top_p=0.95),
]


@pytest.mark.parametrize("masked", few([False, True], False))
def test_truncated_rows_draw_what_the_distribution_draws(masked: bool) -> None:
    n_rows, config = len(TRUNCATED), {"final_logit_softcapping": 8.0} if masked else {}
    raw_NV, (keys, positions) = random(n_rows, 900), counters(n_rows, 3)
    allowed_NV = np.random.default_rng(2).random((n_rows, 900)) < (0.3 if masked else 1)
    allowed_NW = torch.stack([bits_of(row) for row in allowed_NV]).to(DEVICE) if masked else None
    with count() as launches:
        out = drawn(raw_NV, head_of(900, (4,), DEVICE, **config), TRUNCATED, keys, positions, allowed_NW)
    assert launches == {"block_sums": 1, "pick": 1, "pick_truncated": 1}
    logits_NV = LogitChanges(type("Config", (), config), (4,)).finish(raw_NV.float().cpu())
    logits_NV = logits_NV.masked_fill(~torch.from_numpy(allowed_NV), -math.inf)
    uniforms_N = torch.from_numpy(seeds.uniforms(keys, positions))
    tokens_N, logprobs_N, _ = distribution.draw(logits_NV, TRUNCATED, uniforms_N)
    assert_same_but_at_borders(out.token_N, tokens_N, logits_NV, TRUNCATED, uniforms_N)
    same_N = out.token_N == tokens_N
    assert torch.allclose(out.logprob_N[same_N], logprobs_N[same_N], rtol=1e-6, atol=4e-6), "of the whole distribution"


def test_of_equally_likely_ids_the_first_are_kept() -> None:
    """512 equal ids behind one that has no token, of which top-k and top-p keep the first."""
    kept = {
        SamplingParams(top_k=5): 5,
        SamplingParams(top_p=0.5): 256,
        SamplingParams(top_k=100, top_p=0.25): 25,
        SamplingParams(min_p=1.0): 512,
    }
    uniforms_N, logits_NV = seeds.uniforms(*counters(len(kept))), torch.ones(len(kept), 513, device=DEVICE)
    logits_NV[:, 0] = -math.inf
    tokens_N, _, _ = CudaMath().draw(logits_NV, list(kept), torch.from_numpy(uniforms_N).to(DEVICE))
    assert tokens_N.tolist() == (1 + (uniforms_N * list(kept.values())).astype(np.int64)).tolist()


def test_a_rows_bits_do_not_depend_on_whether_others_truncate(monkeypatch: pytest.MonkeyPatch) -> None:
    raw_NV, (keys, positions) = random(3, 700), counters(3)
    params = [SamplingParams(top_p=0.8), SamplingParams(), SamplingParams(top_k=50, temperature=1.5)]
    raw_NV[2, 3] = math.nan
    head = head_of(700, (), DEVICE)
    whole = drawn(raw_NV, head, params, keys, positions)
    assert whole.usable_N.tolist() == [True, True, False]
    for row, width in ((0, 256), (1, 4096)):
        monkeypatch.setattr(sampling, "_SEARCHED", width)
        own = slice(row, row + 1)
        alone = drawn(raw_NV[own].float(), head, params[own], keys[own], positions[own])
        assert (bits(alone.token_N), bits(alone.logprob_N)) == (bits(whole.token_N[own]), bits(whole.logprob_N[own]))


def test_min_p_is_a_share_of_the_likeliest() -> None:
    """256 ids weigh as much as e⁻¹ of the 256 behind them."""
    keys, positions = counters(12)
    params = [SamplingParams(min_p=least) for least in (0.37, 0.36)] * 6
    logits_NV = torch.tensor([-1.0] * 256 + [0.0] * 256, device=DEVICE).repeat(12, 1)
    out = drawn(logits_NV, head_of(512, (), DEVICE), params, keys, positions)
    shares = np.array([math.exp(-1), 1.0]).repeat(256)
    for row, number in enumerate(seeds.uniforms(keys, positions)):
        kept = shares * (shares > 0.5) if row % 2 == 0 else shares
        assert int(out.token_N[row]) == np.searchsorted(kept.cumsum(), number * kept.sum(), side="right")
    assert (out.token_N[1::2] < 256).any()
