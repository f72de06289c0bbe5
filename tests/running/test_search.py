"""`examples/search.py` goes on where it was killed, with the same candidates, and confirms its choice on rows of their own."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from motet.runtime.settings import Mean
from tests.support.service_run import serving
from tests.support.waiting import PATIENCE

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "search.py"
JOB: dict[str, Any] = {
    "name": "sort",
    "data": {"source": "toy:sort_letters", "size": 64, "holdout": 12},
    "reward": {"name": "length", "args": {"target": 3}},
    "sampling": {"max_tokens": 8},
    "algorithm": {"group_size": 2, "groups_per_step": 1},
    "eval": {"every": 1},
    "steps": 8,
}


def command(directory: Path, *words: str, candidates: int = 8, **job: Any) -> list[str]:
    """The search of a job on the small base."""
    file = directory / "jobs.yaml"
    file.write_text(json.dumps({"base": "small", "engine": {"samplers": 0}, "jobs": [JOB | job]}))
    run = ["--run", str(directory / "search"), "--candidates", str(candidates)]
    return [sys.executable, str(SCRIPT), str(file), *run, *words]


def study_of(directory: Path) -> optuna.Study:
    """What a search has stored."""
    return optuna.load_study(study_name="sort", storage=f"sqlite:///{directory / 'search' / 'search.db'}")


def choosing(run: Path, name: str, version: int) -> list[tuple[float, bool]]:
    """The rewards of held-out rows in order, and whether each may choose."""
    lines = (run / name / "rollouts" / f"eval-{version}.jsonl").read_text().splitlines()
    return [(json.loads(line)["reward"], place % 3 < 2) for place, line in enumerate(lines)]


KILLED = """
import os, runpy, signal, sys, time

def die():
    os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(lambda event, args: event == "os.rename" and "sort-c=01/rollouts/eval-4" in str(args) and die())
sleep, time.sleep = time.sleep, lambda seconds: die() if seconds == 1 else sleep(seconds)
sys.argv[:1] = []
runpy.run_path(sys.argv[0])
"""
"""Kills a search when a candidate is evaluated in the middle of its steps, or when it waits for a service."""


def search(words: list[str], *killed: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a search to its end."""
    command = [words[0], *killed, *words[1:]]
    env = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=env)


def test_a_killed_search_goes_on_with_its_candidates_and_draws_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, run = command(tmp_path), tmp_path / "search"
    first = search(words, "-c", KILLED)
    assert first.returncode == -signal.SIGKILL, first.stderr
    before = study_of(tmp_path).trials
    assert [one.state for one in before] == [TrialState.RUNNING] * 4
    begun = (run / "sort-c=01" / "job.yaml").read_bytes()
    done = search(words)
    assert done.returncode == 0, done.stderr
    study = study_of(tmp_path)
    assert [one.params for one in study.trials[:4]] == [one.params for one in before]
    assert len({json.dumps(one.params) for one in study.trials}) == len(study.trials) == 8
    assert study.user_attrs == {"optuna": [optuna.__version__]}
    assert (run / "sort-c=01" / "job.yaml").read_bytes() == begun
    ends = [one for one in study.trials if one.state is TrialState.COMPLETE]
    assert ends
    for one in ends:
        rewards = choosing(run, f"sort-c={one.number:02}", 8)
        assert one.value == pytest.approx(Mean.of([reward for reward, may in rewards if may]).mean)
    assert {one.state for one in study.trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    monkeypatch.setattr(sys, "argv", words[1:])
    again = runpy.run_path(str(SCRIPT))["study"]  # nothing is left to do
    worst = [optuna.trial.create_trial(state=TrialState.RUNNING, intermediate_values={step: -1.0}) for step in (1, 2)]
    assert [again.pruner.prune(again, one) for one in worst] == [False, True], "a quarter of 8 steps"
    best, own = (choosing(run, name, 8) for name in (f"sort-c={study.best_trial.number:02}", "sort"))
    gain = Mean.of([a - b for (a, may), (b, _) in zip(best, own, strict=True) if not may])
    assert f"on 4 rows that chose nothing: {gain.mean:+.3f} ± {gain.half:.3f}" in done.stdout
    assert done.stdout.splitlines()[-2].startswith("winner: " if gain.mean > gain.half else "no winner: ")


def test_an_evaluation_without_a_reward_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def reward(problem, completion):\n    raise ValueError(problem.id)\n")
    few = {"algorithm": {**JOB["algorithm"], "max_failed_fraction": 1.0}, "steps": 2, "eval": {"every": 1}}
    words = command(tmp_path, candidates=1, reward="fails.py:reward", **few)
    done = search(words)
    assert done.stderr.splitlines()[-1] == "no winner: no candidate ended with a reward", done.stderr
    (trial,) = study_of(tmp_path).trials
    assert (trial.state, trial.intermediate_values) == (TrialState.FAIL, {})


def test_a_killed_search_at_a_service_goes_on_with_the_same_jobs(tmp_path: Path) -> None:
    words = command(tmp_path, "--service", candidates=5, steps=4)
    with serving(tmp_path / "served") as service:
        where = {"MOTET_URL": service.url, "MOTET_API_KEY": "none"}
        assert (first := search(words, "-c", KILLED, **where)).returncode == -signal.SIGKILL, first.stderr
        begun = {job["id"] for job in service.ask("GET", "/v1/jobs")["data"]}
        assert len(begun) == 5
        done = search(words, **where)
        assert done.returncode == 0, done.stderr
        jobs = {job["id"]: job["state"] for job in service.ask("GET", "/v1/jobs")["data"]}
        assert set(jobs) > begun
        assert len(jobs) == 6
        assert set(jobs.values()) <= {"succeeded", "cancelled"}
        assert re.search(r"on 4 rows that chose nothing: [+-]\d\.\d+ ± \d", done.stdout)
        assert search(words, **where).stdout.splitlines()[-2:] == done.stdout.splitlines()[-2:], "nothing is left to do"
