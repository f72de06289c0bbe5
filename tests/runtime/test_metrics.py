"""What a line of metrics.jsonl says of a step, and what it leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.core.types import Problem
from motet.observe.observing import numbers
from motet.runtime.answer_signs import no_signal
from motet.runtime.metrics import BESIDE
from motet.runtime.progress import JobProgress
from tests.support.fake_run import Setting, job, records, run_jobs

pytestmark = pytest.mark.tier1

TRAINED = {
    "loss",
    "entropy",
    "ratio",
    "ratio_max",
    "clip_fraction",
    "kl_sampler",
    "kl_base",
    "logprob_gap",
    "grad_norm",
}
"""What only a step with trainable tokens knows."""


def always(problem: Problem, completion: str) -> float:
    return 1.0


def only_the_first_two(problem: Problem, completion: str) -> float:
    return float(problem.id in (100, 101))


def test_a_step_without_signal_measures_nothing(tmp_path: Path) -> None:
    """0.0 would look like a policy that has collapsed."""
    run_jobs(tmp_path, [job("flat", reward=always), job("usual")])
    flat, usual = records(tmp_path, "flat")[:4], records(tmp_path, "usual")[:4]
    for line in flat:
        assert (line["no_signal"], line["samples"], line["tokens"], line["skipped"]) == (1.0, 0, 0, False)
        assert {field: line[field] for field in (*TRAINED, "lr")} == dict.fromkeys((*TRAINED, "lr"))
        assert not (TRAINED | {"lr"}) & {tag for tag, _ in numbers(line)}, "no point in TensorBoard either"
    assert all(line[field] is not None for line in usual for field in (*(TRAINED - {"kl_base"}), "lr"))


def test_answers_that_are_alike_are_counted_once(tmp_path: Path) -> None:
    run_jobs(tmp_path, [job("short", sampling={"max_tokens": 1}, algorithm={"group_size": 64}), job("usual")])
    assert records(tmp_path, "short")[0]["distinct"] < 0.6 < records(tmp_path, "usual")[0]["distinct"] <= 1.0


def test_the_standard_error_of_a_held_out_mean_is_over_problems(tmp_path: Path) -> None:
    """Several answers to one problem are not several problems: two of four held-out problems are always right."""
    run_jobs(tmp_path, [job("half", reward=only_the_first_two, eval={"every": 2, "n": 3}, steps=1)], Setting(holdout=4))
    found = records(tmp_path, "half")[0]["eval"]
    assert found["reward"] == 0.5
    assert found["rollouts"] == 12
    assert found["reward_stderr"] == pytest.approx((1 / 3) ** 0.5 / 2)


def test_what_is_taken_up_is_what_was_told(tmp_path: Path) -> None:
    """A job that samples ahead evaluates the version that a step starts from, not the one that it samples."""
    run = run_jobs(
        tmp_path, [job("ahead", algorithm={"max_off_policy_steps": 2}), job("flat", reward=always, steps=12)]
    )
    for name, steps in (("ahead", [0, 2, 4]), ("flat", [0, 2, 4, 6, 8, 10, 12])):
        told, again = run.jobs[name].progress, JobProgress.of(run.jobs[name].config)
        timed = map(json.loads, (tmp_path / name / "timings.jsonl").read_text().splitlines())
        beside = [{field: line[field] for field in BESIDE if field in line} for line in timed]
        again.take_up({**line, **more} for line, more in zip(records(tmp_path, name), beside, strict=True))
        assert (again.rewards, again.evaluations, again.errors) == (told.rewards, told.evaluations, told.errors)
        assert [version for version, _ in again.evaluations] == steps
        assert again.diagnoses.warnings == told.diagnoses.warnings
    assert told.diagnoses.warnings.keys() == {"no-signal", "flat"}
    said = f"hint: {no_signal(1.0, 1.0, 0.0, {'group_size': 4}, (1.0, 1.0))} (docs/not-learning.md#no-signal)"
    assert told.diagnoses.warnings["no-signal"] == said


def completions(path: Path, name: str, log: str) -> list[str]:
    return [
        json.loads(line)["completion"] for line in (path / name / "rollouts" / f"{log}.jsonl").read_bytes().splitlines()
    ]


def test_jobs_that_share_held_out_problems_share_the_chance_of_their_evaluations(tmp_path: Path) -> None:
    """Before anything is trained they are the same model, and their evaluations say so; what they train on is their own."""
    run_jobs(tmp_path / "together", [job("a"), job("b", optimizer={"lr": 0.5}, seed=7)])
    run_jobs(tmp_path / "apart", [job("b")], Setting(holdout=5))
    first = [records(tmp_path / "together", name)[0]["eval"] for name in "ab"]
    assert first[0] == first[1]
    a, b = (completions(tmp_path / "together", name, "eval-0") for name in "ab")
    assert a == b
    assert a != completions(tmp_path / "apart", "b", "eval-0")[: len(a)], "other problems, another chance"
    assert completions(tmp_path / "together", "a", "0") != completions(tmp_path / "together", "b", "0")
    assert completions(tmp_path / "together", "a", "eval-2") != a, "every version has its own"
