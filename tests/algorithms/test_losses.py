"""Losses: values and gradients against arithmetic done by hand, and what must hold for any job in any company."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet.algorithms.advantages import normalisation
from motet.algorithms.client import CLIENT_LOSSES, ClientLoss
from motet.algorithms.losses import KL_ESTIMATORS, LOSSES, cispo, loss_and_sums, read_stats
from motet.algorithms.policy_gradient import KLConfig, PolicyGradient
from motet.algorithms.presets import Grpo
from motet.core.batch import Loss, LossInputs, LossStats

pytestmark = pytest.mark.tier1

RATIOS = [0.5, 1.0, 1.5, 0.5, 1.5]
ADVANTAGES = [1.0, 2.0, 1.0, -1.0, -1.0]  # with clip 0.2 / 0.28: tokens 2 and 3 are clipped


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _inputs(logprobs: list[float], sampler: list[float], advantages: list[float], samples: list[int]) -> LossInputs:
    return LossInputs(
        logprobs_N=torch.tensor(logprobs, requires_grad=True),
        entropy_N=torch.full((len(logprobs),), 0.5),
        sampler_logprobs_N=torch.tensor(sampler),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.ones(len(logprobs)),
        sample_N=torch.tensor(samples, dtype=torch.int64),
        n_samples=max(samples, default=-1) + 1,
    )


def _hand_inputs() -> LossInputs:
    return _inputs([math.log(r) - 3 for r in RATIOS], [-3.0] * 5, ADVANTAGES, [0, 0, 0, 1, 1])


def _random_inputs(n: int = 37, samples: int = 5, seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return torch.randn(n, generator=generator) * scale

    sample_N = torch.sort(torch.randint(samples, (n,), generator=generator)).values
    sampler_N = -draw(1.0).abs()
    return LossInputs(
        logprobs_N=(sampler_N + draw(0.3)).requires_grad_(),
        entropy_N=draw(1.0).abs(),
        sampler_logprobs_N=sampler_N,
        advantages_N=torch.randn(samples, generator=generator)[sample_N],
        weights_N=1 + torch.rand(samples, generator=generator)[sample_N],
        sample_N=sample_N,
        n_samples=samples,
        reference_logprobs_N=sampler_N + draw(0.5),
        proximal_logprobs_N=sampler_N + draw(0.2),
    )


def policy(**fields: Any) -> PolicyGradient:
    """An algorithm by its loss; clip ranges are those of token ratios."""
    return Grpo.model_validate({"clip_low": 0.2, "clip_high": 0.28, **fields})


def _loss_and_stats(loss: Loss, denominator: float, inputs: LossInputs) -> tuple[Tensor, LossStats]:
    value, sums = loss_and_sums(loss, denominator, inputs)
    (stats,) = read_stats([sums])
    return value, stats


def _run(spec: PolicyGradient, inputs: LossInputs, denominator: float = 1.0) -> tuple[float, Tensor, LossStats]:
    logprobs_N = inputs.logprobs_N.detach().clone().requires_grad_()
    loss, stats = _loss_and_stats(spec, denominator, replace(inputs, logprobs_N=logprobs_N))
    (grad_N,) = torch.autograd.grad(loss, logprobs_N)
    return loss.item(), grad_N, stats


def _take(inputs: LossInputs, index_N: Tensor, first_sample: int = 0, n_samples: int | None = None) -> LossInputs:
    """The tokens at index_N, as a segment of their own."""
    tensors = {f.name: getattr(inputs, f.name) for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)}
    taken = {name: tensor.detach()[index_N] for name, tensor in tensors.items()}
    taken["sample_N"] = taken["sample_N"] - first_sample
    return replace(inputs, **taken, n_samples=n_samples or inputs.n_samples)


LOW, HIGH = math.log(0.5) - 3, math.log(1.5) - 3  # log π where the ratio is 0.5 and 1.5
# Values, gradients with respect to log π, and clip counts by hand; the denominator is 2.
# ppo: −[min(.5, .8)·1, 2, min(1.5, 1.28), −.8 (the larger loss), −1.5]; the gradient is −ρ·A where not clipped.
HAND: dict[str, tuple[list[float], list[float], int]] = {
    "ppo_clip": ([-0.5, -2.0, -1.28, 0.8, 1.5], [-0.5, -2.0, 0.0, 0.0, 1.5], 2),
    "importance_sampling": ([-0.5, -2.0, -1.5, 0.5, 1.5], [-0.5, -2.0, -1.5, 0.5, 1.5], 0),
    "cispo": (
        [-0.5 * LOW, 6.0, -1.25 * HIGH, 0.5 * LOW, 1.25 * HIGH],
        [-0.5, -2.0, -1.25, 0.5, 1.25],
        2,
    ),
    "reinforce": (
        [-LOW, 6.0, -HIGH, LOW, HIGH],
        [-1.0, -2.0, -1.0, 1.0, 1.0],
        0,
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_token_losses_by_hand(name: str) -> None:
    losses, gradient, clipped = HAND[name]
    loss, grad_N, stats = _run(policy(loss=name, importance_cap=1.25), _hand_inputs(), denominator=2.0)
    assert loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert stats.loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(grad_N, torch.tensor(gradient) / 2)
    assert (stats.tokens, stats.clipped, stats.entropy) == (5, clipped, 2.5)
    assert policy(loss=name).token_losses(_hand_inputs())[1].dtype is torch.bool
    assert stats.ratio == pytest.approx(5.0)
    assert stats.ratio_max == pytest.approx(1.5)
    assert stats.logprob_gap == pytest.approx(math.log(2))
    assert stats.kl_sampler == pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS), rel=1e-5)
    assert (stats.kl_base, stats.kl_base_tokens) == (0.0, 0)


def test_a_token_without_an_advantage_is_not_clipped() -> None:
    loss, grad_N, stats = _run(policy(), _inputs([LOW, HIGH], [-3.0] * 2, [0.0] * 2, [0, 0]))
    assert (loss, grad_N.tolist(), stats.clipped) == (0.0, [0.0, 0.0], 0)


def test_a_ratio_on_a_bound_of_cispo_is_not_capped() -> None:
    inputs = _hand_inputs()
    assert not cispo(1.0, 1.0, inputs, torch.zeros(len(RATIOS)))[1].any()


def test_gspo_by_hand() -> None:
    """Sample 0 has log ratios .1, .3 and so s = e^.2; sample 1 has −.4, −.2, −.3 and s = e^−.3; sample 2 no tokens; 3 one."""
    inputs = _inputs(
        [-1.9, -1.7, -2.4, -2.2, -2.3, -1.9], [-2.0] * 6, [1.0, 1.0, 2.0, 2.0, 2.0, -1.0], [0, 0, 1, 1, 1, 3]
    )
    up, down, last = math.exp(0.2), math.exp(-0.3), math.exp(0.1)
    spec = policy(loss="gspo", clip_low=0.3, clip_high=0.3)
    weights_S, denominator = normalisation([2, 3, 0, 1], "sequence", 8)
    weighted = replace(inputs, weights_N=torch.from_numpy(weights_S)[inputs.sample_N])
    loss, grad_N, stats = _run(spec, weighted, denominator)
    assert loss == pytest.approx(-(up + 2 * down - last) / 3)  # the paper's mean over sequences
    want = [-up / 2 / 3] * 2 + [-2 * down / 3 / 3] * 3 + [last / 3]
    torch.testing.assert_close(grad_N, torch.tensor(want))
    assert stats.clipped == 0
    loss, grad_N, stats = _run(spec.model_copy(update={"clip_high": 0.1}), weighted, denominator)
    assert loss == pytest.approx(-(1.1 + 2 * down - last) / 3)
    assert grad_N[:2].tolist() == [0.0, 0.0]
    assert stats.clipped == 2  # tokens of the clipped sequence


def test_kl_estimators_by_hand() -> None:
    """Log r = reference − policy = .5 and −.25; gradients with respect to log π: 1, log(π / base), 1 − base / π."""
    inputs = _inputs([-1.5, -1.0], [-1.5, -1.0], [0.0, 0.0], [0, 0])
    inputs = replace(inputs, reference_logprobs_N=torch.tensor([-1.0, -1.25]))
    k3 = [math.exp(0.5) - 1 - 0.5, math.exp(-0.25) - 1 + 0.25]
    values = {"k1": [-0.5, 0.25], "k2": [0.125, 0.03125], "k3": k3}
    gradients = {"k1": [1.0, 1.0], "k2": [-0.5, 0.25], "k3": [1 - math.exp(0.5), 1 - math.exp(-0.25)]}
    for name in KL_ESTIMATORS:
        loss, grad_N, stats = _run(policy(kl=KLConfig(coef=0.1, type=name)), inputs)
        assert loss == pytest.approx(0.1 * sum(values[name]), rel=1e-5)
        torch.testing.assert_close(grad_N, 0.1 * torch.tensor(gradients[name]))
        assert stats.kl_base == pytest.approx(sum(k3), rel=1e-5)
        assert stats.kl_base_tokens == 2
    assert _run(policy(), inputs)[2].kl_base_tokens == 2  # a metric without a penalty
    with pytest.raises(ValueError, match="base=True"):
        _run(policy(kl=KLConfig(coef=0.1)), replace(inputs, reference_logprobs_N=None))


@pytest.mark.parametrize(("name", "right"), [("k1", "nothing"), ("k2", "reverse"), ("k3", "forward")])
def test_which_divergence_an_estimator_descends(name: str, right: str) -> None:
    """Over a whole vocabulary, the expected gradient of each estimator against the gradient of the divergence."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    base_V = torch.log_softmax(torch.tensor([-0.2, 0.5, 0.1, 0.9], dtype=torch.float64), 0)
    policy_V = torch.log_softmax(logits_V, 0)
    expected = (policy_V.exp().detach() * KL_ESTIMATORS[name](base_V - policy_V)).sum()
    divergences = {
        "nothing": 0.0 * policy_V.sum(),
        "reverse": (policy_V.exp() * (policy_V - base_V)).sum(),
        "forward": (base_V.exp() * (base_V - policy_V)).sum(),
    }
    (got_V,) = torch.autograd.grad(expected, logits_V, retain_graph=True)
    for divergence, value in divergences.items():
        (want_V,) = torch.autograd.grad(value, logits_V, retain_graph=True)
        assert torch.allclose(got_V, want_V, atol=1e-12) == (divergence == right)


