"""What is told before anything starts: mistakes of all jobs at once, and a reward function that has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig
from motet.errors import ConfigError, RunError
from motet.jobfile import validate
from motet.launch import load
from motet.running import run_config
from motet.types import Problem


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1))


def job(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"source": "toy:add", "size": 32, "holdout": 2},
        "reward": "exact",
        "steps": 1,
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        **fields,
    }


def run(base: Any, directory: Path, *jobs: dict[str, Any]) -> Any:
    return run_config(validate({"base": "small", "run": str(directory), "jobs": list(jobs)}, "test"), base=base)


def test_mistakes_of_all_jobs_are_told_at_once(base: Any, tmp_path: Path) -> None:
    bad = [
        job("file", data="nowhere.jsonl"),
        job("target", adapter={"target_modules": "q_prj"}),
        job("long", sampling={"max_tokens": 5000}),
    ]
    with pytest.raises(ConfigError) as caught:
        run(base, tmp_path / "run", *bad, job("good"))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["job file", "job target", "job long"]
    assert "did you mean 'q_proj'" in lines[1]
    assert not list((tmp_path / "run").glob("*/state/*"))


def test_an_edited_reward_function_is_not_taken_for_the_old(base: Any, tmp_path: Path) -> None:
    def reward(problem: Problem, completion: str) -> float:
        return float(len(completion))

    assert run(base, tmp_path, job("a", reward=reward)).ok
    assert run(base, tmp_path, job("a", reward=reward)).jobs["a"].message == "done before"
    first = reward

    def reward(problem: Problem, completion: str) -> float:  # type: ignore[no-redef]
        return -float(len(completion))

    assert first is not reward
    with pytest.raises(RunError, match="functions"):
        run(base, tmp_path, job("a", reward=reward))
