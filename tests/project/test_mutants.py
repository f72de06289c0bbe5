"""The quick tests of a room notice most small changes of its functions (`scripts/mutants.py`)."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())  # the script loads its tools, which takes seconds


@pytest.mark.parametrize("room", ROOMS)
def test_the_files_of_a_room_are_there(room: str) -> None:
    assert ROOMS[room].keys() == {"files", "tests", "killed"}
    assert not [file for file in ROOMS[room]["files"] if not list((ROOT / "src" / "motet").glob(file))]


@pytest.mark.soak
def test_a_room_notices_a_sample_of_mutants() -> None:
    """Of the room whose tests are quickest; `make mutants` tries all."""
    command = [sys.executable, str(ROOT / "scripts" / "mutants.py"), "core", "--count", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