def test_truncated_importance_sampling_by_hand() -> None:
    """Proximal / sampler is e^.5 and e^1, of which the cap 2 holds the second; policy / proximal is e^.1."""
    inputs = _inputs([-1.4, -0.9], [-2.0, -2.0], [1.0, 1.0], [0, 0])
    inputs = replace(inputs, proximal_logprobs_N=torch.tensor([-1.5, -1.0]))
    want = -math.exp(0.1) * torch.tensor([math.exp(0.5), 2.0])
    loss, grad_N, stats = _run(policy(correct_sampler=True, importance_cap=2.0), inputs)
    assert loss == pytest.approx(want.sum().item(), rel=1e-6)
    torch.testing.assert_close(grad_N, want)  # the weight itself has no gradient
    assert stats.clipped == 0
    assert stats.ratio == pytest.approx(math.exp(0.6) + math.exp(1.1))  # metrics are against the sampler
    assert _run(policy(), inputs)[2].clipped == 2  # without the correction the ratio is against the sampler
    loss, grad_N, _ = _run(policy(loss="reinforce", correct_sampler=True), inputs)
    torch.testing.assert_close(grad_N, -torch.tensor([math.exp(0.5), 2.0]))


def test_without_proximal_the_old_policy_is_the_sampler() -> None:
    inputs = replace(_random_inputs(), proximal_logprobs_N=None)
    for name in LOSSES:
        plain, corrected = (_run(policy(loss=name, correct_sampler=flag), inputs) for flag in (False, True))
        assert plain[0] == corrected[0]
        assert torch.equal(plain[1], corrected[1])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_on_policy_is_exact(name: str, n: int) -> None:
    """Equal logprobs: every ratio is 1 and every gap 0, bit for bit, and the gradient is that of REINFORCE."""
    inputs = _random_inputs(n=n)
    inputs = replace(inputs, logprobs_N=inputs.sampler_logprobs_N, proximal_logprobs_N=inputs.sampler_logprobs_N)
    _, grad_N, stats = _run(policy(loss=name, correct_sampler=True, clip_low=0, clip_high=0), inputs)
    assert (stats.ratio, stats.ratio_max, stats.logprob_gap) == (float(n), 1.0, 0.0)
    assert (stats.kl_sampler, stats.clipped) == (0.0, 0.0)
    reinforce_N = -inputs.advantages_N * inputs.weights_N
    torch.testing.assert_close(grad_N, reinforce_N, rtol=1e-5, atol=1e-6)
    if name != "gspo":
        assert torch.equal(grad_N, reinforce_N)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kl_type", KL_ESTIMATORS)
