"""The C++ kernels: what they compute, and that no number of rows, threads or neighbours changes a bit of it."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motet.core.batch import AdamW
from motet.core.errors import ConfigError
from motet.core.types import SamplingParams
from motet.kernels.cpu import building, library
from motet.model.distribution import draw
from motet.model.lora import AdapterWeights, make_layout
from tests.support.native_calls import EXACT, PAIRS, TYPES, Cache, Kernels, address, directory, forms, kernels
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

fastest = library._fastest

WAYS = [(EXACT, torch.bfloat16), (PAIRS, torch.bfloat16), (EXACT, torch.float32)]
NAN, INF = math.nan, math.inf


CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set[str]()
NEEDS = {"amx": "amx_bf16", "avx512": "avx512bw", "avx2": "avx2"}
"""The flag of Linux without which a processor does not run a form."""


@pytest.fixture(params=[*(form for form, flag in NEEDS.items() if flag in FLAGS), "portable"])
def own(request) -> Kernels:
    if request.param not in forms():
        pytest.skip(f"the system does not let this process use {request.param}")
    return kernels(request.param)


@pytest.fixture
def fast() -> Kernels:
    return kernels(forms()[0])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def in_order(a_MK: Tensor, b_NK: Tensor, arithmetic: int) -> Tensor:
    """The definition of csrc/kernels.hpp, number by number."""
    a, b = a_MK.float()[:, None, :], b_NK.float()[None, :, :]
    total = torch.zeros(len(a_MK), len(b_NK))
    n = a_MK.shape[1]
    if arithmetic == PAIRS:
        for k in range(0, n, 2):
            for each in (k + 1, k):
                if each < n:
                    total = fma(a[..., each], b[..., each], total)
        return total
    for k in range(0, n, 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for each in range(k, min(k + 32, n)):
            sums[each % 2] = fma(a[..., each], b[..., each], sums[each % 2])
        total = total + (sums[0] + sums[1])
    return total


def same(*results: Tensor) -> bool:
    """Bit for bit."""
    first, *others = (each.contiguous().view(-1).view(torch.uint8) for each in results)
    return all(torch.equal(each, first) for each in others)


# --- products ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 33, 17), (5, 64, 48), (13, 95, 70), (2, 31, 16)])
def test_products_add_up_in_the_order_that_is_written_down(own, arithmetic, dtype, m, k, n):
    a, b = normal(m, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype)
    assert same(own.product(a, b, arithmetic), in_order(a, b, arithmetic))


def test_fp32_rows_times_bf16_columns(own):
    a, b = normal(7, 70), normal(33, 70, seed=1, dtype=torch.bfloat16)
    assert same(own.product(a, b), in_order(a, b, EXACT))


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
def test_a_row_has_its_bits_in_any_company(fast, arithmetic, dtype):
    assert_company_changes_nothing(fast, arithmetic, dtype)


def assert_company_changes_nothing(fast, arithmetic, dtype):
    a, b = normal(131, 576, dtype=dtype), normal(80, 576, seed=1, dtype=dtype)
    alone = torch.cat([fast.product(a[i : i + 1].clone(), b, arithmetic) for i in range(len(a))])
    for rows in (2, 5, 6, 7, 12, 13, 64, 131):
        assert same(fast.product(a[:rows].clone(), b, arithmetic), alone[:rows])


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
def test_neighbours_that_are_not_finite_change_nothing(own, arithmetic, dtype):
    a, b = normal(13, 70, dtype=dtype), normal(40, 70, seed=1, dtype=dtype)
    clean = own.product(a, b, arithmetic)
    a[4], a[11], b[17] = NAN, INF, NAN
    mixed = own.product(a, b, arithmetic)
    rows, columns = [i for i in range(13) if i not in (4, 11)], [i for i in range(40) if i != 17]
    assert same(mixed[rows][:, columns], clean[rows][:, columns])
    assert not mixed[4].isfinite().any()


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
def test_one_thread_and_several_give_the_same(fast, arithmetic, dtype):
    assert_threads_change_nothing(fast, arithmetic, dtype)


def assert_threads_change_nothing(fast, arithmetic, dtype):
    a, b = normal(9, 576, dtype=dtype), normal(200, 576, seed=1, dtype=dtype)
    assert same(*(fast.product(a, b, arithmetic, threads=threads) for threads in (1, 2, 3)))


def test_two_callers_at_once_get_what_one_gets(fast):
    a, b = normal(9, 576), normal(200, 576, seed=1)
    one = fast.product(a, b)
    with ThreadPoolExecutor(2) as callers:
        both = list(callers.map(lambda _: [fast.product(a, b, threads=2) for _ in range(200)], range(2)))
    assert all(same(one, each) for given in both for each in given)


FORK = """
import os, sys, time
from tests.support.native_calls import forms, kernels
import torch
own, a, b = kernels(forms()[0]), torch.ones(8, 64), torch.ones(512, 64)
def multiply():
    return all(float(own.product(a, b, threads=2).sum()) == 8 * 512 * 64 for _ in range(50))
