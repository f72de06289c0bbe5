"""The example on a stock openai-agents program: it runs as it is, and learns."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = next((ROOT / ".envs" / "agents").glob("lib/python*/site-packages"), None)
PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from motet.commands.cli import main; main()"
"""Motet, with the packages of an environment behind its own."""


def ran(directory: Path, *settings: str, seconds: float) -> list[dict[str, object]]:
    """The metrics of the job that was rewarded."""
    if PACKAGES is None:
        pytest.skip("needs the environments of stock agents: make agents")
    for name in ("calculator.py", "calculator.yaml"):
        shutil.copy(ROOT / "examples" / name, directory)
    python = PACKAGES.parents[2] / "bin" / "python"
    rows = subprocess.run([python, "calculator.py"], cwd=directory, capture_output=True, check=True, timeout=PATIENCE)
    (directory / "calculator.jsonl").write_bytes(rows.stdout)
    sets = [part for setting in (*settings, f"run={directory / 'run'}") for part in ("--set", setting)]
    command = [sys.executable, "-c", PROGRAM, str(PACKAGES), "run", "calculator.yaml", *sets]
    done = subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in (directory / "run" / "calculator" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
@pytest.mark.usefixtures("smollm2_dir")
def test_the_program_learns_to_use_its_tool(tmp_path: Path) -> None:
    """On half of the example's questions and steps."""
    half = ("algorithm.groups_per_step=2", "steps=3", "data.holdout=8")
    lines = ran(tmp_path, *(f"jobs.calculator.{setting}" for setting in half), seconds=3600)
    held_out = [line["eval"]["reward"] for line in lines if "eval" in line]  # type: ignore[index]
    assert held_out[-1] - held_out[0] >= 0.3, held_out
    assert {line["logprob_gap"] for line in lines if "logprob_gap" in line} == {0.0}
