"""A critic: advantages as the naive sum has them, gradients of plain PyTorch, its own slot, and its place in every commit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel

import motet
from motet.algorithms.critic import CriticConfig, ValueLoss, credited, generalised_advantages
from motet.algorithms.presets import Ppo
from motet.config import JobConfig
from motet.core.batch import AdamW, Batch, LossInputs
from motet.core.errors import AdapterError
from motet.runtime.slots import Claim, admitted
from motet.training.arena import HEAD
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.critics import critic_trainer, value_segment
from tests.support.fake_run import metrics, records, weights
from tests.support.rollout_groups import group, rollout
from tests.support.segments import make_segment

pytestmark = pytest.mark.bits

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
figures = st.floats(-5, 5)


@given(st.lists(st.tuples(figures, figures), min_size=1, max_size=12), st.floats(0.1, 1), st.floats(0, 1))
def test_advantages_are_those_of_the_naive_sum(steps: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = (np.array(column) for column in zip(*steps, strict=True))
    naive = np.zeros(len(values))
    for t, k in itertools.product(range(len(values)), repeat=2):
        if k >= t:
            after = values[k + 1] if k + 1 < len(values) else 0.0
            naive[t] += (gamma * lam) ** (k - t) * (rewards[k] + gamma * after - values[k])
    np.testing.assert_allclose(generalised_advantages(rewards, values, gamma, lam), naive, atol=1e-9)


def test_what_the_model_read_is_skipped() -> None:
    """Two turns with a reply between them: the value after the first turn's last token is that of the second's first."""
    (sample, other) = Ppo(critic=CriticConfig()).batch([group(rollout(1.0, 3), rollout(0.0, 3))], 8).samples
    ids, mask = np.arange(8, dtype=np.int32), np.array([0, 0, 1, 1, 0, 0, 1, 0], np.bool_)
    nothing = np.zeros(8, np.float32)
    two_turns = replace(
        sample, token_ids=ids, loss_mask=mask, logprobs=nothing, advantages=np.eye(8, dtype=np.float32)[6]
    )
    values = np.array([9, 9, 0.25, 0.5, 9, 9, 0.75, 9], np.float32)
    batch = replace(Ppo().batch([], 8), samples=(two_turns, other))
    credit = credited(batch, [values, np.zeros(other.n_tokens, np.float32)], CriticConfig(lam=0, gamma=1))
    returns = credit.critic.samples[0].advantages
    np.testing.assert_allclose(returns, [0, 0, 0.5, 0.75, 0, 0, 1.0, 0])  # λ = 0: the next value, at the end the reward
    np.testing.assert_allclose(credit.critic.samples[0].logprobs, values * mask)
    policy = np.concatenate([one.advantages[one.loss_mask] for one in credit.policy.samples])
    assert policy.mean() == pytest.approx(0, abs=1e-6)
    assert policy.std() == pytest.approx(1, abs=1e-5)
    # the variance of returns ½, ¾, 1, 0, 0, 0, and of what the values ¼, ½, ¾, 0, 0, 0 left of them
    made = [*credit.policy.samples, *credit.critic.samples]
    assert {values.dtype for one in made for values in (one.advantages, one.logprobs)} == {np.dtype(np.float32)}
    assert credit.explained == pytest.approx(1 - (1 / 64) / (29 / 96 - 9 / 64))
    none = [np.zeros(sample.n_tokens, np.float32) for sample in batch.samples]
    assert math.isnan(credited(replace(batch, samples=(other,)), none[1:], CriticConfig()).explained)


def test_losses_of_values_by_hand() -> None:
    """A value that moved by less than the clip, one that went too far either way, and one that came back from too far."""
    values, returns = torch.tensor([1.25, 2.0, 0.0, 2.0], requires_grad=True), torch.tensor([2.0, 3.0, -1.0, 1.0])
    ones = torch.ones(4)
    losses, clipped = ValueLoss(0.5).token_losses(
        LossInputs(values, ones, ones, returns, ones, torch.zeros(4).long(), 1)
    )
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert losses.tolist() == [0.28125, 1.125, 1.125, 0.5]
    assert gradient.tolist() == [-0.75, 0.0, 0.0, 1.0]
    assert clipped.tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", ["llama", "llama/native"])
def test_gradients_of_values_equal_plain_pytorch(name: str, tmp_path: Path) -> None:
    """Within 2e-5 of the largest, of adapter and head, in one packed batch with a policy's segment."""
    base, segment = tiny.base(name), value_segment()
    trainer = critic_trainer(base)
    trainer.save_adapter("a", tmp_path, optimizer=False)
    model: Any = PeftModel.from_pretrained(tiny.stock("llama"), tmp_path, is_trainable=True)
    arena = inside.arena(trainer, "a")
    assert arena.values is not None
    head = arena.values.clone().requires_grad_()
    total = torch.zeros(())
    for sample in segment.samples:
        ids = torch.from_numpy(sample.token_ids).long()
        hidden = model.base_model.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
        values = (hidden[:-1] @ head[:-1] + head[-1])[torch.from_numpy(sample.loss_mask)[1:]]
        old, returns = (torch.from_numpy(one[sample.loss_mask]) for one in (sample.logprobs, sample.advantages))
        near = old + (values - old).clamp(-0.2, 0.2)
        total = total + 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / segment.denominator
    total.backward()
    values = trainer.forward(Batch((segment,)))[0]
    trained, _ = trainer.forward_backward(Batch((segment, make_segment("b"))))
    assert trained.stats.loss == pytest.approx(total.item(), rel=1e-5)
    assert 0 < trained.stats.clipped < trained.stats.tokens
    for now, before in zip(trained.logprobs, values, strict=True):
        np.testing.assert_array_equal(now, before)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    pairs = [(arena.gradient[arena.layout.size :], head.grad)]
    for path, both in arena.layout.views(arena.gradient).items():
        for side, ours in zip("AB", both, strict=True):
            pairs.append((ours.t(), wanted[f"base_model.model.{path}.lora_{side}.default.weight"]))
    for ours, want in pairs:
        assert want is not None
        assert float((ours - want).abs().max()) <= 2e-5 * max(float(want.abs().max()), 1e-12)