good = multiply()
time.sleep(0.01)  # longer than threads spin: they sleep
good = multiply() and good
child = os.fork()
if child == 0:
    os._exit(0 if multiply() else 1)
sys.exit(not good or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_sleep_wake_and_are_made_anew_after_a_fork():
    directory()  # compiled before the clock runs
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=PATIENCE, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
def test_a_sum_may_begin_with_what_is_there_and_stop_before_the_end(own, arithmetic, dtype):
    a, b, before = normal(7, 75, dtype=dtype), normal(40, 75, seed=1, dtype=dtype), normal(7, 40, seed=2)
    whole = own.product(a, b, arithmetic)
    assert torch.allclose(own.product(a, b, arithmetic, add=before), whole + before, atol=1e-4)
    for k in (64, 33):
        short = own.product(a[:, :k].contiguous(), b[:, :k].contiguous(), arithmetic)
        stale = b.clone()
        stale[:, k:] = NAN  # not read, not even as the other half of a pair
        assert same(own.product(a, stale, arithmetic, k=k), short)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_packing_any_strides(own, dtype, source):
    """[unit][k][16] in fp32, [unit][pair][16][2] in bf16, filled up with zeros."""
    for k, n in ((33, 50), (64, 32), (1, 16), (7, 3)):
        b_KN = normal(k, n, dtype=source)
        units, rows = -(-n // 16), k if dtype == torch.float32 else k + k % 2
        wanted = F.pad(b_KN.float().to(dtype), (0, units * 16 - n, 0, rows - k)).view(rows, units, 16).transpose(0, 1)
        if dtype == torch.bfloat16:
            wanted = wanted.reshape(units, rows // 2, 2, 16).transpose(2, 3)
        for stored in (b_KN, b_KN.T.contiguous().T, F.pad(b_KN, (0, 5))[:, :n]):
            packed = torch.empty(own.calls.motet_packed_bytes(TYPES[dtype], k, n), dtype=torch.uint8)
            own.calls.motet_pack(
                TYPES[source], stored.data_ptr(), *stored.stride(), k, n, TYPES[dtype], address(packed)
            )
            assert torch.equal(packed.view(dtype), wanted.flatten())


def test_denormals_are_zero_and_the_callers_mode_comes_back(own):
    tiny = torch.full((1, 2), 1e-20)
    assert float(own.product(tiny, tiny)[0, 0]) == 0.0
    assert float(torch.tensor(1e-20) * torch.tensor(1e-20)) > 0.0


def test_products_are_close_to_those_of_doubles(own):
    a, b = normal(6, 1000, dtype=torch.bfloat16), normal(48, 1000, seed=1, dtype=torch.bfloat16)
    wanted = a.double() @ b.double().T
    for arithmetic in (EXACT, PAIRS):
        assert torch.allclose(own.product(a, b, arithmetic).double(), wanted, atol=2e-4)


# --- functions and rows --------------------------------------------------------------------------------------------------


def test_functions_are_those_of_doubles_within_a_few_units_of_the_last_place(own):
    x = torch.cat([torch.linspace(-86, 86, 4000), normal(96), torch.tensor([0.0, -0.0] * 8)])
    exp, sigmoid, tanh, _ = own.functions(x)
    wanted = x.double()
    assert float(((exp.double() - wanted.exp()) / wanted.exp()).abs().max()) < 2.5e-7
    assert float(((sigmoid.double() - wanted.sigmoid()) / wanted.sigmoid()).abs().max()) < 4e-7
    assert float((tanh.double() - wanted.tanh()).abs().max()) < 3e-7
    positive = torch.cat([torch.logspace(-37, 38, 3984), torch.linspace(0.9, 1.1, 16)])
    log = own.functions(positive)[3].double()
    assert float((log - positive.double().log()).abs().div(positive.double().log().abs().clamp_min(1)).max()) < 2e-7


def test_functions_at_their_ends(own):
    x = torch.tensor([NAN, INF, -INF, 89.0, -88.0, -200.0, 88.7, 0.0] * 2)
    exp, sigmoid, tanh, log = own.functions(x)
    assert exp[0].isnan()
    assert exp[1] == INF
    assert exp[2] == 0
    assert exp[3] == INF
    assert exp[4] == 0
    assert exp[5] == 0
    assert exp[6].isfinite()
    assert exp[7] == 1
    assert sigmoid[0].isnan()
    assert sigmoid[1] == 1
    assert sigmoid[2] == 0
    assert tanh[1] == 1
    assert tanh[2] == -1
    assert log[0].isnan()
    assert log[1] == INF


def test_forms_have_the_same_bits():
    """All that is not a product, on numbers of a wide range."""
    results = []
    for form in forms():
        own = kernels(form)
        x, y, z = (normal(5, 83, seed=seed) * 3 for seed in range(3))
        weight, angle = normal(83, seed=3), normal(5, 8, seed=4)
        parts: list[Tensor] = [*own.functions(normal(256, seed=5) * 20), own.rms_norm(x, weight, 1e-5)]
        parts += [own.rms_norm(x, weight, 1e-5, torch.bfloat16).float(), own.rms_norm_backward(x, weight, 1e-5, y)]
        parts += [own.rope(normal(5, 3, 16), angle.cos(), angle.sin())]
        for gate in (0, 1):
            parts += [own.gate_up(gate, x, y), own.gate_up(gate, x, y, torch.bfloat16).float()]
            parts += own.gate_up_backward(gate, x, y, z)
        logits = normal(1000, seed=6) * 5
        made = own.row_sum(logits, 0.7)
        parts += [torch.tensor([made.peak, made.log_total, made.entropy]), own.slope(logits, 5, 0.7)[2]]
        parts += own.draw(logits, torch.linspace(0, 0.99, 40, dtype=torch.double), 0.7)[:2]
        doubles = normal(999, seed=7).double() * 30
        parts += [own.math.exp_doubles(doubles), *own.math.cos_sin(doubles.float() * 300)]
        parts += [torch.tensor(own.math.norm(logits), dtype=torch.double), own.math.product(x, y.t())]
        parts += adamw_parts(own)
        for arithmetic, dtype in WAYS:
            parts += attention_parts(own, arithmetic, dtype)
        results.append(parts)
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))


def test_norms_and_their_gradients(own):
    x, weight, slope = normal(6, 83), normal(83, seed=1), normal(6, 83, seed=2)
    leaf = x.clone().requires_grad_()
    wanted = F.rms_norm(leaf, (83,), weight, 1e-5)
    assert torch.allclose(own.rms_norm(x, weight, 1e-5), wanted, atol=1e-5)
    (gradient,) = torch.autograd.grad(wanted, leaf, slope)
    assert torch.allclose(own.rms_norm_backward(x, weight, 1e-5, slope), gradient, atol=1e-5)
    whole = own.rms_norm(x, weight, 1e-5)
    assert same(*(own.rms_norm(x[i : i + 1].clone(), weight, 1e-5) for i in [2]), whole[2:3])


@pytest.mark.parametrize("gate", [0, 1])
def test_gates_and_their_gradients(own, gate):
    x, up, slope = (normal(6, 83, seed=seed) * 3 for seed in range(3))
    leaves = x.clone().requires_grad_(), up.clone().requires_grad_()
    wanted = (F.silu(leaves[0]) if gate == 0 else F.gelu(leaves[0], approximate="tanh")) * leaves[1]
    assert torch.allclose(own.gate_up(gate, x, up), wanted, atol=1e-5)
    gradients = torch.autograd.grad(wanted, leaves, slope)
    for shown, gradient in zip(own.gate_up_backward(gate, x, up, slope), gradients, strict=True):
        assert torch.allclose(shown, gradient, atol=2e-5 if gate == 0 else 1e-4)


def test_bf16_is_the_nearest_with_ties_to_even(own):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy()).view(64, 64)
    x = torch.where(x.isfinite() & (x.abs() > 1e-30) & (x.abs() < 1e30), x, torch.ones(()))
    one = torch.ones(64)
    plain = own.rms_norm(x, one, 0.0)
    assert torch.equal(own.rms_norm(x, one, 0.0, torch.bfloat16), plain.bfloat16())


