"""Evaluations with common random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.config import EngineConfig
from motet.hosts.launch import load
from tests.support.small_runs import REWARDS, job, run

pytestmark = pytest.mark.tier1


@pytest.mark.parametrize("common", [True, False])
def test_evaluations_with_common_random_numbers_differ_only_where_the_adapter_does(
    common: bool, tmp_path: Path
) -> None:
    base = load("small", EngineConfig(threads=1, kernels="native"))
    (tmp_path / "rewards.py").write_text(REWARDS)
    evaluation = {"every": 1, "n": 4, "common_random_numbers": common}
    still = job("still", tmp_path / "rewards.py", optimizer={"lr": 1e-30}, eval=evaluation, steps=1)
    run(base, tmp_path / "run", [still], kernels="native")
    first, second = (
        [json.loads(line)["completion"] for line in path.read_text().splitlines()]
        for path in sorted((tmp_path / "run/still/rollouts").glob("eval-*.jsonl"))
    )
    assert (first == second) == common