def test_gradients_match_finite_differences(name: str, kl_type: str) -> None:
    """In float64, away from the clip's corners. CISPO's and TIS's weights are constants: they stay at the centre."""
    spec = policy(loss=name, kl=KLConfig(coef=0.05, type=kl_type), clip_low=0.05, clip_high=0.05, correct_sampler=True)
    inputs = _random_inputs(n=12, samples=3)
    doubled = {
        f.name: getattr(inputs, f.name).detach().double()
        for f in fields(inputs)
        if isinstance(getattr(inputs, f.name), Tensor) and f.name != "sample_N"
    }
    inputs = replace(inputs, **doubled)
    _, grad_N, _ = _run(spec, inputs, 3.0)
    if name == "cispo":  # with the detached weight as part of the advantage, CISPO is REINFORCE
        ratio_N = torch.exp(inputs.logprobs_N - doubled["proximal_logprobs_N"]).clamp(max=spec.importance_cap)
        inputs = replace(inputs, advantages_N=inputs.advantages_N * ratio_N)
        spec = spec.model_copy(update={"loss": "reinforce"})
    for token in range(12):
        step_N = torch.zeros(12, dtype=torch.float64)
        step_N[token] = 1e-6
        moved = (replace(inputs, logprobs_N=inputs.logprobs_N + sign * step_N) for sign in (1, -1))
        above, below = (_run(spec, neighbour, 3.0)[0] for neighbour in moved)
        assert grad_N[token].item() == pytest.approx((above - below) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    """Loss, gradient and metrics of two segments are those of one, since the denominator is the step's."""
    inputs = _random_inputs()
    spec = policy(loss=name, kl=KLConfig(coef=0.1), correct_sampler=True)
    loss, grad_N, stats = _run(spec, inputs, 37.0)
    first_N = torch.nonzero(inputs.sample_N < 2).flatten()
    rest_N = torch.nonzero(inputs.sample_N >= 2).flatten()
    loss_a, grad_a, stats_a = _run(spec, _take(inputs, first_N, n_samples=2), 37.0)
    loss_b, grad_b, stats_b = _run(spec, _take(inputs, rest_N, first_sample=2, n_samples=3), 37.0)
    assert loss == pytest.approx(loss_a + loss_b, rel=1e-5)
    torch.testing.assert_close(grad_N, torch.cat([grad_a, grad_b]))
    total = stats_a + stats_b
    for field in fields(LossStats):
        assert getattr(total, field.name) == pytest.approx(getattr(stats, field.name), rel=1e-5), field.name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_fault_stays_in_its_own_segment(name: str, poison: float) -> None:
    """Two jobs' logprobs in one packed tensor, one backward for both: the healthy job has the bits it has alone."""
    spec = policy(loss=name, kl=KLConfig(coef=0.1), correct_sampler=True)
    healthy, sick = _random_inputs(seed=1), _random_inputs(n=23, seed=2)
    solo_loss, solo_N, solo_stats = _run(spec, healthy, 5.0)
    sick_N = sick.logprobs_N.detach().clone()
    sick_N[3] = poison
    for order in (0, 1):
        pair = [(healthy, healthy.logprobs_N.detach()), (sick, sick_N)][:: 1 - 2 * order]
        packed_T = torch.cat([logprobs_N for _, logprobs_N in pair]).requires_grad_()
        pieces = packed_T.split([len(logprobs_N) for _, logprobs_N in pair])
        results = [
            _loss_and_stats(spec, 5.0, replace(inputs, logprobs_N=piece))
            for (inputs, _), piece in zip(pair, pieces, strict=True)
        ]
        (grad_T,) = torch.autograd.grad([loss for loss, _ in results], packed_T)
        grad_N = grad_T.split([len(piece) for piece in pieces])[order]
        assert results[order][0].item() == solo_loss
        assert results[order][1] == solo_stats
        assert torch.equal(grad_N, solo_N)
        assert not math.isfinite(results[1 - order][0].item())
        assert not math.isfinite(results[1 - order][1].logprob_gap)


@pytest.mark.parametrize("name", LOSSES)
def test_bits_do_not_depend_on_the_place_in_the_packed_tensor(name: str) -> None:
    spec = policy(loss=name, kl=KLConfig(coef=0.1))
    inputs = _random_inputs(n=501)
    loss, grad_N, stats = _run(spec, inputs, 7.0)
    for offset in (1, 3, 16):
        packed_T = torch.cat([torch.zeros(offset), inputs.logprobs_N.detach(), torch.zeros(5)]).requires_grad_()
        moved, moved_stats = _loss_and_stats(spec, 7.0, replace(inputs, logprobs_N=packed_T[offset : offset + 501]))
        (grad_T,) = torch.autograd.grad(moved, packed_T)
        assert (moved.item(), moved_stats) == (loss, stats)
        assert torch.equal(grad_T[offset : offset + 501], grad_N)


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_segment_is_zero(name: str) -> None:
    loss, grad_N, stats = _run(policy(loss=name), _inputs([], [], [], []))
    assert (loss, len(grad_N), stats) == (0.0, 0, LossStats())


EVERY_LOSS = [
    *(policy(loss=name, kl=KLConfig(coef=0.1, type=kl)) for name in LOSSES for kl in KL_ESTIMATORS),
    *(policy(loss=name, correct_sampler=True) for name in LOSSES),
    *(ClientLoss.of(name, {"beta": 0.1} if name == "dro" else None) for name in CLIENT_LOSSES),
]


def _name_of(loss: Loss) -> str:
    if isinstance(loss, ClientLoss):
        return f"client-{loss.name}"
    assert isinstance(loss, PolicyGradient)
    return f"{loss.loss}-{'corrected' if loss.correct_sampler else loss.kl.type}"


_LOG_RATIOS = st.floats(-200, 200, width=32)
_TOKENS = st.tuples(_LOG_RATIOS, _LOG_RATIOS, _LOG_RATIOS, st.sampled_from([-2.0, 0.0, 0.5]))


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=_name_of)
@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(_TOKENS, min_size=1, max_size=6), sentinel=st.sampled_from([-9999.0, -200.0]))
@example(tokens=[(200.0, 200.0, 200.0, -2.0)], sentinel=-9999.0)
@example(tokens=[(96.0, 96.0, 96.0, 0.5)], sentinel=-9999.0)
def test_no_log_ratio_overflows_or_reaches_other_tokens(
    loss: Loss, tokens: list[tuple[float, float, float, float]], sentinel: float
) -> None:
    """Tokens of any log ratio in sample 1, and one of no advantage with a sentinel, beside two plain tokens in sample 0."""

    def gradient(own: list[tuple[float, float, float, float]]) -> tuple[float, Tensor, LossStats]:
        beside = [(0.1, 0.2, -0.1, 1.0), (-0.3, 0.1, 0.2, -1.0), *own]
        logprobs = [-1.0] * len(beside)
        inputs = _inputs(logprobs, [-1 - d for d, *_ in beside], [a for *_, a in beside], [0, 0] + [1] * len(own))
        inputs = replace(
            inputs,
            reference_logprobs_N=torch.tensor([-1 + r for _, r, _, _ in beside]),
            proximal_logprobs_N=torch.tensor([-1 - p for _, _, p, _ in beside]),
        )
        leaf_N = inputs.logprobs_N
        value, stats = _loss_and_stats(loss, 1.0, inputs)
        return value.item(), torch.autograd.grad(value, leaf_N)[0], stats

    silent = (-1 - sentinel, 0.0, -1 - sentinel, 0.0)
    value, grad_N, stats = gradient([*tokens, silent])
    assert math.isfinite(value)
    assert torch.isfinite(grad_N).all()
    assert all(math.isfinite(one) for one in vars(stats).values())
    assert torch.equal(grad_N[:2], gradient([])[1])