def test_rotary_positions_turn_back(own):
    x, angle = normal(5, 3, 32), normal(5, 16, seed=1)
    cos, sin = angle.cos(), angle.sin()
    turned = own.rope(x, cos, sin)
    a, b = x[..., :16], x[..., 16:]
    wanted = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
    assert torch.allclose(turned, wanted, atol=1e-6)
    assert torch.allclose(own.rope(turned, cos, sin, back=True), x, atol=1e-5)


# --- attention -----------------------------------------------------------------------------------------------------------

HEADS, KV, WIDTH, LENGTH = 6, 2, 32, 75


def sequence(dtype: torch.dtype, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that the type holds without rounding."""
    heads = (HEADS, KV, KV)
    q, k, v = (normal(length, n, WIDTH, seed=seed).to(dtype).float() for seed, n in enumerate(heads))
    return q, k, v


def attention_parts(own: Kernels, arithmetic: int, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = sequence(dtype)
    cache = own.cache(LENGTH, KV, WIDTH, dtype)
    out, log_sums = own.attend(cache, q, k, v, arithmetic=arithmetic, window=40)
    call = own.call(cache, q, out, log_sums, arithmetic, window=40)
    return [out, log_sums, *own.attend_backward(cache, call, normal(*q.shape, seed=9))]


def stock(
    q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Attention in doubles, written out."""
    fold = HEADS // KV
    q, k, v = q.double(), k.double().repeat_interleave(fold, 1), v.double().repeat_interleave(fold, 1)
    scores = torch.einsum("the,she->hts", q, k) * 0.125
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row, key = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    hidden = (key > row) | ((key <= row - window) if window else torch.zeros((), dtype=torch.bool))
    scores = scores.masked_fill(hidden, -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hts,she->the", scores.softmax(-1)[..., : len(k)], v)


OPTIONS: list[dict[str, Any]] = [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": True}]


def options_of(option: dict[str, Any]) -> dict[str, Any]:
    return {**option, "sinks": normal(HEADS, seed=7)} if "sinks" in option else option


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_attention_is_that_of_doubles(own, arithmetic, dtype, option):
    q, k, v = sequence(dtype)
    out, _ = own.attend(own.cache(LENGTH, KV, WIDTH, dtype), q, k, v, arithmetic=arithmetic, **options_of(option))
    tolerance = 1e-5 if dtype == torch.float32 else 1.5e-2  # weights are rounded to bf16
    assert torch.allclose(out.double(), stock(q, k, v, **options_of(option)), atol=tolerance)


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_decoding_and_prefilling_in_any_pieces_give_the_same(fast, arithmetic, dtype, option):
    q, k, v = sequence(dtype)
    own, options = fast, options_of(option)
    whole, sums = own.attend(own.cache(LENGTH, KV, WIDTH, dtype), q, k, v, arithmetic=arithmetic, **options)
    for pieces in ([1] * LENGTH, [17, 1, 40, 17], [70, 5]):
        # what blocks held before is not read
        cache, outputs, at = own.cache(LENGTH, KV, WIDTH, dtype, fill=NAN), [], 0
        for n in pieces:
            rows = slice(at, at + n)
            outputs.append(own.attend(cache, *(x[rows].clone() for x in (q, k, v)), at, arithmetic, **options))
            at += n
        assert same(torch.cat([out for out, _ in outputs]), whole)
        assert same(torch.cat([each for _, each in outputs]), sums)


@pytest.mark.parametrize(("arithmetic", "dtype"), WAYS)
def test_keys_that_come_later_change_nothing(own, arithmetic, dtype):
    assert_later_keys_change_nothing(own, arithmetic, dtype)


def assert_later_keys_change_nothing(own, arithmetic, dtype):
    q, k, v = sequence(dtype)
    clean, _ = own.attend(own.cache(LENGTH, KV, WIDTH, dtype), q, k, v, arithmetic=arithmetic)
    k[50], v[50] = NAN, INF
    mixed, _ = own.attend(own.cache(LENGTH, KV, WIDTH, dtype), q, k, v, arithmetic=arithmetic)
    assert same(mixed[:50], clean[:50])
    assert not mixed[50:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS[:3], ids=str)
def test_gradients_of_attention(own, dtype, option):
    q, k, v = sequence(dtype)
    slope = normal(*q.shape, seed=5).to(dtype).float()
    cache = own.cache(LENGTH, KV, WIDTH, dtype, fill=NAN)
    out, log_sums = own.attend(cache, q, k, v, **option)
    shown = own.attend_backward(cache, own.call(cache, q, out, log_sums, **option), slope)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(stock(*leaves, **option), leaves, slope.double())
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    for name, mine, theirs in zip("qkv", shown, wanted, strict=True):
        assert torch.allclose(mine.double(), theirs, atol=tolerance), name


def test_gradients_of_rows_after_a_prefix(own):
    """Rows from a position on, as a sample after a shared prompt: gradients reach the prompt's keys too."""
    q, k, v = sequence(torch.float32)
    slope, begin = normal(*q.shape, seed=5), 30
    cache: Cache = own.cache(LENGTH, KV, WIDTH, torch.float32)
    own.attend(cache, *(x[:begin].clone() for x in (q, k, v)))
    late = [x[begin:].clone() for x in (q, k, v)]
    out, log_sums = own.attend(cache, *late, begin)
    dq, dk, dv = own.attend_backward(cache, own.call(cache, late[0], out, log_sums), slope[begin:].clone(), begin)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(stock(*leaves)[begin:], leaves, slope[begin:].double())
    for mine, theirs in zip((dq, dk, dv), (wanted[0][begin:], *wanted[1:]), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-5)


# --- logits and AdamW ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_over_a_row_of_logits(own, temperature):
    logits = normal(5003) * 4
    wanted = (logits.double() / temperature).log_softmax(-1)
    assert own.row_sum(logits, temperature).usable == 1
    logprob, entropy, slope = own.slope(logits, 17, temperature)
    assert logprob == pytest.approx(float(wanted[17]), abs=2e-6)
    assert entropy == pytest.approx(float(-(wanted.exp() * wanted).sum()), abs=1e-5)
    onehot = F.one_hot(torch.tensor(17), 5003)
    assert torch.allclose(slope.double(), (onehot - wanted.exp()) / temperature, atol=1e-7)
    assert own.math.logprobs(logits[None], torch.tensor([17]), temperature)[0] == logprob


@pytest.mark.parametrize("bad", [NAN, INF])
def test_rows_that_are_not_finite_are_not_usable(own, bad):
    logits = normal(600)
    logits[300] = bad
    assert own.row_sum(logits).usable == 0
    assert not own.draw(logits, torch.zeros(1))[2]
    assert own.row_sum(torch.full((600,), -INF)).usable == 0
    logits[300] = -INF  # a token that is ruled out
    made = own.row_sum(logits)
    assert made.usable == 1
    assert math.isfinite(made.entropy)


def test_draws_invert_the_cumulative_distribution(own):
    logits = normal(1003) * 3
    logits[::7] = -INF
    ends = logits.double().softmax(-1).cumsum(-1)
    uniforms = torch.tensor([*np.random.default_rng(0).random(300), 0.0, 1 - 2.0**-53], dtype=torch.double)
    tokens, logprobs, _ = own.draw(logits, uniforms)
    for uniform, token, logprob in zip(uniforms.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
        wanted = int(torch.searchsorted(ends, torch.tensor(uniform * float(ends[-1]), dtype=torch.double), right=True))
        near = abs(float(ends[token]) - uniform) < 1e-6 or abs(float(ends[token - 1]) - uniform) < 1e-6
        assert token == wanted or near
        assert logits[token].isfinite()
        assert logprob == own.slope(logits, token)[0]
    assert own.draw(logits, torch.zeros(1), temperature=0.0)[0] == logits.argmax()


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}]
)
def test_what_is_left_out_is_never_drawn(fast, options):
    """Frequencies of 4,000 draws are those of torch's own truncation."""
    logits, params = normal(300) * 2, SamplingParams(temperature=0.9, **options)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(4000))
    rows = logits.expand(4000, -1)
    ours, logprobs, _ = fast.math.draw(rows, [params] * 4000, uniforms)
    theirs, expected, _ = draw(rows, [params] * 4000, uniforms)
    assert set(ours.tolist()) == set(theirs.tolist())
    assert float((ours == theirs).float().mean()) > 0.999
    same_tokens = ours == theirs
    assert torch.allclose(logprobs[same_tokens], expected[same_tokens], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}])
