"""Each tracker as it is: offline, in an environment of its own (`make trackers`), sent a run and read back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from bench.speed.envs import directory, python_of

from motet.observe.report.read import read_lines
from tests.support.run_directory import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "wandb", "swanlab"])
def test_a_tracker_keeps_every_step_once(tmp_path: Path, tracker: str) -> None:
    run = write_run(tmp_path / "evening")
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "WANDB__SERVICE_WAIT": "300"}  # its first start
    done = subprocess.run(
        [python_of(directory(), "trackers"), ROOT / "tests" / "support" / "trackers_run.py", run, tracker],
        env={"PATH": os.environ["PATH"], **own},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout.splitlines()[-1])
    lines = {path.parent.name: read_lines(path) for path in run.glob("*/metrics.jsonl")}
    if tracker in ("mlflow", "trackio"):
        assert kept.keys() == lines.keys()
        for name, rows in lines.items():
            rewards = {str(row["step"]): row["reward"] for row in rows if row.get("reward") is not None}
            assert {step: value for step, value in kept[name].items() if value is not None} == pytest.approx(rewards)
    else:
        assert len(kept) == len(lines)
        assert all(count > 0 for count in kept.values())
