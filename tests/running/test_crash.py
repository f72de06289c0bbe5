"""5: nothing is lost, whichever file-system event the process is killed at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import few

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("stride", few([12, 25], 25))
def test_nothing_is_lost_at_any_moment(stride: int, tmp_path: Path) -> None:
    """Some events here; `python -m tests.support.crash_at_every_event DIRECTORY 1` kills at every single one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.support.crash_at_every_event", str(tmp_path), str(stride)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 8, done.stdout