@pytest.mark.parametrize("temperature", [1e-50, 1e-40])
def test_a_temperature_that_is_zero_in_fp32_takes_the_most_likely_token(fast, temperature, options):
    """And a row beside it keeps its own token."""
    logits, uniforms = normal(2, 300), torch.tensor([0.99, 0.5], dtype=torch.double)
    other = SamplingParams(top_p=0.9)
    tokens, logprobs, usable = fast.math.draw(logits, [SamplingParams(temperature, **options), other], uniforms)
    alone = fast.math.draw(logits[1:], [other], uniforms[1:])
    greedy = fast.math.draw(logits[:1], [SamplingParams(0.0)], uniforms[:1])
    assert [tokens[0], logprobs[0]] == [greedy[0][0], greedy[1][0]]
    assert [tokens[1], logprobs[1]] == [alone[0][0], alone[1][0]]
    assert usable.all()


def test_a_token_outside_the_vocabulary_is_refused(fast):
    with pytest.raises(IndexError, match="vocabulary of 300"):
        fast.math.logprobs(normal(1, 300), torch.tensor([300]), 1.0)


def adamw_parts(own: Kernels) -> list[Tensor]:
    """Masters, moments and version after three steps with clipped gradients, which are cleared."""
    layout = make_layout({"a": (9, 7)}, 4)
    master, gradient, mean, square = (normal(layout.size, seed=seed) * (seed < 2) for seed in range(4))
    made: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16) * 2:
        new = AdapterWeights(layout, 0.7, torch.empty(layout.size, dtype=dtype))
        scaled, step = gradient * (2 * len(made) + 2), len(made) + 1
        own.math.adamw(AdamW(0.01, (0.9, 0.99), 1e-8, 0.1), step, 0.5, (master, scaled, mean, square), new)
        assert same(new.flat, AdapterWeights.from_masters(layout, 0.7, master, dtype).flat)
        assert not scaled.any()
        made.append(new.flat)
    return [master, mean, square, *made]


