"""Jobs that end before their last step: at the same step in any company and after a pause, with the best version kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig, JobConfig, StopConfig
from motet.config.jobfile import validate
from motet.core.types import JobState
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.runtime.stopping import Stopping, gained
from tests.support.fake_run import FakeRun, Setting, job, metrics, records, run_jobs, weights
from tests.support.small_runs import REWARDS
from tests.support.small_runs import config as small_config
from tests.support.small_runs import job as small_job
from tests.support.waiting import until

pytestmark = pytest.mark.tier1


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1))


RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
FLAT = [0.50, 0.51, 0.49, 0.50, 0.51, 0.49]


def stopped(when: dict[str, Any], *lines: dict[str, Any]) -> str:
    """Why these lines end a job; they get their steps here."""
    numbered = [{"step": step, **line} for step, line in enumerate(lines)]
    return Stopping(StopConfig.model_validate(when), json.loads(json.dumps(numbered))).reason


def evaluations(*rewards: float | None) -> list[dict[str, Any]]:
    return [{"eval": {"reward": reward}} for reward in rewards]


def test_held_out_above() -> None:
    assert stopped({"held_out_above": 0.4}, *evaluations(0.3, 0.5)) == (
        "the held-out reward of v1 is 0.5 (stop_when.held_out_above)"
    )
    assert stopped({"held_out_above": 0.5}, *evaluations(0.3, 0.5, None)) == ""
    assert "v1" in stopped({"held_out_above": 0.4}, *evaluations(0.3, 0.5, 0.1)), "what held once has ended the job"
    assert stopped({"held_out_above": -0.5}, {"eval": {"nll": 0.7}}, {"eval": {"nll": 0.4}}).startswith(
        "the held-out log-lik of v1 is -0.4 "
    )


def test_kl_above() -> None:
    lines: list[dict[str, Any]] = [{"kl_base": None}, {"kl_base": 0.9}, {"kl_base": 1.2}]
    assert stopped({"kl_above": 1}, *lines).startswith("the KL of v2 to the reference is 1.2 nats per token")
    assert stopped({"kl_above": 2}, *lines) == ""


def test_one_lucky_step_is_not_a_high_reward() -> None:
    steps = [{"reward": reward} for reward in (0.2, 0.2, 1.0, 0.2, 0.2, 0.2)]
    assert stopped({"reward_above": 0.5}, *steps) == ""
    assert "mean reward of the newest 5 steps is 0.8" in stopped({"reward_above": 0.5}, *[{"reward": 0.8}] * 5)


def test_no_gain_waits_until_noise_cannot_hide_one() -> None:
    rule = {"no_gain": {"evaluations": 3, "least": 0.05}}
    assert stopped(rule, *evaluations(*FLAT)).startswith("the held-out reward gained 0 over the newest 3 evaluations")
    assert stopped(rule, *evaluations(*FLAT[:5])) == "", "six evaluations are compared"
    assert stopped(rule, *evaluations(*RISING)) == ""
    assert stopped(rule, *evaluations(0.2, 0.8, 0.5, 0.1, 0.9, 0.5)) == "", "as flat, but nobody can know"
    assert stopped(rule, *evaluations(0.9, 0.5, 0.51, 0.5, 0.52, 0.54)) == "", "one lucky evaluation is no summit"
    assert stopped(rule, *evaluations(*RISING, *[0.6] * 6)) != "", "it rose, and rises no more"


def test_the_interval_of_a_gain_is_that_of_two_means() -> None:
    gain, most = gained(FLAT)
    assert gain == pytest.approx(0)
    assert most == pytest.approx(2.131847 * (0.0001 * 2 / 3) ** 0.5, rel=1e-5)  # t(4) at one-sided 95 %, s² = 0.0001


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_when": {"no_gain": 2}}, "no_gain"),
        (
            {"stop_when": {"held_out_above": 1}, "eval": {"every": 0}},
            "needs evaluations; set eval.every and data.holdout",
        ),
        ({"stop_when": {"no_gain": 3}, "steps": 20, "eval": {"every": 5}}, "needs 6 evaluations, and 20 steps"),
        ({"stop_when": {"kl_above": 1}, "data": {"source": "toy:add", "holdout": 0}}, "nothing measures the KL"),
        ({"stop_when": {"reward_above": 1}, "algorithm": "sft", "reward": []}, "learns from rows and samples nothing"),
    ],
)
def test_a_rule_that_can_never_hold_is_refused(fields: dict[str, Any], says: str) -> None:
    tree = {"name": "a", "data": "toy:add", "reward": "exact", "steps": 20, **fields}
    with pytest.raises(Exception, match=says):
        validate({"base": "small", "jobs": [tree]}, "the test")
    assert JobConfig.model_validate({**tree, "stop_when": {}})


def early(name: str, **fields: Any) -> JobConfig:
    """Its policy leaves the base from the first step on, and the KL is measured on step 2."""
    return job(name, steps=6, stop_when={"kl_above": 1e-9}, checkpoint={"keep": 1}, **fields)


def result(path: Path, name: str, version: int = 3) -> tuple[bytes, bytes]:
    return metrics(path, name), weights(path, name, version)


def test_a_job_ends_early_as_succeeded_and_says_why(tmp_path: Path) -> None:
    run = run_jobs(tmp_path, [early("a")])
    one = run.jobs["a"]
    assert (one.state, one.progress.step, one.progress.stopped_early) == (JobState.SUCCEEDED, 3, True)
    said = one.directory.read_status()["message"]
    assert said.startswith("stopped early after step 3: the KL of v2 to the reference is ")
    assert "(stop_when.kl_above); best version: v" in said
    assert "change or remove that rule and run the same command again" in said
    assert [line["step"] for line in records(tmp_path, "a") if "eval" in line] == [0, 2, 3], "the last is evaluated"
    assert run.engine.loaded == frozenset()


def test_the_best_version_stays(tmp_path: Path) -> None:
    """The reward asks for what training unlearns, so that an early version is the best."""

    def unlearned(problem: Any, completion: str) -> float:
        vowels = sum(letter in "aeiou" for letter in completion) / (1 + len(completion))
        return -vowels if problem.id >= 100 else vowels

    rule = {"no_gain": {"evaluations": 3, "least": 1.0}}
    config = job("a", reward=unlearned, steps=30, stop_when=rule, checkpoint={"keep": 1}, eval={"every": 1, "n": 8})
    one = run_jobs(tmp_path, [config]).jobs["a"]
    done = one.directory.newest()
    assert done is not None
    assert done.step == 6
    assert done.best_version is not None
    assert done.best_version < 5
    assert one.directory.steps() == [done.best_version, 6]
    assert one.directory.version_named("best").is_dir()


def test_company_and_a_pause_change_neither_the_step_nor_the_bytes(tmp_path: Path) -> None:
    ahead = early("ahead", algorithm={"max_off_policy_steps": 2})
    rare = early("rare").model_copy(update={"checkpoint": ahead.checkpoint.model_copy(update={"every": 5})})
    configs = [early("a"), ahead, rare]
    for one in configs:
        run_jobs(tmp_path / "alone", [one])
    run_jobs(tmp_path / "company", [job("b", steps=6), *configs], Setting(jitter=3, capacity=5))

    async def stop_after_a_step(run: FakeRun) -> None:
        await until(lambda: all(one.progress.started for one in run.jobs.values()))
        run.pipeline.stop()

    for _ in range(2):
        run = run_jobs(tmp_path / "paused", configs, None, stop_after_a_step)
        assert JobState.PAUSED in {one.state for one in run.jobs.values()}
    run = run_jobs(tmp_path / "paused", configs)
    for one in configs:
        whole = result(tmp_path / "alone", one.name)
        assert result(tmp_path / "company", one.name) == whole
        assert result(tmp_path / "paused", one.name) == whole
        assert run.state(one.name) is JobState.SUCCEEDED


def test_a_stopped_job_trains_on_when_its_rule_is_removed(tmp_path: Path) -> None:
    run_jobs(tmp_path / "a", [early("a")])
    again = run_jobs(tmp_path / "a", [early("a")])
    assert again.jobs["a"].progress.message.startswith("stopped early after step 3")
    whole = early("a").model_copy(update={"stop_when": StopConfig()})
    run_jobs(tmp_path / "a", [whole])
    run_jobs(tmp_path / "b", [whole])
    assert weights(tmp_path / "a", "a", 6) == weights(tmp_path / "b", "a", 6)


def test_a_run_says_why_a_stopped_job_has_ended(base: Any, tmp_path: Path) -> None:
    """A real run: the same rule with another limit lets it train on."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)

    def run(limit: float) -> Any:
        tree = small_job(
            "a", rewards, steps=4, eval={"every": 1}, stop_when={"held_out_above": limit}, checkpoint={"keep": 1}
        )
        return run_config(small_config(tmp_path / "run", [tree]), base=base).jobs["a"]

    first = run(-1)
    assert first.state is JobState.SUCCEEDED
    assert first.message.startswith("stopped early after step 1: the held-out reward of v0 is ")
    assert run(-1).message == first.message
    assert run(2).message == ""
    assert len(run(2).rewards) == 4
