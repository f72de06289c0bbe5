"""An algorithm of a person's own: a class in a file, with settings of its own, through the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import motet
from motet.algorithms import Grpo
from motet.algorithms.policy_gradient import PolicyGradient
from motet.config import JobConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, RunError
from motet.core.types import JobState, Problem
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_walls import Walls
from motet.service.jobs.validation import Allowed, validated
from tests.support.fake_run import job, metrics, run_jobs, weights
from tests.support.protocol_server import ProtocolServer

pytestmark = pytest.mark.tier1

OWN = '''
from dataclasses import replace

from motet.algorithms import Grpo


class Doubled(Grpo):
    """GRPO whose advantages are twice as large where an answer is long."""

    factor: float = 2.0
    """1 is GRPO."""

    def advantages(self, groups, max_tokens):
        plain = super().advantages(groups, max_tokens)
        return [[self.factor * value for value in values] for values in plain]


class Mild(Grpo):
    def token_losses(self, inputs):
        loss_N, clipped_N = super().token_losses(inputs)
        return 0.5 * loss_N, clipped_N


class Halved(Grpo):
    """Changes samples after they are made, and needs no reference."""

    def weighed(self, batch):
        assert batch.samples
        samples = tuple(replace(sample, advantages=0.5 * sample.advantages) for sample in batch.samples)
        return replace(batch, samples=samples)


def function(groups): ...


from typing import ClassVar

from motet.algorithms import PolicyGradient
from motet.algorithms.algorithm import ReferenceServer
from motet.algorithms.credit import rewards_at_ends
from motet.algorithms.critic import CriticConfig


class Valued(PolicyGradient):
    """Has a critic without being PPO."""

    values: CriticConfig = CriticConfig(rank=4)

    @property
    def needs_values(self):
        return self.values

    def advantages(self, groups, max_tokens):
        return [[rewards_at_ends(rollout, of_turns=False) for rollout in group.scored] for group in groups]


class Followed(PolicyGradient):
    """Learns from a server without being `distill`, and from no reward."""

    needs_rewards: ClassVar[bool] = False
    least_scored: ClassVar[int] = 1
    url: str

    @property
    def reference_server(self):
        return ReferenceServer(self.url)

    @property
    def needs_reference(self):
        return True

    def advantages(self, groups, max_tokens):
        return [[1.0] * len(group.scored) for group in groups]
'''


def same(problem: Problem, completion: str) -> float:
    return 1.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_its_advantages_are_those_that_are_trained(file: Path, tmp_path: Path) -> None:
    base = {"group_size": 4, "groups_per_step": 3}
    own = {**base, "type": f"{file}:Doubled"}
    configs = {name: job("a", algorithm=algorithm) for name, algorithm in (
        ("plain", base), ("same", {**own, "factor": 1.0}), ("doubled", own)
    )}  # fmt: skip
    for name, config in configs.items():
        run_jobs(tmp_path / name, [config])
    grad_norm = {name: json.loads(metrics(tmp_path / name, "a").splitlines()[0])["grad_norm"] for name in configs}
    assert weights(tmp_path / "plain", "a", 4) == weights(tmp_path / "same", "a", 4)
    assert grad_norm["doubled"] == pytest.approx(2 * grad_norm["plain"])


def test_its_samples_are_the_same_in_steps_that_evaluate(file: Path, tmp_path: Path) -> None:
    """A step that evaluates measures the KL to the base; it trains as others do."""
    own = {"group_size": 4, "groups_per_step": 3, "type": f"{file}:Halved"}
    for name, every in (("often", 1), ("never", 0)):
        run_jobs(tmp_path / name, [job("a", algorithm=own, eval={"every": every})])
    assert weights(tmp_path / "often", "a", 4) == weights(tmp_path / "never", "a", 4)


def test_it_weighs_nothing_in_steps_without_samples(file: Path, tmp_path: Path) -> None:
    done = run_jobs(tmp_path, [job("a", algorithm={"type": f"{file}:Halved"}, reward=same)])
    assert done.state("a") is JobState.SUCCEEDED, done.jobs["a"].progress.message


def test_a_job_file_names_it_beside_itself_and_its_loss_runs_where_torch_is(file: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("""
base: small
defaults:
  data: {source: toy:add, size: 16, holdout: 0}
  reward: {name: length, args: {target: 3}}
  sampling: {max_tokens: 6}
  steps: 1
  seed: 5