def test_adamw_is_that_of_torch(own):
    parts = adamw_parts(own)
    theirs = normal(len(parts[0])).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3, 4):
        theirs.grad = normal(len(theirs), seed=1) * step
        optimizer.step()
    assert torch.allclose(parts[0], theirs.detach(), atol=1e-6)


def test_functions_of_losses(own):
    x = torch.cat([torch.linspace(-750, 750, 3001), normal(200) * 1e-4]).double()
    assert torch.allclose(own.math.exp_doubles(x)[x < 709], x[x < 709].exp(), rtol=1e-15, atol=1e-300)
    assert own.math.exp_doubles(torch.tensor([710.0, -INF, NAN, 0.0])).tolist()[:2] == [INF, 0.0]
    small = normal(50).mul(1e-3).requires_grad_()
    for ours, theirs in ((own.math.exp, torch.exp), (own.math.expm1, torch.expm1)):
        assert torch.allclose(ours(small), theirs(small), rtol=1e-6)
        slopes = [torch.autograd.grad(each(small).sum(), small)[0] for each in (ours, theirs)]
        assert torch.allclose(slopes[0], slopes[1], rtol=1e-6)
    angles = normal(2000) * 10_000
    assert same(own.math.cos_sin(angles)[0], angles.double().cos().float())
    assert same(own.math.cos_sin(angles)[1], angles.double().sin().float())
    assert own.math.norm(small.detach()) == pytest.approx(float(small.detach().double().norm()), rel=1e-14)