_LOST: list[set[str]] = [
    {"logprobs_N"}, {"sampler_logprobs_N"}, {"reference_logprobs_N"}, {"proximal_logprobs_N"},
    {"logprobs_N", "reference_logprobs_N"}, {"logprobs_N", "sampler_logprobs_N", "proximal_logprobs_N"},
]  # fmt: skip
"""Where a token has no probability."""


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=_name_of)
def test_a_token_without_probability_is_finite_and_reaches_no_other(loss: Loss) -> None:
    """Its logprob is −∞ in the policy, the sampler, the base or the proximal policy; with and without a weight."""

    def gradient(n_tokens: int, lost: set[str], advantage: float, weight: float) -> tuple[float, Tensor, LossStats]:
        inputs = _inputs([-1.0, -1.2, -1.1], [-1.1, -1.0, -1.3], [1.0, -1.0, advantage], [0, 0, 1])
        inputs = replace(
            inputs,
            logprobs_N=inputs.logprobs_N.detach(),
            reference_logprobs_N=torch.tensor([-1.2, -1.0, -1.1]),
            proximal_logprobs_N=torch.tensor([-1.0, -1.1, -1.2]),
            weights_N=torch.tensor([1.0, 1.0, weight]),
            ratio_mask_N=torch.tensor([1.0, 1.0, 0.0]),
        )
        none_N = torch.tensor([0.0, 0.0, -math.inf])
        inputs = replace(inputs, **{name: getattr(inputs, name) + none_N for name in lost})
        inputs = _take(inputs, torch.arange(n_tokens))
        value, stats = _loss_and_stats(loss, 1.0, replace(inputs, logprobs_N=inputs.logprobs_N.requires_grad_()))
        return value.item(), torch.autograd.grad(value, inputs.logprobs_N)[0], stats

    for lost, advantage, weight in itertools.product(_LOST, (0.0, -2.0, 0.5), (0.0, 1.0)):
        value, grad_N, stats = gradient(3, lost, advantage, weight)
        assert math.isfinite(value)
        assert torch.isfinite(grad_N).all()
        assert all(math.isfinite(one) for one in vars(stats).values())
        assert torch.equal(grad_N[:2], gradient(2, lost, advantage, weight)[1])


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=_name_of)
def test_a_logprob_that_is_no_number_shows_in_the_gradient(loss: Loss) -> None:
    inputs = _inputs([math.nan, -1.0], [-1.0, -1.0], [1.0, 1.0], [0, 1])
    inputs = replace(inputs, reference_logprobs_N=torch.tensor([-1.0, -1.0]))
    value, _ = _loss_and_stats(loss, 1.0, inputs)
    assert math.isnan(value.item())