jobs:
  - {name: plain, algorithm: {group_size: 4, groups_per_step: 2}}
  - {name: mild, algorithm: {type: "own.py:Mild", group_size: 4, groups_per_step: 2}}
""")
    config = load_jobs(tmp_path / "jobs.yaml")
    assert config.jobs[1].algorithm.type == f"{file}:Mild"
    run = motet.run(config.jobs, base="small", quiet=True, directory=tmp_path / "run")
    first = [json.loads(metrics(tmp_path / "run", name).splitlines()[0]) for name in ("plain", "mild")]
    assert {one.state for one in run.jobs.values()} == {"succeeded"}
    assert first[0]["grad_norm"] > 0
    assert first[1]["grad_norm"] == pytest.approx(first[0]["grad_norm"] / 2, rel=1e-5)
    written = config.jobs[1].model_dump(mode="json")
    assert JobConfig.model_validate(written).model_dump(mode="json") == written


def test_one_may_have_a_critic(file: Path, tmp_path: Path) -> None:
    one = {
        "name": "a", "data": {"source": "toy:add", "size": 16, "holdout": 0}, "steps": 1, "sampling": {"max_tokens": 4},
        "reward": {"name": "length", "args": {"target": 3}},
        "algorithm": {"type": f"{file}:Valued", "group_size": 2, "groups_per_step": 2},
    }  # fmt: skip
    assert JobConfig.model_validate(one).slots == 2
    assert motet.run([one], base="small", quiet=True, directory=tmp_path / "run", engine={"samplers": 0}).ok
    assert json.loads(metrics(tmp_path / "run", "a").splitlines()[0])["value_loss"] > 0
    assert (tmp_path / "run" / "a" / "state" / "1" / "critic").is_dir()


def test_one_may_learn_from_a_server_and_no_reward(file: Path, tmp_path: Path) -> None:
    with ProtocolServer() as server:
        algorithm = {"type": f"{file}:Followed", "url": server.url, "group_size": 2}
        done = run_jobs(tmp_path, [job("a", rewards=[], algorithm=algorithm, steps=1)])
    assert done.state("a") is JobState.SUCCEEDED, done.jobs["a"].progress.message
    assert json.loads(metrics(tmp_path, "a").splitlines()[0])["kl_base"] is not None
    assert done.jobs["a"].progress.inexact == ["a server judges what is learned (algorithm.reference)"]


def test_an_edited_file_is_another_job(file: Path, tmp_path: Path) -> None:
    one = {
        "name": "a", "data": {"source": "toy:add", "size": 16, "holdout": 0}, "reward": "exact", "steps": 1,
        "sampling": {"max_tokens": 4}, "algorithm": {"type": f"{file}:Mild", "group_size": 2, "groups_per_step": 2},
    }  # fmt: skip
    motet.run([one], base="small", quiet=True, directory=tmp_path / "run")
    file.write_text(OWN.replace("0.5", "0.25"))
    with pytest.raises(RunError, match=r"own\.py:\d+ was edited"):
        motet.run([{**one, "steps": 2}], base="small", quiet=True, directory=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nothing", "has no 'Nothing'; it has "),
        ("function", "is no class that derives from motet.algorithms.PolicyGradient"),
    ],
)
def test_what_is_no_algorithm_is_said(file: Path, name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        job("a", algorithm=f"{file}:{name}")


def test_a_field_that_it_does_not_have_is_named(file: Path) -> None:
    with pytest.raises(ValueError, match="factr: Extra inputs are not permitted"):
        job("a", algorithm={"type": f"{file}:Doubled", "factr": 3})


def test_an_object_is_as_good_as_a_file() -> None:
    class Mine(Grpo):
        power: float = 1.0

    config = job("a").model_copy(update={"algorithm": Mine(power=2.0)})
    assert isinstance(config.algorithm, PolicyGradient)
    made = JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": "exact", "algorithm": Mine(power=3.0)})
    assert made.algorithm == Mine(power=3.0)


def test_a_service_looks_for_no_file_of_a_tenants(tmp_path: Path) -> None:
    """Loading it would run it."""
    seen = tmp_path / "seen"
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(seen)!r}, 'w').close()\n")
    tree = {"name": "a", "data": "toy:add", "reward": "exact"}
    for algorithm in (f"{file}:Mine", {"type": f"{file}:Mine"}, "os:getcwd"):
        with pytest.raises(ConfigError, match="code does not run on the server"):
            validated({**tree, "algorithm": algorithm}, Allowed(False, {}, Addresses(), Walls()))
    assert not seen.exists()