def test_the_head_of_a_critic_has_the_gradients_of_autograd(own):
    hidden, head = normal(37, 70).requires_grad_(), normal(71, seed=1).requires_grad_()
    ours, theirs = own.math.values(hidden, head), (hidden * head[:-1]).sum(-1) + head[-1]
    assert torch.allclose(ours, theirs, atol=1e-5)
    slopes = [torch.autograd.grad(each.square().sum(), (hidden, head)) for each in (ours, theirs)]
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*slopes, strict=True))


# --- matrix units --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 32, 16),
        (3, 64, 17),
        (16, 95, 48),
        (17, 96, 32),
        (33, 160, 70),
        (64, 31, 40),
        (50, 33, 96),
        (64, 16, 96),
        (20, 48, 70),
        (40, 94, 33),
        (5, 2, 16),
    ],
)
def test_emulated_matrix_units_have_the_bits_of_all_forms(own, m, k, n, add):
    """As Intel's manual defines them, on numbers of all sizes: denormals, what overflows, zeros of both signs."""
    a, b = normal(m, k, dtype=torch.bfloat16), normal(n, k, seed=1, dtype=torch.bfloat16)
    scale = torch.tensor([1.0, 1e-20, 1e-39, 1e20, -0.0], dtype=torch.bfloat16)
    a, b = a * scale[torch.arange(k) % 5], b * scale[torch.arange(n) % 3][:, None]
    before = normal(m, n, seed=2) if add else None
    assert same(own.product(a, b, add=before, emulated=True), own.product(a, b, add=before))


