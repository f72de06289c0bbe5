"""SkyPilot accepts the file that starts Motet with it. KubeRay's schema is in no Python package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "launchers" / "skypilot.yml"
PIN = "skypilot==0.14.1"


@pytest.mark.soak
def test_skypilot_accepts_its_file(tmp_path: Path) -> None:
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PIN], check=True, timeout=1800)

    def parsed(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "task.yml").write_text(text)
        program = "import sky; print(sky.Task.from_yaml('task.yml').num_nodes, 'nodes')"
        home = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        home.pop("PYTHONPATH", None)
        command = [python, "-c", program]
        return subprocess.run(command, cwd=tmp_path, env=home, capture_output=True, text=True, check=False)

    accepted = parsed(FILE.read_text())
    assert accepted.stdout.strip().endswith("2 nodes"), accepted.stderr
    refused = parsed(FILE.read_text().replace("num_nodes:", "nodes:"))
    assert refused.returncode
    assert "'nodes'" in refused.stderr
