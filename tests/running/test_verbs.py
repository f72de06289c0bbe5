"""The verbs for a loop of one's own: what they train is what a run trains, and the example learns."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet import AdamW, Message, Problem, Verbs
from motet.algorithms import Grpo
from motet.algorithms.supervised import Supervised
from motet.core.batch import Example, Row
from motet.core.errors import AdapterError, ConfigError, ProbeError, RunError
from motet.core.types import AdapterRef, Group, Rollout
from motet.protocols import WeightSync
from motet.runtime.checkpoint import JobDirectory
from tests.support.torch_switches import are_motets, switches, users

pytestmark = [pytest.mark.tier1, pytest.mark.bits]

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = [Problem(i, (Message("user", f"What is {i} + {i + 1}?"),), str(2 * i + 1)) for i in range(3)]
LOSS = Grpo(advantage="centered")


@pytest.fixture
def verbs() -> Iterator[Verbs]:
    with Verbs("small", longest=64) as made:
        yield made


def digits(rollout: Rollout) -> float:
    """Something that differs nearly always."""
    return sum(map(ord, rollout.completion)) % 97 / 97


def groups(verbs: Verbs, *names: str, seed: int = 0) -> dict[str, list[Group]]:
    sampled = verbs.sample(dict.fromkeys(names, PROBLEMS), 4, seed=seed, max_tokens=6)
    return {name: [group.rewarded(digits) for group in found] for name, found in sampled.items()}


@pytest.mark.slow
def test_the_example_is_short_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ROOT / "examples" / "loop.py"
    assert len(example.read_text().splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    curves = runpy.run_path(str(example))["main"]()
    for curve in curves.values():
        assert sum(curve[-3:]) > 1.5 * sum(curve[:3])
    for task in curves:
        assert (tmp_path / "runs" / "loop" / task / "adapter_model.safetensors").is_file()


def test_the_pages_loops_run_and_say_that_they_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loops = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loop.md").read_text(), re.DOTALL)
    assert len(loops) == 3
    for loop in (*loops, loops[-1]):
        exec(compile(loop, "loop.md", "exec"), {"__name__": "loop"})  # noqa: S102
    assert (tmp_path / "adapter-short" / "adapter_model.safetensors").is_file()
    said = capsys.readouterr().out
    assert re.findall(r"^resumed after (\d) steps, (\d) more", said, re.MULTILINE) == [("0", "5"), ("5", "0")]
    curves = re.findall(r"^step \d  short (\d\.\d\d)  long (\d\.\d\d)$", said, re.MULTILINE)
    assert len(curves) == 6
    for first, *_, last in zip(*curves, strict=True):
        assert float(last) > float(first) + 0.2


def test_the_trainer_has_the_samplers_logprobs_and_company_changes_no_bit(verbs: Verbs, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        verbs.add_adapter(name, rank=4, seed=7)
    for step in range(2):
        together = groups(verbs, "a", "b", seed=step)
        alone = groups(verbs, "c", seed=step)
        for ours, theirs in zip(together["a"], alone["c"], strict=True):
            for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
                np.testing.assert_array_equal(one.branches[0].token_ids, other.branches[0].token_ids)
        batches = {name: LOSS.batch(found, 6) for name, found in {**together, **alone}.items()}
        trained = verbs.forward_backward({name: batches[name] for name in "ab"}, LOSS)
        assert trained["a"].stats.logprob_gap == 0.0
        verbs.forward_backward({"c": batches["c"]}, LOSS)
        for name in "abc":
            assert verbs.optim_step(name, AdamW(1e-3)).grad_norm > 0
    for name in "ac":
        verbs.save_adapter(name, tmp_path / name)
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] == weights[1]


def test_a_gradient_that_was_not_stepped_is_saved_and_goes_on(verbs: Verbs, tmp_path: Path) -> None:
    verbs.add_adapter("a", rank=4)
    batch = {"a": LOSS.batch(groups(verbs, "a")["a"], 6)}
    verbs.forward_backward(batch, LOSS)
    verbs.save_adapter("a", tmp_path, optimizer=True)
    norm = verbs.optim_step("a", AdamW(1e-3)).grad_norm
    after = verbs.forward(batch)["a"]
    verbs.load_adapter("a", tmp_path, optimizer=True)
    assert verbs.optim_step("a", AdamW(1e-3)).grad_norm == norm
    for found, wanted in zip(verbs.forward(batch)["a"], after, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert any((a != b).any() for a, b in zip(after, verbs.forward(batch, base=True)["a"], strict=True))


def test_one_loop_may_mix_losses(verbs: Verbs) -> None:
    """A supervised pass over answers that were liked best, then a step: rejection sampling in six lines."""
    verbs.add_adapter("a", rank=4)
    best = [max(group.rollouts, key=lambda one: one.reward) for group in groups(verbs, "a")["a"]]
    rows = [Row((Example(one.branches[0].token_ids, one.branches[0].loss_mask),)) for one in best]
    batch = {"a": Supervised().batch(rows)}
    before = verbs.forward_backward(batch, Supervised())["a"].stats.loss
    verbs.optim_step("a", AdamW(3e-3))
    assert verbs.forward_backward(batch, Supervised())["a"].stats.loss < before


class SomebodyElses:
    """A `WeightSync` that publishes one adapter for all, and notes the names that it gave."""

    def __init__(self, sync: WeightSync, instead: str) -> None:
        self._sync, self._instead, self.given = sync, instead, list[AdapterRef]()

    async def publish(self, name: str, ref: AdapterRef) -> None:
        self.given.append(ref)
        await self._sync.publish(self._instead, ref)


def test_each_version_is_probed_and_a_name_that_comes_back_has_others(verbs: Verbs) -> None:
    verbs.add_adapter("a", rank=4)
    host = verbs._host
    sync = SomebodyElses(host.services.sync, "a")
    host.services = replace(host.services, sync=sync)
    for _ in range(2):
        verbs.add_adapter("b", rank=4, seed=1)  # both are the base until they are trained
        verbs.remove_adapter("b")
    assert len(set(sync.given)) == 2
    verbs.add_adapter("b", rank=4, seed=1)
    verbs.forward_backward({"b": LOSS.batch(groups(verbs, "b")["b"], 6)}, LOSS)
    with pytest.raises(ProbeError, match=r"answers version 1.*with the base model"):
        verbs.optim_step("b", AdamW(1e-2))
    with pytest.raises(ProbeError, match="answers version 2 of 'b'"):  # the refused number does not come back
        verbs.optim_step("b", AdamW(1e-2))


def test_mistakes_are_said(verbs: Verbs) -> None:
    with pytest.raises(ConfigError, match=r"use importance_sampling,.*cispo or gspo"):
        verbs.forward_backward({}, "stable_reinforce")
    with pytest.raises(ConfigError, match="it takes clip_low_threshold"):
        verbs.forward_backward({}, "ppo", loss_fn_config={"epsilon": 0.2})
    verbs.add_adapter("a", rank=4)
    with pytest.raises(AdapterError, match="exists already"):
        verbs.add_adapter("a")
    verbs.remove_adapter("a")
    verbs.add_adapter("a", rank=8)
    made = LOSS.batch(groups(verbs, "a")["a"], 6)
    with pytest.raises(AdapterError, match="there is no adapter 'b'"):
        verbs.forward_backward({"b": replace(made)}, LOSS)


def stepped(verbs: Verbs, step: int) -> None:
    verbs.forward_backward({"a": LOSS.batch(groups(verbs, "a", seed=step)["a"], 6)}, LOSS)
    verbs.optim_step("a", AdamW(1e-3))


def test_a_loop_resumes_in_its_directory_with_the_same_bytes(tmp_path: Path) -> None:
    with Verbs("small", longest=64, directory=tmp_path / "whole") as verbs:
        assert verbs.add_adapter("a", rank=4) == 0
        for step in range(3):
            stepped(verbs, step)
    with Verbs("small", longest=64, directory=tmp_path / "parts") as verbs:
        verbs.add_adapter("a", rank=4)
        stepped(verbs, 0)
        verbs.forward_backward({"a": LOSS.batch(groups(verbs, "a", seed=7)["a"], 6)}, LOSS)  # lost with the process
    with Verbs("small", longest=64, directory=tmp_path / "parts") as verbs:
        assert verbs.add_adapter("a", rank=4) == 1
        stepped(verbs, 1)
        verbs.remove_adapter("a")
        assert verbs.add_adapter("a", rank=4) == 2
        stepped(verbs, 2)
        with pytest.raises(AdapterError, match="exists already"):
            verbs.add_adapter("a", rank=4)
    whole, parts = JobDirectory(tmp_path / "whole" / "a"), JobDirectory(tmp_path / "parts" / "a")
    assert whole.steps() == parts.steps() == [2, 3]
    for name in ("metrics.jsonl", "versions/v3/adapter_model.safetensors"):
        assert (whole.path / name).read_bytes() == (parts.path / name).read_bytes()
    with (
        Verbs("small", longest=64, directory=tmp_path / "parts") as verbs,
        pytest.raises(RunError, match=r"(?s)different job.*adapter\.rank"),
    ):
        verbs.add_adapter("a", rank=8)


def test_a_loop_without_a_directory_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Verbs("small", longest=64) as verbs:
        verbs.add_adapter("a", rank=4)
        stepped(verbs, 0)
        assert list(tmp_path.glob("motet-verbs-*/a"))
    assert not list(tmp_path.glob("motet-verbs-*"))


def test_torchs_switches_are_motets_in_a_call_and_the_users_between_calls() -> None:
    inside = list[bool]()

    class Watched(Grpo):
        def token_losses(self, *given: Any) -> Any:
            inside.append(are_motets())
            return super().token_losses(*given)

    with users("medium") as before:
        with Verbs("small", longest=64) as verbs:
            assert switches() == before
            verbs.add_adapter("a", rank=4)
            batch = {"a": LOSS.batch(groups(verbs, "a")["a"], 6)}
            assert switches() == before
            verbs.forward_backward(batch, Watched(advantage="centered"))
            assert switches() == before
        assert switches() == before
    assert inside
    assert all(inside)