def test_the_form_for_matrix_units_compiles_and_is_chosen_only_where_they_are(fast):
    assert bool(fast.calls.motet_form_runs(b"amx")) <= (NEEDS["amx"] in FLAGS)
    if "amx" in building.forms_here():
        tdpbf16ps = bytes.fromhex("c4e24a5cc4")  # of tiles 0, 4 and 6
        assert tdpbf16ps in (directory() / building.file_name("amx")).read_bytes()


# --- building and planted faults -----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("ROWS", assert_company_changes_nothing),
        ("THREADS", assert_threads_change_nothing),
        ("MASK", assert_later_keys_change_nothing),
    ],
    ids=["rows", "threads", "mask"],
)
def test_a_planted_fault_turns_its_test_red(tmp_path, fault, claim):
    form = forms()[0]
    building.build(tmp_path, [form], (f"-DMOTET_FAULT_{fault}",))
    for arithmetic_and_type in WAYS[:2]:  # exact, and in pairs
        with pytest.raises(AssertionError):
            claim(Kernels(tmp_path / building.file_name(form)), *arithmetic_and_type)


def test_the_fastest_form_that_agrees_is_taken(tmp_path):
    made = {form: (directory() / building.file_name(form)).read_bytes() for form in forms()}
    if len(made) < 2:
        pytest.skip("this processor runs one form only")
    best = forms()[0]
    (tmp_path / building.file_name("portable")).write_bytes(made["portable"])
    portable = Kernels(tmp_path / building.file_name("portable")).calls
    native = fastest(tmp_path, portable)
    assert native.form == "portable"
    assert f"{best}: not compiled" in native.passed_over
    (tmp_path / building.file_name(best)).write_bytes(made[best])
    assert fastest(tmp_path, portable).form == best


def test_a_form_can_be_asked_for(monkeypatch):
    portable = kernels("portable").calls
    monkeypatch.setenv(library.FORM, "portable")
    native = fastest(directory(), portable)
    assert native.form == "portable"
    assert "avx2: MOTET_KERNELS_FORM is portable" in native.passed_over
    monkeypatch.setenv(library.FORM, "sse")
    with pytest.raises(ConfigError, match=r"'sse'; there are: amx,.*avx2, portable"):
        fastest(directory(), portable)
    missing = [form for form in building.FORMS if form not in forms()]
    for form in missing:
        monkeypatch.setenv(library.FORM, form)
        with pytest.raises(ConfigError, match="do not run here"):
            fastest(directory(), portable)


def test_a_library_of_something_else_is_not_taken():
    assert library._open(Path("libm.so.6")) is None


def test_without_a_compiler_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(building.CannotBuild, match="install g\\+\\+"):
        building.build(tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(building.CannotBuild, match="portable form"):
        building.build(tmp_path)
    assert not list(tmp_path.iterdir())
