"""The example files of every way to learn run, all jobs at once, two steps each; preferences come from what was logged."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import motet
from motet.config.jobfile import load_jobs
from motet.core.types import Problem
from motet.hosts.running import run_config
from tests.support.waiting import PATIENCE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_each_way_to_learn_runs_from_its_file(tmp_path: Path) -> None:
    steps, rewarded = ["steps=2"], {"chain": "rewarded", "critic": "retry", "code": "code", "game": "game"}
    few = {file: ["data.size=128", f"jobs.{job}.algorithm.groups_per_step=2"] for file, job in rewarded.items()}
    for file in ("code", "game"):
        few[file] = [few[file][1], "data.holdout=4"]
    files = (*rewarded, "chat", "preferences")
    jobs = [job for file in files for job in load_jobs(EXAMPLES / f"{file}.yaml", [*steps, *few.get(file, [])]).jobs]
    done = motet.run(jobs, base="small", quiet=True, directory=tmp_path / "run", engine={"samplers": 0})
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    learned = {"taught", "rewarded", "retry", "code", "digits", "game"}
    assert set(done.jobs) == {*learned, "chat", "pairs", "thumbs"}
    target = tmp_path / "pairs.jsonl"
    script = [sys.executable, *map(str, (EXAMPLES / "pairs.py", tmp_path / "run" / "retry", target))]
    answered = subprocess.run(script, capture_output=True, text=True, check=True, timeout=PATIENCE)
    pairs = [json.loads(line) for line in target.read_text().splitlines()]
    assert answered.stdout == f"{len(pairs)} pairs in {target}\n"
    assert all(set(pair) == {"prompt", "chosen", "rejected"} and pair["chosen"] != pair["rejected"] for pair in pairs)


def dialled(directory: Path, *settings: str) -> list[dict[str, Any]]:
    """Metrics of the rewarded job of the example whose class is written for TRL."""
    done = run_config(made("dial", directory, *settings))
    assert {name: job.message for name, job in done.jobs.items() if job.state != "succeeded"} == {}
    return [json.loads(line) for line in (directory / "run/dial/metrics.jsonl").read_text().splitlines()]


def test_a_class_written_for_trl_is_trained_as_it_is(tmp_path: Path) -> None:
    few = [f"jobs.{job}.{field}" for job in ("form", "dial") for field in ("steps=1", "data.holdout=2")]
    lines = dialled(tmp_path, "base=small", *few, "jobs.dial.algorithm.groups_per_step=1", "engine.samplers=0")
    assert [(line["rollouts"], line["failed"]) for line in lines if "loss" in line] == [(8, 0)]
    rollouts = [json.loads(line) for line in (tmp_path / "run/dial/rollouts/0.jsonl").read_text().splitlines()]
    assert all(re.search(r"This is dial \d+\.\n\nTurn the dial by \d\.", one["opening"]) for one in rollouts)


@pytest.mark.soak
@pytest.mark.usefixtures("smollm2_dir")
def test_a_class_written_for_trl_is_learned(tmp_path: Path) -> None:
    """On half of the example's problems and steps."""
    half = ("algorithm.groups_per_step=2", "steps=4", "data.holdout=12")
    lines = dialled(tmp_path, *(f"jobs.dial.{setting}" for setting in half))
    held_out = [line["eval"]["reward"] for line in lines if "eval" in line]
    assert held_out[-1] - held_out[0] >= 0.3, held_out
    assert {line["logprob_gap"] for line in lines if "logprob_gap" in line} == {0.0}


@pytest.mark.parametrize(
    ("name", "jobs"),
    [
        ("sql", ("form", "sql")),
        ("countdown", ("form", "countdown")),
        ("alphabet", ("alphabet",)),
        ("team", ("halves",)),
    ],
)
def test_a_recipe_runs_on_the_rows_that_its_script_makes(name: str, jobs: tuple[str, ...], tmp_path: Path) -> None:
    few = ["base=small", "engine.samplers=0", "steps=1", "eval.every=0", "data.size=24", "data.holdout=2"]
    result = run_config(made(name, tmp_path, *few, f"jobs.{jobs[-1]}.algorithm.groups_per_step=1"))
    assert {job: done.message for job, done in result.jobs.items() if done.state != "succeeded"} == {}
    line = json.loads((tmp_path / "run" / jobs[-1] / "metrics.jsonl").read_text().splitlines()[0])
    assert (line["rollouts"], line["failed"]) == (8, 0)


@pytest.mark.soak
def test_both_roles_of_the_team_learn(tmp_path: Path) -> None:
    result = run_config(made("team", tmp_path, "engine.samplers=0"))
    assert result.jobs["halves"].state == "succeeded", result.jobs["halves"].message
    lines = [json.loads(line) for line in (tmp_path / "run/halves/metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line["eval"] for line in lines if "eval" in line]
    assert last["reward"] - first["reward"] >= 0.3, (first, last)
    for role in ("planner", "solver"):
        assert last["roles"][role]["reward"] - first["roles"][role]["reward"] >= 0.2, (role, first, last)
    assert {line["logprob_gap"] for line in lines if "logprob_gap" in line} == {0.0}


def made(name: str, directory: Path, *settings: str) -> Any:
    """The jobs of an example, beside the rows that its script writes."""
    for suffix in (".py", ".yaml"):
        shutil.copy(EXAMPLES / f"{name}{suffix}", directory)
    rows = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=directory, capture_output=True, check=True, timeout=PATIENCE
    )
    (directory / f"{name}.jsonl").write_bytes(rows.stdout)
    return load_jobs(directory / f"{name}.yaml", [f"run={directory / 'run'}", *settings])


@pytest.mark.parametrize(
    ("name", "worth"),
    [
        (
            "sql",
            {
                "DROP TABLE people": 0.0,
                "ATTACH '/tmp/x.db' AS x": 0.0,
                "SELECT 1; SELECT 2": 0.0,
                "SELECT randomblob(1000000000)": 0.0,
                "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c": 0.0,
                "": 0.0,
                "SELECT name, city FROM people": 0.1,
            },
        ),
        ("countdown", {"": 0.0, "9**9**9": 0.0, "exit()": 0.0, "1 + 1": 0.0, "(" * 90: 0.0}),
    ],
)
def test_a_recipe_rewards_its_reference_and_refuses_what_is_no_answer(
    name: str, worth: dict[str, float], tmp_path: Path
) -> None:
    rows = [
        json.loads(line) for line in subprocess.check_output([sys.executable, EXAMPLES / f"{name}.py"]).splitlines()
    ]
    reward = runpy.run_path(str(EXAMPLES / f"{name}.py"))["reward"]
    for row in rows[:50]:
        problem = Problem(0, (), row["answer"], row)
        assert reward(problem, row["answer"]) == 1.0
    assert {said: reward(problem, said) for said in worth} == worth


@pytest.mark.soak
def test_a_game_is_learned(tmp_path: Path) -> None:
    """By a third of what can be won at least, on games that it was not trained on."""
    config = load_jobs(EXAMPLES / "game.yaml")
    done = motet.run(config.jobs, base="small", quiet=True, directory=tmp_path / "run")
    assert done.jobs["game"].state == "succeeded", done.jobs["game"].message
    lines = (tmp_path / "run" / "game" / "metrics.jsonl").read_text().splitlines()
    held_out = [line["eval"]["reward"] for line in map(json.loads, lines) if "eval" in line]
    assert held_out[-1] - held_out[0] >= 0.3, held_out
