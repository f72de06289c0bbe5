"""Runs that are ill, each with its diagnosis, and healthy ones that have none."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from motet.core.types import Problem
from motet.observe.report.read import read_run
from motet.runtime.diagnoses import LEAST, LONGER, NORM, RECENT, Diagnoses, Diagnosis
from motet.runtime.progress import JobProgress
from tests.support.fake_run import LINE, Setting, job, run_jobs

pytestmark = pytest.mark.tier1

PAGE = (Path(__file__).parents[2] / "docs" / "not-learning.md").read_text()
DEMO = Path(__file__).resolve().parents[2] / "tests" / "support" / "demo_metrics.jsonl"
"""Figures of the four jobs of `motet demo`, as a run left them."""


def kinds(found: Iterable[Diagnosis]) -> dict[str, bool]:
    """Whether each is an alarm; all have their place on the page."""
    alarms = {one.kind: one.alarm for one in found}
    assert all(f'id="{kind}"' in PAGE for kind in alarms)
    return alarms


def trained(path: Path, steps: int = 20, setting: Setting | None = None, **fields: Any) -> dict[str, str]:
    """What a real loop on the fakes is told; the report must say the same."""
    run = run_jobs(path, [job("a", steps=steps, **fields)], setting or Setting(holdout=12))
    signs = run.jobs["a"].progress.diagnoses
    kinds(signs.diagnoses)
    (read,) = read_run(path).jobs
    assert read.warnings == tuple(signs.warnings.values())
    return signs.warnings


@pytest.mark.parametrize("name", ["sort", "reverse", "count", "shift"])
def test_healthy_runs_are_silent_at_every_step(name: str) -> None:
    lines = [line for line in map(json.loads, DEMO.read_text().splitlines()) if line.pop("job") == name]
    assert len(lines) == 26
    told = JobProgress(name, 25)
    for line in lines:
        norm = {} if line["step"] == 25 else {"adapter_norm": 12.5 + 0.12 * line["step"]}
        told.take_up([{**line, **norm}])
        assert told.diagnoses.warnings == {}, line["step"]
    assert told.evaluations[-1][1] > told.evaluations[0][1] + 0.5


def lowercase(problem: Problem, completion: str) -> float:
    return sum(letter in string.ascii_lowercase for letter in completion) / (1 + len(completion))


def upside_down(problem: Problem, completion: str) -> float:
    """Held-out problems want the opposite of what is trained."""
    return lowercase(problem, completion) * (-1 if problem.id >= 100 else 1)


def test_a_reward_that_rises_while_held_out_falls_is_an_alarm(tmp_path: Path) -> None:
    told = trained(tmp_path, reward=upside_down, eval={"n": 4})
    assert told["gamed"].startswith("alarm: the reward rises while held-out reward falls (-")
    assert told["worse"].startswith("alarm: v20 is worse on held-out problems than v")


def longer(problem: Problem, completion: str) -> float:
    return len(completion) * (-1 if problem.id >= 100 else 1)


def test_answers_that_only_grow_longer_are_an_alarm(tmp_path: Path) -> None:
    told = trained(tmp_path, reward=longer, sampling={"max_tokens": 40}, eval={"n": 4})
    assert told["length"].startswith("alarm: the length of answers drifts (")
    assert "end at max_tokens" in told["length"]


def test_groups_without_signal_are_a_hint(tmp_path: Path) -> None:
    told = trained(tmp_path, steps=LEAST, reward=lambda problem, completion: 1.0)
    assert told.keys() == {"no-signal", "flat"}
    assert told["no-signal"].startswith(
        "hint: no signal in 100% of the groups (mean reward 1, near the highest seen, 1): too"
    )


def first_small(problem: Problem, completion: str) -> float:
    """Cheap: most answers earn it soon."""
    return float(completion[:1] in string.ascii_lowercase)


def any_a(problem: Problem, completion: str) -> float:
    return float("a" in completion)


def nothing(problem: Problem, completion: str) -> float:
    return 0.0


CHEAP: dict[str, Any] = {"optimizer": {"lr": 0.3}, "algorithm": {"groups_per_step": 6}}


def test_a_part_that_is_never_earned_is_told_beside_one_that_is(tmp_path: Path) -> None:
    """The sum rises to what the cheap part gives, and is called a gain."""
    ill = trained(tmp_path / "ill", reward=[first_small, nothing], **CHEAP)
    assert ill.keys() == {"never"}
    assert ill["never"].startswith("hint: part nothing was 0 in all 20 steps: only the rest of the reward is learned; ")
    assert "teach the form first, on rows with answers (algorithm: sft)" in ill["never"]
    assert "never" not in trained(tmp_path / "well", reward=[first_small, any_a], **CHEAP)
    early = trained(tmp_path / "early", steps=RECENT - 1, reward=[first_small, nothing], eval={"every": 0}, **CHEAP)
    assert "never" in early, "the job has no more steps"


@pytest.mark.parametrize(
    ("weights", "values", "told"),
    [
        ({"a": 1.0, "b": 1.0}, [0.0] * RECENT, "part b was 0 in all 10 steps"),
        ({"a": 1.0, "b": 0.5}, [-1.0] * RECENT, "part b was -1 in all 10 steps"),
        ({"a": 1.0, "b": 1.0}, [*[0.0] * RECENT, 0.01], ""),
        ({"a": 1.0, "b": 1.0}, [1.0] * RECENT, ""),  # all have it
        ({"a": 1.0, "b": -1.0}, [0.0] * RECENT, ""),  # a penalty that nobody pays
        ({"a": 1.0, "b": 0.0}, [0.0] * RECENT, ""),  # a monitor
        ({"a": 1.0, "b": 1.0}, [0.0] * (RECENT - 1), ""),
        ({"b": 1.0}, [0.0] * RECENT, ""),  # the sum shows it
    ],
)
def test_parts_of_a_reward_are_judged_apart(weights: dict[str, float], values: list[float], told: str) -> None:
    signs = Diagnoses(weights)
    for step, value in enumerate(values):
        signs.see({**LINE, "step": step, "reward_parts": {"a": 0.5, "b": value}})
    assert signs.warnings.get("never", "").removeprefix("hint: ").startswith(told) if told else not signs.diagnoses


def test_a_reward_that_rose_and_stopped_far_below_the_highest_seen_has_no_signal(tmp_path: Path) -> None:
    def of(highest: float | None, share: float = 0.9) -> dict[str, bool]:
        signs = Diagnoses()
        for step in range(2 * RECENT):
            known = {} if highest is None else {"reward_range": [0.0, highest]}
            rising = {"reward": min(0.1 + 0.1 * step, 1.0), "no_signal": share if step > RECENT else 0.2}
            signs.see({**LINE, **known, **rising, "step": step, "reward_std": 0.2})
        return kinds(signs.diagnoses)

    assert of(2.0) == {"no-signal": False}
    assert of(1.1) == of(None) == of(2.0, 0.5) == {}, "learned, unknown, and under way"


def after(now: dict[str, Any], before: dict[str, Any] | None = None, held_out: float = 0.5) -> dict[str, bool]:
    """Of a job whose lines were as usual, or `before`, and are `now`; held-out reward was 0.5."""
    signs = Diagnoses()
    for step in range(2 * RECENT):
        signs.see({**LINE, "step": step, **(now if step > RECENT else before or {})})
    for version, reward in ((0, 0.5), (2 * RECENT, held_out)):
        signs.see_evaluation(version, {"reward": reward, "reward_stderr": 0.05})
    return kinds(signs.diagnoses)


@pytest.mark.parametrize(
    ("kind", "now", "before"),
    [
        ("length", {"length": 20 * LONGER}, {"length": 20}),
        ("length", {"length": 20 / LONGER}, {"length": 20}),
        ("length", {"length": 30, "truncated": 0.6}, {"length": 20, "truncated": 0.3}),
        ("norm", {"adapter_norm": 5 * NORM}, {"adapter_norm": 5}),
        ("entropy", {"entropy": 0.09}, {}),
        ("identical", {"distinct": 0.13}, {}),
        ("far", {"kl_base": 1.1}, {}),
        ("far", {"kl_base": 9.1}, {"kl_base": 8.0, "version": 0}),
        ("alike", {"distinct": 0.3}, {}),
    ],
)
def test_a_hint_becomes_an_alarm_where_held_out_falls(kind: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    assert after(now, before) == {kind: False}
    assert after(now, before, 0.3) == {kind: True, "worse": True}


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ({"length": 19 * LONGER}, {"length": 20}),
        ({"length": 30, "truncated": 0.6}, {"length": 20, "truncated": 0.6}),
        ({"adapter_norm": 4.9 * NORM}, {"adapter_norm": 5}),
        ({"kl_base": 8.3}, {"kl_base": 8.0, "version": 0}),
        ({"entropy": 0.11}, {}),
        ({"distinct": 0.15}, {"distinct": 0.15}),
        ({"entropy": None, "length": None, "adapter_norm": None, "distinct": None}, {}),
        ({"reward": 0.7, "length": 90, "adapter_norm": 20, "entropy": 0.01, "kl_base": 2.0}, {"length": 20}),
    ],
)
def test_what_is_within_bounds_or_improves_is_silent(now: dict[str, Any], before: dict[str, Any]) -> None:
    assert after(now, before) == {}


def test_missing_rewards_and_groups_without_signal_never_alarm() -> None:
    assert after({"no_signal": 0.9, "failed": 3}, None, 0.3) == {"failed": False, "no-signal": False, "worse": True}
