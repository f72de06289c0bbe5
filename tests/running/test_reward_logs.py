"""What reward functions log in a run, and the state of the job that they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig
from motet.config.jobfile import validate
from motet.hosts.launch import load
from motet.hosts.running import run_config
from tests.support import small_runs

REWARDS = """
def reward(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("done", trainer_state.global_step / trainer_state.max_steps)
    log_extra("epoch", [round(trainer_state.epoch, 3)] * len(completions))
    return [float(len(text)) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "index": extra_info["index"], "pred": solution_str[:3],
            "truth": ground_truth}

def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) and prompt for query, prompt in zip(queries, prompts))
    return {"rewards": [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)],
            "extra_logs": {"label": [float(label) for label in labels]}}
"""
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{n} + 1 ="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": str(n + 1)},
        "extra_info": {"index": 7},
        "right": "named",
    }
    for n in range(4)
]


@pytest.fixture(scope="module")
def small() -> Any:
    return load("small", EngineConfig(threads=1))


def test_logs_of_each_librarys_functions_reach_metrics_and_rollouts(small: Any, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    data = {"source": ROWS, "holdout": 1, "answer": "reward_model.ground_truth", "size": None}
    jobs = [
        small_runs.job(name, tmp_path, data=data, reward=f"{tmp_path / 'rewards.py'}:{name}", steps=2)
        for name in ("reward", "compute_score", "reward_func")
    ]
    for job in jobs:
        job["data"] = {**data, "answer": "right"} if job["name"] == "compute_score" else data
    small_runs.run(small, tmp_path / "run", jobs, threads=1)

    def lines(job: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / job / "metrics.jsonl").read_text().splitlines()]

    def rollouts(job: str, step: str) -> list[dict[str, Any]]:
        log = tmp_path / "run" / job / "rollouts" / f"{step}.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()]

    assert [line["reward_metrics"] for line in lines("reward")[:2]] == [{"done": 0.0}, {"done": 0.5}]
    assert {row["extra"]["epoch"] for row in rollouts("reward", "1")} == {"0.667"}  # two of three rows in each step
    assert {tuple(line["reward_metrics"].items()) for line in lines("compute_score")[:2]} == {(("index", 7.0),)}
    assert all(
        row["extra"] == {"pred": row["completion"][:3], "truth": "named"} for row in rollouts("compute_score", "0")
    )
    assert all(1 <= line["reward_metrics"]["label"] <= 4 for line in lines("reward_func")[:2])
    assert all(line["failed"] == 0 for name in ("reward", "compute_score", "reward_func") for line in lines(name)[:2])


READ_STEPS = """
def named(completions, trainer_state, **columns):
    return [len(text) / trainer_state.max_steps for text in completions]

def among_others(completions, **others):
    return [len(text) / others["trainer_state"].max_steps for text in completions]

def of_texts(completions, **columns):
    return [float(len(text)) for text in completions]
"""


def test_a_reward_that_reads_the_number_of_steps_is_told_when_it_grows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(READ_STEPS)
    for steps, grown in ((1, False), (1, False), (2, True), (3, True)):
        jobs = [
            {
                "name": name, "data": {"source": "toy:add", "size": 8, "holdout": 0}, "reward": f"{tmp_path}/mine.py:{name}",
                "steps": steps, "sampling": {"max_tokens": 3}, "algorithm": {"group_size": 2, "groups_per_step": 1},
            }
            for name in ("named", "among_others", "of_texts")
        ]  # fmt: skip
        config = validate({"base": "small", "run": str(tmp_path / "run"), "engine": {"threads": 1}, "jobs": jobs}, "x")
        done = run_config(config).jobs
        told = {name: sum("trainer_state" in one for one in job.inexact) for name, job in done.items()}
        assert told == {"named": int(grown), "among_others": int(grown), "of_texts": 0}, steps