def test_scoring_takes_no_memory_for_a_gradient() -> None:
    """An adapter has it from a batch until its step."""
    trainer, batch = critic_trainer(tiny.base("llama")), Batch((value_segment(),))
    trainer.forward_backward(batch)
    trainer.optim_step("a", AdamW(1e-3))
    trainer.forward(batch)
    assert trainer.values("a") is not None
    assert inside.arena(trainer, "a")._gradient is None


def test_heads_add_up_in_the_order_of_segments_however_they_are_batched() -> None:
    base = tiny.base("llama")
    whole = value_segment()
    parts = [replace(whole, samples=(sample,)) for sample in (*whole.samples, *whole.samples[:2])]
    together, apart = critic_trainer(base), critic_trainer(base)
    together.forward_backward(Batch((*parts, make_segment("b"))))
    for part in parts:
        apart.forward_backward(Batch((part,)))
    assert torch.equal(inside.arena(together, "a").gradient, inside.arena(apart, "a").gradient)


def test_head_and_moments_are_saved_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    base, segment, adamw = tiny.base("llama"), value_segment(), AdamW(1e-2)
    whole, parts = critic_trainer(base), critic_trainer(base)
    for trainer in (whole, parts):
        trainer.forward_backward(Batch((segment,)))
        trainer.optim_step("a", adamw)
    parts.save_adapter("a", tmp_path, optimizer=True)
    again = critic_trainer(base)
    again.load_adapter("a", tmp_path, optimizer=True)
    for trainer in (whole, again):
        trainer.forward_backward(Batch((segment, make_segment("b"))))
        trainer.optim_step("a", adamw)
    assert torch.equal(inside.arena(whole, "a").masters, inside.arena(again, "a").masters)
    (tmp_path / HEAD).unlink()
    with pytest.raises(AdapterError, match=f"{HEAD} cannot be read"):
        again.load_adapter("a", tmp_path, optimizer=True)


def ppo(name: str, **fields: Any) -> dict[str, Any]:
    job = {
        "name": name,
        "data": {"source": "toy:add", "size": 32, "holdout": 0},
        "reward": {"name": "length", "args": {"target": 3}},
        "sampling": {"max_tokens": 5},
        "algorithm": {"type": "ppo", "critic": {"rank": 4, "warmup_steps": 1}, "group_size": 2, "groups_per_step": 4},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 2e-3},
        "steps": 4,
    }
    return {**job, **fields}


def run(directory: Path, *jobs: dict[str, Any], slots: int = 4, **options: Any) -> Any:
    engine = {"samplers": 0, "slots": slots}
    return motet.run(list(jobs), base="small", quiet=True, directory=directory, engine=engine, **options)


def critic_files(directory: Path, name: str, step: int) -> dict[str, bytes]:
    place = directory / name / "state" / str(step) / "critic"
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.mark.cell("critic", "embedded")
def test_a_job_with_a_critic_alone_in_company_and_in_parts(tmp_path: Path) -> None:
    other = ppo("plain", algorithm={"type": "ppo", "group_size": 2, "groups_per_step": 4})
    both = run(tmp_path / "both", ppo("a"), other)
    assert both.ok, both
    run(tmp_path / "alone", ppo("a", steps=2), slots=2)
    alone = run(tmp_path / "alone", ppo("a"), slots=2, accept_changes=True)
    assert alone.ok
    for found in (metrics, lambda path, name: weights(path, name, 4), lambda path, name: critic_files(path, name, 4)):
        assert found(tmp_path / "alone", "a") == found(tmp_path / "both", "a")
    assert set(critic_files(tmp_path / "both", "a", 4)) == {
        "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", HEAD,
    }  # fmt: skip
    version = tmp_path / "both" / "a" / "versions" / "v4"
    assert {path.name for path in version.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "receipt.json",
        "sha256.json",
    }
    lines = records(tmp_path / "both", "a")
    assert weights(tmp_path / "both", "a", 4) != weights(tmp_path / "both", "plain", 4)
    assert lines[0]["loss"] is None, "the critic warms up"
    assert lines[0]["value_loss"] > 0
    assert lines[1]["loss"] is not None
    assert lines[3]["value_loss"] < lines[0]["value_loss"]
    few = run(tmp_path / "few", ppo("a"), slots=1)
    assert "raise engine.slots" in few.jobs["a"].message


def test_a_critic_is_a_slot() -> None:
    plain, critic = (
        JobConfig.model_validate(ppo("a", algorithm=one)) for one in ("ppo", {"type": "ppo", "critic": {}})
    )
    assert (plain.slots, critic.slots) == (1, 2)
    claims = [Claim("a", slots=2), Claim("b"), Claim("c", slots=2), Claim("d")]
    assert admitted(claims, [], 3, {}) == ["a", "b"]
    assert admitted(claims[2:], [Claim("b")], 2, {}) == []  # c is the first, and d does not take what it waits for
    assert admitted(claims[2:], [], 1, {}) == ["c"]  # one job after another
